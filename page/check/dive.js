// For tests/test_page_values.py: reads a page's file as the browser would, and prints the arithmetic of cells as JSON.
//   node page/check/dive.js '{"page": "page.html", "cells": [[head, query, key], …]}'
import { cell, outputAt, problemOf, rowAt } from "../src/dive/problem.js";
import { openHead } from "../src/long/source.js";
import { openFile } from "./file.js";

const { page: place, cells } = JSON.parse(process.argv[2]);
const page = openFile(place);
const results = [];
for (const [number, i, j] of cells) {
  const head = await openHead(page, { run: 0, layer: 0, head: number });
  await head.loading;
  const problem = problemOf(head);
  const row = rowAt(problem, i);
  const bound = head.computing.bound(i);
  const wide = Array.from({ length: problem.v.width }, (_, c) => c);
  results.push({
    weight: row.weights[j],
    bound,
    lost: problem.vLost,
    value: wide.map((c) => cell(problem.v, j, c)),
    output: wide.map((c) => outputAt(problem, row, c)[0]),
    off: wide.map((c) => outputAt(problem, row, c, bound + problem.vLost)[1]),
  });
}
console.log(JSON.stringify(results));
