// For tests/test_page_values.py and tests/test_long_files.py: reads a page's file as the browser would, and prints what it
// makes of some heads as JSON.
//   node page/check/head.js page.html steps                                         all numbers of every head of the steps
//   node page/check/head.js page.html cells '[[head, query, key], …]'                the arithmetic of cells
//   node page/check/head.js page.html tiles '[{"layer": 0, "head": 0, "level": 1, "row": 0, "col": 0}]'
import { readFileSync } from "node:fs";
import { load, openPage } from "../src/container.js";
import { headOf } from "../src/head.js";
import { headAt } from "../src/long/source.js";
import { pixelRow, SIDE } from "../src/long/tiles.js";
import { listOf } from "../src/numbers.js";

globalThis.requestAnimationFrame = (then) => setTimeout(then);
const [, , path, what, wanted = "[]"] = process.argv;
const parts = readFileSync(path, "utf8").matchAll(/<script type="[^"]+" id="([^"]+)">([^<]*)/g);
const texts = new Map([...parts].map(([, id, text]) => [id, text]));
const page = await openPage((id) => texts.get(id));
const plain = (x) => (Number.isFinite(x) ? x : String(x));
const grid = (rows, cols, value) => listOf(rows, (i) => listOf(cols, (j) => plain(value(i, j))));

const ofSteps = (head) => {
  const { n, m } = head;
  const tile = new Float32Array(n * m);
  for (let i = 0; i < n; i++) head.rowInto(i, 0, m, tile, i * m);
  return {
    scores: grid(n, m, head.scores),
    masked: grid(n, m, head.masked),
    weights: grid(n, m, head.weights),
    output: grid(n, head.dv, head.output),
    tile: grid(n, m, (i, j) => Math.max(0, tile[i * m + j])),
  };
};

const ofCell = ({ computing }, i, j) => {
  const { weights, bound, lost, v, dv, output } = computing;
  const [every, share] = [listOf(dv, (c) => c), bound(i) + lost];
  return {
    ...{ weight: weights(i, j), bound: bound(i), lost },
    value: every.map((c) => v(j, c)),
    output: every.map((c) => output(i, c)),
    off: every.map((c) => output(i, dv + c) * share),
  };
};

const ofTile = (head, level, row, col) => {
  const tile = new Float32Array(SIDE * SIDE).fill(-1);
  for (let y = 0; y < SIDE; y++) pixelRow({ head, level, row, col }, y, tile);
  return { tile: [...tile], bounds: listOf(head.n, head.computing.bound) };
};

const results = [];
const open = async (layer, number) => {
  const head = await headAt(page, { run: 0, layer, head: number });
  await head.loading;
  return head;
};
if (what === "steps") {
  for (const name of Object.keys(page.header.arrays)) await load(page, name);
  for (const layer of page.header.layers)
    for (let batch = 0; batch < layer.batch; batch++)
      for (let number = 0; number < layer.heads; number++) results.push(ofSteps(headOf(page, layer, batch, number)));
}
for (const each of JSON.parse(wanted))
  if (what === "cells") results.push(ofCell(await open(0, each[0]), each[1], each[2]));
  else results.push(ofTile(await open(each.layer, each.head), each.level, each.row, each.col));
console.log(JSON.stringify(results));
