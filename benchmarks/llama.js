// llama.cpp's turn of benchmarks/models.py: node llama.js FILE TOKENS AFTER THREADS FOLDER, where FOLDER has
// node_modules/node-llama-cpp. Prints the seconds of two passes over TOKENS, of each token after them, and the bytes held.
const path = require("node:path");
const [file, tokens, after, threads, folder] = process.argv.slice(2);

async function main() {
    const place = path.resolve(folder, "node_modules/node-llama-cpp/dist/index.js");
    const {getLlama, LlamaLogLevel} = await import(place);
    const llama = await getLlama({gpu: false, build: "never", maxThreads: Number(threads), logLevel: LlamaLogLevel.error});
    const model = await llama.loadModel({modelPath: file});
    const context = await model.createContext({contextSize: 1024, batchSize: 512, threads: Number(threads)});
    const ids = Array.from({length: Number(tokens)}, (_, i) => 5 + (i * 7919) % 40000);
    const seconds = [];
    let step = 0;
    for (let turn = 0; turn < 2; ++turn) {
        const sequence = context.getSequence();
        let start = performance.now();
        await sequence.evaluateWithoutGeneratingNewTokens(ids);
        seconds.push((performance.now() - start) / 1e3);
        let made = 0;
        start = performance.now();
        for await (const _ of sequence.evaluate([11], {temperature: 0})) if (++made === Number(after)) break;
        step = (performance.now() - start) / 1e3 / made;
        sequence.dispose();
    }
    console.log(JSON.stringify([...seconds, step, process.memoryUsage.rss()]));
    process.exit(0);
}

main();
