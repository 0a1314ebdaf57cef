import assert from "node:assert/strict";
import { test } from "node:test";

test("what is negative has the opposite colour, as far from paper as what is positive", async () => {
  const style = { setProperty: () => {} };
  const createElement = () => ({ style, append: () => {}, setAttribute: () => {}, classList: { add: () => {} } });
  const document = { createElement, body: { append: () => {} } };
  Object.assign(globalThis, { document, Node: class {}, getComputedStyle: () => ({ color: "rgb(1, 2, 3)" }) });
  const { signed } = await import("../src/colour.js");
  const { shade } = signed("effect", 2);
  assert.deepEqual([-2, -1, 0, 1, 2].map(shade), [0, 0.25, 0.5, 0.75, 1]);
});
