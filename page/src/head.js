// One head's numbers, from q, k, v and the rules, in float64: what the steps, the map and a weight's arithmetic show.

import { biased, capped, dot, logit, rowInto, rowLogsumexp, rulesOf, sumAt, visible } from "./attention.js";
import { kept } from "./numbers.js";

const MOST = 2 ** 22; // scores: of so many the rows are kept

/**
 * Rows are computed when they are asked for.
 * @param {object} given
 * @param {Rows} given.q @param {Rows} given.k @param {Rows | null} given.v @param {number} given.n @param {number} given.m
 * @param {Rules} given.rules
 * @param {Numbers | null} given.sums      log-sum-exps, where they are known: of queries, or of keys if the softmax runs over columns
 * @param {boolean} [given.off]      by the reader: it puts out zeros
 */
export function computing({ q, k, v, n, m, rules, sums, off }) {
  const L = sums ?? new Float64Array(n);
  const known = new Uint8Array(n).fill(sums ? 1 : 0);
  const room = new Float64Array(m);
  const know = (/** @type {number} */ i) => {
    if (!known[i]) L[i] = rowLogsumexp(q, k, rules, i, room);
    known[i] = 1;
  };
  /** @type {Map<number, {scores: Float64Array, output: Float64Array | null}>} */
  const lines = new Map();
  const line = (/** @type {number} */ i) => {
    if (lines.size * m > MOST) lines.clear();
    return kept(lines, i, () => ({
      scores: Float64Array.from({ length: m }, (_, j) => dot(q, i, k, j)),
      output: null,
    }));
  };
  /** A query's output, and then the sizes of what was summed. @param {number} i */
  const outputOf = (i) => {
    const width = v?.width ?? 0;
    const made = new Float64Array(2 * width);
    for (let j = 0; v && j < m; j++) {
      if (masked(i, j) === -Infinity) continue; // 0·NaN would be NaN
      const a = off ? 0 : weights(i, j);
      for (let c = 0; c < width; c++) {
        const part = a * v.data[v.start + j * width + c];
        made[c] += part;
        made[width + c] += Math.abs(part);
      }
    }
    return made;
  };
  /** A number of q, k or v. @param {Rows | null} x @returns {Cell} */
  const numberOf = (x) => (i, c) => (x ? x.data[x.start + i * x.width + c] : NaN);
  /** @type {Cell} */
  const scores = (i, j) => line(i).scores[j];
  /** @type {Cell} */
  const scaled = (i, j) => scores(i, j) * rules.scale;
  /** @type {Cell} */
  const afterCap = (i, j) => capped(rules, scaled(i, j));
  /** @type {Cell} */
  const masked = (i, j) => logit(rules, scores(i, j), i, j);
  /** @type {(i: number, j?: number) => number} */
  const logsumexp = (i, j = 0) => (know(i), L[sumAt(rules, i, j)]);
  /** @type {Cell} */
  const weights = (i, j) => (masked(i, j) === -Infinity ? 0 : Math.exp(masked(i, j) - logsumexp(i, j)));
  const output = (/** @type {number} */ i, /** @type {number} */ c) => (line(i).output ??= outputOf(i))[c];
  return {
    ...{ n, m, rules, L, rows: { q, k, v }, dk: q.width, dv: v?.width ?? 0 },
    ...{ q: numberOf(q), k: numberOf(k), v: numberOf(v), scores, scaled, capped: afterCap },
    biased: /** @type {Cell} */ ((i, j) => biased(rules, afterCap(i, j), i, j)),
    masked, // the logits, divided by the temperature
    visible: (/** @type {number} */ i, /** @type {number} */ j) => visible(rules, i, j),
    ...{ logsumexp, weights, output },
    /** A query's weights on keys from…to. @type {(i: number, from: number, to: number, out: Float32Array, place: number) => void}      place: where in `out` key `from` stands */
    rowInto: (i, from, to, out, place) => (know(i), rowInto(q, k, L, rules, i, from, to, out, place)),
  };
}

/** A head of the steps. @param {Page} page @param {any} layer @param {number} batch @param {number} number */
export function headOf(page, layer, batch, number) {
  const { queries: n, keys: m, heads, kv_heads, arrays } = layer;
  const rules = rulesOf(page, layer, batch, number);
  const shared = Math.floor(number / (heads / kv_heads));
  const rows = (/** @type {string} */ name, /** @type {number} */ head, /** @type {number} */ length) => {
    const { data, shape } = page.array(arrays[name]);
    return { data, width: shape[3], start: (batch * shape[1] + head) * length * shape[3] };
  };
  const from = (batch * heads + number) * n;
  const sums = rules.over === "rows" ? null : page.array(arrays.logsumexp).data.subarray(from, from + n);
  const [q, k, v] = [rows("q", number, n), rows("k", shared, m), rows("v", shared, m)];
  return { number, shared, ...computing({ q, k, v, n, m, rules, sums, off: layer.off?.includes(number) }) };
}
