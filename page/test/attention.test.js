import assert from "node:assert/strict";
import { test } from "node:test";
import { logit, logsumexp, MASKED, rowInto, visible } from "../src/attention.js";

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
const rows = (numbers, width) => ({ data: Float64Array.from(numbers), start: 0, width });

const whole = (q, k, L, rules, n, m) => {
  const out = new Float32Array(n * m);
  for (let i = 0; i < n; i++) rowInto(q, k, L, rules, i, 0, m, out, i * m);
  return out;
};

test("the tutorial's example comes out right", () => {
  const [q, k] = [rows([1, 3, 2, 0.5], 2), rows([0.5, 2, 1, 3], 2)];
  const rules = { ...plain, scale: 1 / Math.SQRT2 };
  const L = [0, 1].map((i) =>
    logsumexp(
      2,
      (j) =>
        logit(
          rules,
          [
            [6.5, 10],
            [2, 3.5],
          ][i][j],
          i,
          j,
        ),
      -Infinity,
    ),
  );
  const weights = whole(q, k, L, rules, 2, 2);
  [0.0776, 0.9224, 0.2572, 0.7428].forEach((a, index) => assert.ok(Math.abs(weights[index] - a) < 1e-4));
});

test("causal, window, lengths and masks say who may see whom", () => {
  const seen = (rules) =>
    [0, 1, 2].map((i) => [0, 1, 2].map((j) => (visible({ ...plain, ...rules }, i, j) ? 1 : 0)).join("")).join(" ");
  assert.equal(seen({}), "111 111 111");
  assert.equal(seen({ causal: true }), "100 110 111");
  assert.equal(seen({ causal: true, offset: 1 }), "110 111 111");
  assert.equal(seen({ window: [1, 0] }), "100 110 011");
  assert.equal(seen({ window: [null, 1] }), "110 111 111");
  assert.equal(seen({ keys: 2, queries: 2 }), "110 110 000");
  assert.equal(seen({ allowed: (i, j) => i !== j }), "011 101 110");
  assert.equal(seen({ bias: (i, j) => (j === 1 ? -Infinity : 1) }), "101 101 101");
});

test("rules act in their order", () => {
  const rules = { ...plain, scale: 2, softcap: 5, bias: () => 0.25, slope: 0.5, temperature: 2 };
  assert.equal(logit(rules, 3, 0, 2), (5 * Math.tanh(6 / 5) + 0.25 - 1) / 2);
});

test("a row that sees nothing has no sum; a sink adds one logit", () => {
  assert.equal(
    logsumexp(2, () => -Infinity, 1),
    -Infinity,
  );
  assert.ok(Math.abs(logsumexp(2, () => 0, 0) - Math.log(3)) < 1e-15);
  assert.deepEqual(
    [...whole(rows([1], 1), rows([1, 1], 1), [-Infinity], { ...plain, queries: 0 }, 1, 2)],
    [MASKED, MASKED],
  );
});

test("the quick way and the rules themselves agree on who is seen, in any part of a row", () => {
  const [q, k] = [rows([1, 2, 3, 4], 1), rows([1, -1, 2, 0.5, 1], 1)];
  for (const rules of [
    { causal: true, offset: 1 },
    { window: [1, 1] },
    { window: [null, 0], keys: 3 },
    { queries: 2 },
    { softcap: 2, window: [2, 0] },
  ])
    for (let i = 0; i < 4; i++)
      for (const [from, to] of [
        [0, 5],
        [2, 4],
        [4, 5],
      ]) {
        const out = new Float32Array(to - from);
        rowInto(q, k, [0, 0, 0, 0], { ...plain, ...rules }, i, from, to, out, 0);
        assert.deepEqual(
          [...out].map((a) => a !== MASKED),
          [...out].map((_, index) => visible({ ...plain, ...rules }, i, from + index)),
        );
      }
});
