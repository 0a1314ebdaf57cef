// A head under what is supposed: the same head with other rules and other numbers in q, k and v.

import { dot, logit, MASKED, range, rowInto, rowLogsumexp } from "../attention.js";
import { asRun, edited, isAsRun, supposed } from "../head.js";

/** @typedef {import("../attention.js").Rows} Rows */
/** @typedef {import("../head.js").WhatIf} WhatIf */
/** @typedef {import("./source.js").Head} Head */

export const KEPT = 2 ** 20; // weights: of heads up to this size products and weights are kept

/** @type {WeakMap<Head, Head>} */
const latest = new WeakMap();
/** @type {WeakMap<Rows, {other: Rows, kept: Float64Array}>} */
const products = new WeakMap();

/** The head under what is supposed: itself where nothing is, or where the page has not its q and k. @param {Head} head @param {WhatIf} what @returns {Head} */
export function under(head, what) {
  const { computing: c, n, m } = head;
  if (!c || isAsRun(what)) return head;
  const name = JSON.stringify(what);
  const known = latest.get(head);
  if (known?.supposition === name) return known;
  const rules = supposed(head.rules, what);
  const rows = { q: edited("q", c.q, n, what), k: edited("k", c.k, m, what), v: c.v && edited("v", c.v, m, what) };
  const rowOf = n * m <= KEPT ? keeping(rows, rules, n, m) : computing(rows, rules, n, m).rowInto;
  const made = {
    ...head,
    supposition: name,
    served: false, // computed here, even where the run's own come from a server
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

/** The product of any two rows; those of small heads are kept, since most suppositions leave them as they are. @param {Rows} a @param {number} n @param {Rows} b @param {number} m @returns {import("../attention.js").Cell} */
export function dots(a, n, b, m) {
  if (n * m > KEPT) return (i, j) => dot(a, i, b, j);
  const found = products.get(a);
  const kept = found?.other === b ? found.kept : new Float64Array(n * m).fill(NaN);
  products.set(a, { other: b, kept });
  return (i, j) => {
    const at = i * m + j;
    if (Number.isNaN(kept[at])) kept[at] = dot(a, i, b, j);
    return kept[at];
  };
}

/** Of a small head a query's weights are kept once they are computed. @param {{q: Rows, k: Rows}} rows @param {import("../attention.js").Rules} rules @param {number} n @param {number} m @returns {RowInto} */
function keeping({ q, k }, rules, n, m) {
  const score = dots(q, n, k, m);
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
      line[j] = logit(rules, score(i, j), i, j);
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
