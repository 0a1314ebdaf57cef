// For tests/test_long_view.py: reads a long view's file as the browser would, and prints tiles of weights as JSON.
//   node page/check/tiles.js page.html '[{"layer": 0, "head": 0, "level": 1, "row": 0, "col": 0}]'
import { headAt } from "../src/long/source.js";
import { pixelRow, SIDE } from "../src/long/tiles.js";
import { openFile } from "./file.js";

const page = openFile(process.argv[2]);
const results = [];
for (const { layer, head: number, ...wanted } of JSON.parse(process.argv[3])) {
  const head = await headAt(page, { run: 0, layer, head: number });
  await head.loading;
  const out = new Float32Array(SIDE * SIDE).fill(-1);
  for (let y = 0; y < SIDE; y++) pixelRow({ head, ...wanted }, y, out);
  const bounds = Array.from({ length: head.n }, (_, i) => head.computing.bound(i));
  results.push({ tile: [...out], bounds });
}
console.log(JSON.stringify(results));
