// A head under what is supposed: the same head with other rules and other numbers in q, k and v.

import { dot, logit, MASKED, range, rowInto, rowLogsumexp } from "../attention.js";
import { edited, isAsRun, supposed } from "../head.js";

export const KEPT = 2 ** 20; // weights: of heads up to this size products and weights are kept

/** What a head has not whose numbers are computed here, even where the run's own come from a server or a picture. */
export const COMPUTED = { served: false, small: null, wide: () => Promise.resolve(null), received: null };
/** @type {WeakMap<Head, {made: Head, cold: string, logits: Logits | null}>} */
const latest = new WeakMap();
/** @type {WeakMap<Rows, {other: Rows, kept: Float64Array}>} */
const products = new WeakMap();

/** The head under what is supposed: itself where nothing is, or where the page has not its q and k. @param {Head} head @param {WhatIf} what @returns {Head} */
export function under(head, what) {
  const { computing: c, n, m } = head;
  if (!c || isAsRun(what)) return head;
  const name = JSON.stringify(what);
  const known = latest.get(head);
  if (known?.made.supposition === name) return known.made;
  const rules = supposed(head.rules, what);
  const rows = { q: edited("q", c.q, n, what), k: edited("k", c.k, m, what), v: c.v && edited("v", c.v, m, what) };
  const cold = JSON.stringify({ ...what, temperature: 1 });
  const logits = n * m > KEPT ? null : known?.cold === cold ? known.logits : logitsOf(rows, rules, n, m);
  const made = {
    ...head,
    ...COMPUTED,
    supposition: name,
    rules,
    computing: {
      ...c,
      ...rows,
      bound: () => 0,
      ...(logits ? keeping(logits, rules, n, m) : { rowInto: computing(rows, rules, n, m).rowInto }),
    },
  };
  latest.set(head, { made, cold, logits });
  return made;
}

/** @typedef {(i: number, from: number, to: number, out: Float32Array, place: number) => void} RowInto */

/** Weights by the row. @param {{q: Rows, k: Rows}} rows @param {Rules} rules @param {number} n @param {number} m @param {Numbers} [lse]      the log-sum-exp of each query, where it is known */
export function computing({ q, k }, rules, n, m, lse) {
  const L = lse ?? new Float64Array(n);
  const known = new Uint8Array(n).fill(lse ? 1 : 0);
  const line = new Float64Array(m);
  const know = (/** @type {number} */ i) => {
    if (!known[i]) L[i] = rowLogsumexp(q, k, rules, i, line);
    known[i] = 1;
  };
  /** A query's weights on keys from…to. @type {RowInto}      place: where in `out` key `from` stands */
  const into = (i, from, to, out, place) => (know(i), rowInto(q, k, L, rules, i, from, to, out, place));
  return { L, know, rowInto: into };
}

/** The product of any two rows; those of small heads are kept, since most suppositions leave them as they are. @param {Rows} a @param {number} n @param {Rows} b @param {number} m @returns {Cell} */
export function dots(a, n, b, m) {
  if (n * m > KEPT) return (i, j) => dot(a, i, b, j);
  const before = products.get(a);
  const kept = before?.other === b ? before.kept : new Float64Array(n * m).fill(NaN);
  products.set(a, { other: b, kept });
  return (i, j) => {
    const index = i * m + j;
    if (Number.isNaN(kept[index])) kept[index] = dot(a, i, b, j);
    return kept[index];
  };
}

/** @typedef {{row: (i: number) => Float64Array, seen: (i: number) => [number, number], weights: Float32Array, owner: object | null}} Logits      seen: the first key, and the end of those that a query may see; weights: the owner's, which the next temperature overwrites */

/** The rows of a small head's logits, kept once they are computed: not yet over the temperature, since another temperature leaves them as they are. @param {{q: Rows, k: Rows}} rows @param {Rules} rules @param {number} n @param {number} m @returns {Logits} */
function logitsOf({ q, k }, rules, n, m) {
  const score = dots(q, n, k, m);
  const cold = { ...rules, temperature: 1 };
  const kept = new Float64Array(n * m).fill(-Infinity);
  const there = new Uint8Array(n);
  const seen = (/** @type {number} */ i) => {
    const [first, end] = range(rules, i);
    return /** @type {[number, number]} */ ([Math.max(0, first), Math.min(m, end)]);
  };
  const row = (/** @type {number} */ i) => {
    const row = kept.subarray(i * m, (i + 1) * m);
    const [first, end] = there[i] ? [0, 0] : seen(i);
    for (let j = first; j < end; j++) row[j] = logit(cold, score(i, j), i, j);
    there[i] = 1;
    return row;
  };
  return { row, seen, weights: new Float32Array(n * m).fill(MASKED), owner: null };
}

/** Of a small head a query's weights are kept once they are computed; and what each key receives from all queries that are, and whether one is NaN. @param {Logits} logits @param {Rules} rules @param {number} n @param {number} m */
function keeping(logits, { sink, temperature }, n, m) {
  const { weights } = logits;
  const known = new Uint8Array(n);
  const line = new Float64Array(m);
  const tally = { received: new Float32Array(m), nonfinite: false };
  const know = (/** @type {number} */ i) => {
    known[i] = 1;
    const x = logits.row(i);
    const [first, end] = logits.seen(i);
    let most = -Infinity;
    for (let j = first; j < end; j++) most = Math.max(most, x[j]);
    const top = Math.max(sink, most / temperature);
    if (most === -Infinity) return;
    let sum = exponential(sink - top);
    for (let j = first; j < end; j++) sum += line[j] = exponential(x[j] / temperature - top);
    for (let j = first; j < end; j++) if (x[j] !== -Infinity) tally.received[j] += weights[i * m + j] = line[j] / sum;
    tally.nonfinite ||= Number.isNaN(sum);
  };
  /** @type {RowInto} */
  const into = (i, from, to, out, place) => {
    if (logits.owner !== tally) {
      known.fill(0); // another temperature has written its weights in their place
      tally.received.fill(0);
    }
    logits.owner = tally;
    if (!known[i]) know(i);
    out.set(weights.subarray(i * m + from, i * m + to), place);
  };
  return { rowInto: into, tally };
}

const STEPS = 1024;
const PARTS = Float64Array.from({ length: STEPS }, (_, index) => 2 ** (index / STEPS));
const HALVES = Float64Array.from({ length: 1081 }, (_, index) => 2 ** (index - 1080));

/** e^x of x ≤ 0, to 13 digits, in a third of the time of Math.exp: 2^k·2^(j/1024) from tables, times four terms of e^r. @param {number} x */
function exponential(x) {
  if (x < -745) return 0;
  const place = Math.floor((x * STEPS) / Math.LN2);
  const r = x - (place * Math.LN2) / STEPS;
  return HALVES[1080 + (place >> 10)] * PARTS[place & (STEPS - 1)] * (1 + r * (1 + r * (0.5 + r / 6)));
}
