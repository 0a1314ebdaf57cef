// One head, computed when it is shown: scores, weights and output, from q, k, v and the rules, in float64.

import { biased, capped, dot, logit, logsumexp, rulesOf, sumAt, visible } from "./attention.js";

/**
 * @param {Page} page @param {any} layer @param {number} batch @param {number} number
 */
export function headOf(page, layer, batch, number) {
  const rules = rulesOf(page, layer, batch, number);
  const n = layer.queries;
  const m = layer.keys;
  const shared = Math.floor(number / (layer.heads / layer.kv_heads));
  /** @param {string} name @param {number} head @param {number} length */
  const rows = (name, head, length) => {
    const { data, shape } = page.array(layer.arrays[name]);
    const width = shape[3];
    const start = (batch * shape[1] + head) * length * width;
    return { data, width, start };
  };
  const q = rows("q", number, n);
  const k = rows("k", shared, m);
  const v = rows("v", shared, m);
  const S = new Float64Array(n * m);
  for (let i = 0; i < n; i++) for (let j = 0; j < m; j++) S[i * m + j] = dot(q, i, k, j);
  const masked = (/** @type {number} */ i, /** @type {number} */ j) => logit(rules, S[i * m + j], i, j);
  const own = () => Float64Array.from({ length: n }, (_, i) => logsumexp(m, (j) => masked(i, j), rules.sink));
  const from = (batch * layer.heads + number) * n;
  const L = rules.over === "rows" ? own() : page.array(layer.arrays.logsumexp).data.subarray(from, from + n);
  const weight = (/** @type {number} */ i, /** @type {number} */ j) => {
    const x = masked(i, j);
    return x === -Infinity ? 0 : Math.exp(x - L[sumAt(rules, i, j)]);
  };
  const off = layer.off?.includes(number); // by the reader
  /** @type {Float64Array | null} */
  let O = null;
  const computeOutput = () => {
    const made = new Float64Array(n * v.width);
    for (let i = 0; i < n; i++)
      for (let j = 0; j < m; j++) {
        const a = off ? 0 : weight(i, j);
        if (masked(i, j) === -Infinity) continue; // masked: 0·NaN would be NaN
        for (let c = 0; c < v.width; c++) made[i * v.width + c] += a * v.data[v.start + j * v.width + c];
      }
    return made;
  };
  const output = (/** @type {number} */ i, /** @type {number} */ c) => (O ??= computeOutput())[i * v.width + c];
  const scaled = (/** @type {number} */ i, /** @type {number} */ j) => S[i * m + j] * rules.scale;
  return {
    n,
    m,
    number,
    shared,
    rules,
    dk: q.width,
    dv: v.width,
    q: (/** @type {number} */ i, /** @type {number} */ c) => q.data[q.start + i * q.width + c],
    k: (/** @type {number} */ j, /** @type {number} */ c) => k.data[k.start + j * k.width + c],
    v: (/** @type {number} */ j, /** @type {number} */ c) => v.data[v.start + j * v.width + c],
    off,
    scores: (/** @type {number} */ i, /** @type {number} */ j) => S[i * m + j],
    scaled,
    capped: (/** @type {number} */ i, /** @type {number} */ j) => capped(rules, scaled(i, j)),
    biased: (/** @type {number} */ i, /** @type {number} */ j) => biased(rules, capped(rules, scaled(i, j)), i, j),
    masked, // the logits, divided by the temperature
    visible: (/** @type {number} */ i, /** @type {number} */ j) => visible(rules, i, j),
    logsumexp: (/** @type {number} */ i, j = 0) => L[sumAt(rules, i, j)],
    weights: weight,
    output,
  };
}
