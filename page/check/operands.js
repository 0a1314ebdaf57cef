// For tests/test_view.py: reads the server's answers as the page would, and prints each cell's arithmetic as JSON.
//   node page/check/operands.js cells.json
import { readFileSync } from "node:fs";
import { cell, outputAt, problemOf, rowAt } from "../src/dive/problem.js";
import { asRun } from "../src/head.js";
import { operandsAt } from "../src/long/operands.js";

const results = [];
for (const { layer, i, j, answer } of JSON.parse(readFileSync(process.argv[2], "utf8"))) {
  globalThis.fetch = async () => new Response(Buffer.from(answer, "base64"));
  const head = { address: {}, layer, n: layer.queries, m: layer.keys, served: true };
  const part = await operandsAt(head, i, j);
  const problem = part?.problem ?? problemOf(head, asRun());
  const row = part?.row ?? rowAt(problem, i);
  const bound = part?.bound ?? head.computing.bound(i);
  const { v } = problem;
  const wide = v ? Array.from({ length: v.width }, (_, c) => c) : [];
  const numbers = {
    score: row.scores[j],
    logit: row.logits[j],
    logsumexp: row.L,
    weight: row.weights[j],
    seen: row.seen,
    value: wide.map((c) => cell(v, j, c)),
    output: wide.map((c) => outputAt(problem, row, c)[0]),
    off: wide.map((c) => outputAt(problem, row, c, bound)[1]),
    bound,
    whole: !part,
  };
  results.push(JSON.parse(JSON.stringify(numbers, (_, x) => (typeof x === "number" ? String(x) : x))));
}
console.log(JSON.stringify(results));
