// One head's numbers: its q, k and v, its rules, and one row from score to weight.

import { biased, capped, dot, logit, logsumexp, visible } from "../attention.js";

/** @typedef {import("../attention.js").Rows} Rows */
/** @typedef {import("../attention.js").Rules} Rules */
/** @typedef {{n: number, m: number, q: Rows, k: Rows, v: Rows | null, rules: Rules}} Problem */
/** @typedef {ReturnType<typeof rowAt>} Row */

/** @param {import("../long/source.js").Head} head @returns {Problem | null} null where the page has not the head's q and k */
export const problemOf = ({ computing: c, n, m, rules }) => c && { n, m, q: c.q, k: c.k, v: c.v, rules };

/** A number of q, k or v. @param {Rows} rows @param {number} row @param {number} col */
export const cell = (rows, row, col) => rows.data[rows.at + row * rows.width + col];

/**
 * One query with every key. O(keys·d_k).
 * @param {Problem} problem
 * @param {number} i
 */
export function rowAt({ q, k, rules, m }, i) {
  const scores = Float64Array.from({ length: m }, (_, j) => dot(q, i, k, j));
  const logits = scores.map((score, j) => logit(rules, score, i, j));
  const L = logsumexp(m, (j) => logits[j], rules.sink);
  const weights = logits.map((x) => (x === -Infinity ? 0 : Math.exp(x - L)));
  return { scores, logits, L, weights, seen: logits.reduce((sum, x) => sum + Number(x !== -Infinity), 0) };
}

/** What each rule makes of a score: its value after scaling, capping and biases. @param {Rules} rules @param {number} score @param {number} i @param {number} j */
export function throughRules(rules, score, i, j) {
  const scaled = score * rules.scale;
  const afterCap = capped(rules, scaled);
  return { scaled, capped: afterCap, biased: biased(rules, afterCap, i, j), visible: visible(rules, i, j) };
}

/** One number of a query's output. @param {Problem} problem @param {Row} row @param {number} c */
export function outputAt({ v, m }, row, c) {
  let sum = 0;
  if (v) for (let j = 0; j < m; j++) if (row.logits[j] !== -Infinity) sum += row.weights[j] * cell(v, j, c);
  return sum;
}
