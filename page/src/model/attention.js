// One layer's attention as the reader has changed it: what a query sees, the scale, the temperature, and over what the
// softmax runs.

import { logsumexp } from "../attention.js";

/** Nothing changed. @returns {Change} */
export const unchanged = () => ({
  hidden: [],
  cuts: [],
  off: [],
  scale: "sqrt",
  causal: true,
  temperature: 1,
  over: "rows",
});

/** The scale: what scores are multiplied by. @param {Change} change @param {number} width      d_k */
export const factor = ({ scale }, width) => (scale === "none" ? 1 : scale === "d_k" ? 1 / width : 1 / Math.sqrt(width));

/**
 * Whether each query may see each key, (n, n): the mask, hidden words, which no other token sees (in place of
 * the first one another token stands), and cut edges.
 * @param {Change} change @param {number} layer @param {number} head @param {number} n
 */
export function visible(change, layer, head, n) {
  const seen = new Uint8Array(n * n);
  for (let i = 0; i < n; i++) seen.fill(1, i * n, i * n + (change.causal ? i + 1 : n));
  for (const key of change.hidden) for (let i = 0; i < n; i++) if (key && i !== key && key < n) seen[i * n + key] = 0;
  for (const [ofLayer, ofHead, query, key] of change.cuts)
    if (ofLayer === layer && ofHead === head && query < n && key < n) seen[query * n + key] = 0;
  return seen;
}

/**
 * One head's weights, (n, n), and the log-sum-exp of each query, or of each key where the softmax runs over columns.
 * @param {Change} change @param {Uint8Array} seen @param {Float32Array[]} rows      q, k and v, (n, size) each
 * @param {number} size @param {number} end      of the rows whose output is written
 * @param {Float32Array} outputs      (n, width) @param {number} first      the head's column in it @param {number} width
 */
export function attend(change, seen, [q, k, v], size, end, outputs, first, width) {
  const [n, times, { over }] = [q.length / size, factor(change, size) / change.temperature, change];
  const logits = new Float64Array(n * n).fill(-Infinity);
  for (let i = 0, at = 0; i < n; i++)
    for (let j = 0; j < n; j++, at++) {
      if (!seen[at]) continue;
      let score = 0;
      for (let c = 0, from = i * size, to = j * size; c < size; c++) score += q[from + c] * k[to + c];
      logits[at] = score * times;
    }
  const sumOf = (/** @type {number} */ count, /** @type {number} */ start, /** @type {number} */ step) =>
    logsumexp(count, (at) => logits[start + at * step], -Infinity);
  const whole = over === "all" ? sumOf(n * n, 0, 1) : 0;
  const sums = Float64Array.from({ length: n }, (_, i) =>
    over === "all" ? whole : over === "rows" ? sumOf(n, i * n, 1) : sumOf(n, i, n),
  );
  const weights = new Float32Array(n * n);
  for (let i = 0, at = 0; i < n; i++)
    for (let j = 0; j < n; j++, at++) {
      if (!seen[at]) continue;
      const weight = (weights[at] = Math.exp(logits[at] - sums[over === "columns" ? j : i]));
      const [from, to] = [j * size, i * width + first];
      if (i < end) for (let c = 0; c < size; c++) outputs[to + c] += weight * v[from + c];
    }
  return { weights, sums };
}
