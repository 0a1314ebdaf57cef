// One head, computed when it is shown: scores, weights and output, from q, k, v and the rules, in float64.

import { biased, capped, dot, logit, logsumexp, rulesOf, visible } from "./attention.js";

/** @returns {WhatIf} */
export const asRun = () => ({ scale: true, temperature: 1, causal: null, window: null, cuts: [], values: {} });

/** @param {WhatIf} w */
export const isAsRun = (w) =>
  w.scale &&
  w.temperature === 1 &&
  w.causal === null &&
  w.window === null &&
  !w.cuts.length &&
  !Object.keys(w.values).length;

/** The rules under what is supposed. @param {Rules} r @param {WhatIf} w */
export function supposed(r, w) {
  const rules = { ...r, temperature: w.temperature };
  if (!w.scale) rules.scale = 1;
  if (w.causal !== null) rules.causal = w.causal;
  if (w.window !== null) rules.window = [w.window, rules.window[1]];
  if (w.cuts.length) {
    /** @type {Map<number, number[]>} of a key the queries that do not see it */
    const cut = new Map();
    for (const [i, j] of w.cuts) cut.set(j, [...(cut.get(j) ?? []), i]);
    rules.allowed = (i, j) => !cut.get(j)?.some((query) => query < 0 || query === i) && (!r.allowed || r.allowed(i, j));
  }
  return rules;
}

/** The rows of q, k or v with the numbers that are supposed; the same rows where none is. @param {string} name @param {Rows} rows @param {number} count @param {WhatIf} what */
export function edited(name, rows, count, { values }) {
  const changes = Object.entries(values).filter(([key]) => key.startsWith(`${name} `));
  if (!changes.length) return rows;
  const { data, start, width } = rows;
  const numbers = Float64Array.from(/** @type {ArrayLike<number>} */ (data.subarray(start, start + count * width)));
  for (const [key, value] of changes) {
    const [, row, col] = key.split(" ").map(Number);
    numbers[row * width + col] = value;
  }
  return { data: numbers, start: 0, width };
}

/**
 * @param {Page} page @param {any} layer @param {number} batch @param {number} number @param {WhatIf} whatIf
 * @param {Float64Array} [known]      the raw scores, if computed before: they do not depend on what is supposed
 */
export function headOf(page, layer, batch, number, whatIf, known) {
  const rules = supposed(rulesOf(page, layer, batch, number), whatIf);
  const n = layer.queries;
  const m = layer.keys;
  const shared = Math.floor(number / (layer.heads / layer.kv_heads));
  /** @param {string} name @param {number} head @param {number} length */
  const rows = (name, head, length) => {
    const { data, shape } = page.array(layer.arrays[name]);
    const width = shape[3];
    const start = (batch * shape[1] + head) * length * width;
    return edited(name, { data, width, start }, length, whatIf);
  };
  const q = rows("q", number, n);
  const k = rows("k", shared, m);
  const v = rows("v", shared, m);
  const S = known ?? new Float64Array(n * m);
  if (!known) for (let i = 0; i < n; i++) for (let j = 0; j < m; j++) S[i * m + j] = dot(q, i, k, j);
  const L = new Float64Array(n);
  const masked = (/** @type {number} */ i, /** @type {number} */ j) => logit(rules, S[i * m + j], i, j);
  for (let i = 0; i < n; i++) L[i] = logsumexp(m, (j) => masked(i, j), rules.sink);
  const weight = (/** @type {number} */ i, /** @type {number} */ j) => {
    const x = masked(i, j);
    return x === -Infinity ? 0 : Math.exp(x - L[i]);
  };
  /** @type {Float64Array | null} */
  let O = null;
  const computeOutput = () => {
    const made = new Float64Array(n * v.width);
    for (let i = 0; i < n; i++)
      for (let j = 0; j < m; j++) {
        const a = weight(i, j);
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
    raw: S,
    scores: (/** @type {number} */ i, /** @type {number} */ j) => S[i * m + j],
    scaled,
    capped: (/** @type {number} */ i, /** @type {number} */ j) => capped(rules, scaled(i, j)),
    biased: (/** @type {number} */ i, /** @type {number} */ j) => biased(rules, capped(rules, scaled(i, j)), i, j),
    masked, // the logits, divided by the temperature
    visible: (/** @type {number} */ i, /** @type {number} */ j) => visible(rules, i, j),
    logsumexp: (/** @type {number} */ i) => L[i],
    weights: weight,
    output,
  };
}
