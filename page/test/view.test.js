import assert from "node:assert/strict";
import { test } from "node:test";
import { cellAt, follow, frame, settle, showWhole, zoom } from "../src/long/view.js";

test("the view stays inside the matrix, and a zoom keeps its point where it is", () => {
  for (const [n, m, width] of [
    [24, 24, 780],
    [10000, 500, 780],
    [3, 9000, 400],
    [1, 1, 300],
  ]) {
    const shown = { queries: n, keys: m, view: { y: 0, x: 0, step: 1 }, chosen: { query: n - 1, key: m >> 1 } };
    const f = frame(width, shown);
    const inside = () => {
      const { y, x, step } = shown.view;
      const low = y >= 0 && x >= 0;
      assert.ok(low && y <= Math.max(0, n - f.high * step) && x <= Math.max(0, m - f.side * step), `${n} ${m}`);
    };
    showWhole(shown, f);
    inside();
    const [left, top] = [f.left + 50, f.top + 50];
    const before = cellAt(shown, f, left, top);
    if (before) zoom(shown, f, 0.7, before.y, before.x);
    inside();
    const after = cellAt(shown, f, left, top);
    if (before && shown.view.step > 1 / 48) assert.ok(Math.hypot(after.x - before.x, after.y - before.y) < 1e-6);
    follow(shown, f);
    inside();
    const { y, x, step } = shown.view;
    const [i, j] = [(shown.chosen.query - y) / step, (shown.chosen.key - x) / step];
    assert.ok(i > -1e-6 && i + 1 / step < f.high + 1e-6 && j > -1e-6 && j + 1 / step < f.side + 1e-6);
    Object.assign(shown.view, { y: -5, x: 1e9, step: 1e9 });
    settle(shown, f);
    inside();
    assert.equal(cellAt(shown, f, f.left - 1, f.top), null);
  }
});
