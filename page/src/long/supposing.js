// A head under what is supposed: the same head with other rules and other numbers in q, k and v.

import { dot, logit, MASKED, range, rowInto, rowLogsumexp } from "../attention.js";
import { asRun, edited, isAsRun, supposed } from "../head.js";

/** @typedef {import("../attention.js").Rows} Rows */
/** @typedef {import("../head.js").WhatIf} WhatIf */
/** @typedef {import("./source.js").Head} Head */

export const KEPT = 2 ** 20; // weights: of heads up to this size scores and weights are kept

/** @type {WeakMap<Head, Head>} */
const latest = new WeakMap();
/** @type {WeakMap<Head, Float64Array>} */
const scores = new WeakMap();

/** The head under what is supposed: itself where nothing is, or where the page has not its q and k. @param {Head} head @param {WhatIf} what @returns {Head} */
export function under(head, what) {
  const { computing: c, n, m } = head;
  if (!c || isAsRun(what)) return head;
  const name = JSON.stringify(what);
  const known = latest.get(head);
  if (known?.supposition === name) return known;
  const rules = supposed(head.rules, what);
  const rows = { q: edited("q", c.q, n, what), k: edited("k", c.k, m, what), v: c.v && edited("v", c.v, m, what) };
  const same = rows.q === c.q && rows.k === c.k;
  const rowOf = n * m <= KEPT ? keeping(head, rows, rules, same) : computing(rows, rules, n, m).rowInto;
  const made = {
    ...head,
    supposition: name,
    rules,
    small: {},
    wide: () => Promise.resolve({}),
    received: null,
    computing: { ...c, ...rows, bound: () => 0, rowInto: rowOf },
  };
  latest.set(head, made);
  return made;
}

/** The same rules for another head: edited numbers belong to the chosen one. @param {Head} head @param {WhatIf} what */
export const underRules = (head, what) => under(head, { ...what, values: asRun().values });

/** @typedef {(i: number, from: number, to: number, out: Float32Array, place: number) => void} RowInto */

/** Weights by the row. @param {{q: Rows, k: Rows}} rows @param {import("../attention.js").Rules} rules @param {number} n @param {number} m @param {import("../attention.js").Numbers} [given]      the log-sum-exp of each query, where it is known */
export function computing({ q, k }, rules, n, m, given) {
  const L = given ?? new Float64Array(n);
  const known = new Uint8Array(n).fill(given ? 1 : 0);
  const line = new Float64Array(m);
  const know = (/** @type {number} */ i) => {
    if (!known[i]) L[i] = rowLogsumexp(q, k, rules, i, line);
    known[i] = 1;
  };
  /** A query's weights on keys from…to. @type {RowInto}      place: where in `out` key `from` stands */
  const into = (i, from, to, out, place) => (know(i), rowInto(q, k, L, rules, i, from, to, out, place));
  return { L, know, rowInto: into };
}

/** Of a small head the scores are kept from one supposition to the next, and a query's weights once they are computed. @param {Head} head @param {{q: Rows, k: Rows}} rows @param {import("../attention.js").Rules} rules @param {boolean} same      q and k are the run's @returns {RowInto} */
function keeping(head, { q, k }, rules, same) {
  const { n, m } = head;
  const S = (same && scores.get(head)) || new Float64Array(n * m).fill(NaN);
  if (same) scores.set(head, S);
  const weights = new Float32Array(n * m);
  const known = new Uint8Array(n);
  const line = new Float64Array(m);
  const know = (/** @type {number} */ i) => {
    known[i] = 1;
    const row = weights.subarray(i * m, (i + 1) * m).fill(MASKED);
    const [first, end] = range(rules, i);
    const [low, high] = [Math.max(0, first), Math.min(m, end)];
    let top = rules.sink;
    for (let j = low; j < high; j++) {
      const at = i * m + j;
      if (Number.isNaN(S[at])) S[at] = dot(q, i, k, j);
      line[j] = logit(rules, S[at], i, j);
      top = Math.max(top, line[j]);
    }
    let sum = Math.exp(rules.sink - top);
    for (let j = low; j < high; j++) if (line[j] !== -Infinity) sum += line[j] = Math.exp(line[j] - top);
    for (let j = low; j < high; j++) if (line[j] !== -Infinity) row[j] = line[j] / sum;
  };
  return (i, from, to, out, place) => {
    if (!known[i]) know(i);
    out.set(weights.subarray(i * m + from, i * m + to), place);
  };
}
