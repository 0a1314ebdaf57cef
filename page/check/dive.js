// For tests/test_page_values.py: reads a page's file as the browser would, and prints the arithmetic of cells as JSON.
//   node page/check/dive.js '{"page": "page.html", "cells": [[head, query, key], …]}'
import { readFileSync } from "node:fs";
import { openPage } from "../src/container.js";
import { cell, outputAt, problemOf, rowAt } from "../src/dive/problem.js";
import { asRun } from "../src/head.js";
import { openHead } from "../src/long/source.js";

globalThis.requestAnimationFrame = (then) => setTimeout(then);
const { page: place, cells } = JSON.parse(process.argv[2]);
const text = readFileSync(place, "utf8");
const parts = new Map(
  [...text.matchAll(/<script type="[^"]+" id="([^"]+)">([^<]*)/g)].map(([, id, body]) => [id, body]),
);
const page = openPage((id) => parts.get(id));
const found = [];
for (const [at, i, j] of cells) {
  const head = await openHead(page, { run: 0, layer: 0, head: at });
  await head.loading;
  const problem = problemOf(head, asRun());
  const row = rowAt(problem, i);
  const bound = head.computing.bound(i);
  const wide = Array.from({ length: problem.v.width }, (_, c) => c);
  found.push({
    weight: row.weights[j],
    bound,
    lost: problem.vLost,
    value: wide.map((c) => cell(problem.v, j, c)),
    output: wide.map((c) => outputAt(problem, row, c)[0]),
    off: wide.map((c) => outputAt(problem, row, c, bound + problem.vLost)[1]),
  });
}
console.log(JSON.stringify(found));
