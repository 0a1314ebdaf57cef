// For tests/test_page_values.py: reads a page's file as the browser would, and prints every head's numbers as JSON.
//   node page/check/weights.js page.html
import { rowInto, rulesOf } from "../src/attention.js";
import { headOf } from "../src/head.js";
import { load } from "../src/packed.js";
import { openFile } from "./file.js";

const page = openFile(process.argv[2]);
for (const name of Object.keys(page.header.arrays)) await load(page, name);
const plain = (x) => (Number.isFinite(x) ? x : String(x));
const grid = (rows, cols, value) =>
  Array.from({ length: rows }, (_, i) => Array.from({ length: cols }, (_, j) => plain(value(i, j))));

const results = [];
for (const layer of page.header.layers)
  for (let batch = 0; batch < layer.batch; batch++)
    for (let number = 0; number < layer.heads; number++) {
      const head = headOf(page, layer, batch, number);
      const { n, m } = head;
      const rows = (name, place, length) => {
        const { data, shape } = page.array(layer.arrays[name]);
        return { data, width: shape[3], start: (batch * shape[1] + place) * length * shape[3] };
      };
      const from = (batch * layer.heads + number) * n;
      const L = page.array(layer.arrays.logsumexp).data.subarray(from, from + n);
      const [q, k, rules] = [rows("q", number, n), rows("k", head.shared, m), rulesOf(page, layer, batch, number)];
      const weights = new Float32Array(n * m);
      for (let i = 0; i < n; i++) rowInto(q, k, L, rules, i, 0, m, weights, i * m);
      results.push({
        scores: grid(n, m, head.scores),
        masked: grid(n, m, head.masked),
        weights: grid(n, m, head.weights),
        output: grid(n, head.dv, head.output),
        tile: grid(n, m, (i, j) => Math.max(0, weights[i * m + j])),
      });
    }
console.log(JSON.stringify(results));
