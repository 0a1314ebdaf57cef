import assert from "node:assert/strict";
import { test } from "node:test";
import { range } from "../src/attention.js";
import { firstPixel, forbidden, pixel } from "../src/long/source.js";
import { cellAt, follow, frame, settle, showWhole, zoom } from "../src/long/view.js";

const plain = {
  scale: 1,
  softcap: null,
  causal: false,
  window: [null, null],
  offset: 0,
  keys: null,
  queries: null,
  allowed: null,
  bias: null,
  slope: 0,
  sink: -Infinity,
  temperature: 1,
  over: "rows",
};

test("the view stays inside the matrix, and a zoom keeps its point where it is", () => {
  for (const [n, m, width] of [
    [24, 24, 780],
    [10000, 500, 780],
    [3, 9000, 400],
    [1, 1, 300],
  ]) {
    const shown = { queries: n, keys: m, view: { y: 0, x: 0, step: 1 }, cell: { i: n - 1, j: m >> 1 } };
    const f = frame(width, shown);
    const inside = () => {
      const { y, x, step } = shown.view;
      assert.ok(
        y >= 0 && x >= 0 && y <= Math.max(0, n - f.high * step) && x <= Math.max(0, m - f.side * step),
        JSON.stringify([n, m, shown.view]),
      );
    };
    showWhole(shown, f);
    inside();
    assert.ok(shown.view.step * f.side >= m - 1e-9 && shown.view.step * f.high >= n - 1e-9);
    const [left, top] = [f.left + 50, f.top + 50];
    const before = cellAt(shown, f, left, top);
    if (before) zoom(shown, f, 0.7, before.y, before.x);
    inside();
    const after = cellAt(shown, f, left, top);
    if (before && after && shown.view.step > 1 / 48)
      assert.ok(Math.abs(after.x - before.x) < 1e-6 && Math.abs(after.y - before.y) < 1e-6);
    follow(shown, f);
    inside();
    const { y, x, step } = shown.view;
    assert.ok(
      shown.cell.i >= y - 1e-9 &&
        shown.cell.i + 1 <= y + f.high * step + 1e-9 &&
        shown.cell.j >= x - 1e-9 &&
        shown.cell.j + 1 <= x + f.side * step + 1e-9,
    );
    Object.assign(shown.view, { y: -5, x: 1e9, step: 1e9 });
    settle(shown, f);
    inside();
    assert.equal(cellAt(shown, f, f.left - 1, f.top), null);
  }
});

test("a pixel's value lies within what it says it may be off", () => {
  const largest = 0.37;
  for (const value of [0, 0.001, 0.05, 0.2, 0.37]) {
    const code = Math.round(Math.sqrt(value / largest) * 80);
    const p = {
      pixels: [1, 1],
      data: Uint8Array.of(code),
      start: 0,
      first: Uint8Array.of(code),
      firstStart: 0,
      largest,
    };
    for (const read of [pixel(p, 0, 0), firstPixel(p, 0)])
      assert.ok(Math.abs(read.value - value) <= read.off + 1e-12, `${value}: ${JSON.stringify(read)}`);
  }
});

test("a block is forbidden only where no query of it sees any key of it", () => {
  for (const rules of [
    { causal: true, offset: 2 },
    { window: [2, 1] },
    { window: [1, null], offset: 3 },
    { keys: 4 },
    { queries: 3 },
  ])
    for (let i0 = 0; i0 < 6; i0++)
      for (let i1 = i0 + 1; i1 <= 6; i1++)
        for (let j0 = 0; j0 < 8; j0++)
          for (let j1 = j0 + 1; j1 <= 8; j1++) {
            const r = { ...plain, ...rules };
            let seen = false;
            for (let i = i0; i < i1; i++) seen ||= Math.max(range(r, i)[0], j0) < Math.min(range(r, i)[1], j1);
            if (forbidden(r, i0, i1, j0, j1)) assert.ok(!seen, JSON.stringify([rules, i0, i1, j0, j1]));
            else if (rules.causal || rules.keys) assert.ok(seen, JSON.stringify([rules, i0, i1, j0, j1]));
          }
});
