// A head under what is supposed: the same head with other rules and other numbers in q, k and v.

import { dot, logit, MASKED, range, rowInto, rowLogsumexp } from "../attention.js";
import { asRun, isAsRun, supposed } from "../head.js";

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
  const rowOf = n * m <= KEPT ? keeping(head, rows, rules, same) : computing(rows, rules, n, m);
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

/** @param {string} name @param {Rows} rows @param {number} count @param {WhatIf} what @returns {Rows} */
function edited(name, rows, count, { values }) {
  const changes = Object.entries(values).filter(([key]) => key.startsWith(`${name} `));
  if (!changes.length) return rows;
  const { data, at, width } = rows;
  const own = Float64Array.from(/** @type {ArrayLike<number>} */ (data.subarray(at, at + count * width)));
  for (const [key, value] of changes) {
    const [, row, col] = key.split(" ").map(Number);
    own[row * width + col] = value;
  }
  return { data: own, at: 0, width };
}

/** @typedef {(i: number, from: number, to: number, out: Float32Array, place: number) => void} RowInto */

/** @param {{q: Rows, k: Rows}} rows @param {import("../attention.js").Rules} rules @param {number} n @param {number} m @returns {RowInto} */
function computing({ q, k }, rules, n, m) {
  const L = new Float64Array(n).fill(NaN);
  const line = new Float64Array(m);
  const known = new Uint8Array(n);
  return (i, from, to, out, place) => {
    if (!known[i]) L[i] = rowLogsumexp(q, k, rules, i, line);
    known[i] = 1;
    rowInto(q, k, L, rules, i, from, to, out, place);
  };
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
