// For tests/test_long_view.py: reads a long view's file as the browser would, and prints tiles of weights as JSON.
//   node page/check/tiles.js page.html '[{"layer": 0, "head": 0, "level": 1, "row": 0, "col": 0, "rule": "most", "words": false}]'
import { headAt } from "../src/long/source.js";
import { pixelRow, SIDE } from "../src/long/tiles.js";
import { tokens, words } from "../src/long/units.js";
import { openFile } from "./file.js";

const page = openFile(process.argv[2]);
const results = [];
for (const { layer, head: number, words: whole, ...wanted } of JSON.parse(process.argv[3])) {
  const head = await headAt(page, { run: 0, layer, head: number });
  await head.loading;
  const texts = page.header.runs[0].tokens;
  const offset = page.header.runs[0].layers[layer].rules.query_offset[0];
  const units = whole ? [words(texts.slice(offset, offset + head.n)), words(texts)] : [tokens(head.n), tokens(head.m)];
  const out = new Float32Array(SIDE * SIDE).fill(-1);
  for (let y = 0; y < SIDE; y++) pixelRow({ head, rows: units[0], cols: units[1], ...wanted }, y, out);
  const bounds = Array.from({ length: head.n }, (_, i) => head.computing.bound(i));
  results.push({ tile: [...out], bounds, edges: units.map((u) => u.edges && [...u.edges]) });
}
console.log(JSON.stringify(results));
