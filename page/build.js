// Builds src/ into what the Python package carries: the program and the style of a page. The same sources give the
// same bytes.
import { build } from "esbuild";
import { readFile, writeFile } from "node:fs/promises";
import { parse } from "smol-toml";
import wabt from "wabt";

const out = new URL("../src/clearhead/view/", import.meta.url);
const options = { bundle: true, minify: true, write: false, charset: "utf8", format: "iife", legalComments: "none" };
const target = ["chrome123", "firefox121", "safari17.5"];
const sentences = {
  name: "sentences", // a file of words/ in the Python package: by key, each in English and in Chinese
  setup: (/** @type {import("esbuild").PluginBuild} */ { onLoad }) =>
    onLoad({ filter: /\.toml$/ }, async ({ path }) => {
      const read = Object.entries(parse(await readFile(path, "utf8")));
      const byKey = read.map(([key, { en, zh }]) => [key, `${en}|${zh}`]);
      return { contents: `export default ${JSON.stringify(Object.fromEntries(byKey))}` };
    }),
};
const programs = {
  name: "programs", // WebAssembly, written as text
  setup: (/** @type {import("esbuild").PluginBuild} */ { onLoad }) =>
    onLoad({ filter: /\.wat$/ }, async ({ path }) => {
      const { parseWat } = await wabt();
      const { buffer } = parseWat(path, await readFile(path, "utf8"), { simd: true }).toBinary({});
      return { contents: buffer, loader: "binary" };
    }),
};

for (const kind of ["css", "js"]) {
  const entryPoints = [`src/main.${kind}`];
  const { outputFiles } = await build({ ...options, target, plugins: [sentences, programs], entryPoints });
  const text = outputFiles[0].text;
  const name = `attention.${kind}`;
  if (/<\/(script|style)|<!--/i.test(text))
    throw new Error(`${name} cannot stand inside a page: it holds </script, </style or <!--`);
  const place = new URL(name, out);
  if (process.argv.includes("--check")) {
    const committed = await readFile(place, "utf8").catch(() => "");
    if (committed !== text) throw new Error(`${name} is not what src/ builds: run npm run build in page/`);
  } else await writeFile(place, text);
  console.log(`${name} ${Buffer.byteLength(text)} bytes`);
}
