// One head's numbers: its q, k and v, its rules, and one row from score to weight.

import { biased, capped, dot, logit, logsumexp, sumAt, visible } from "../attention.js";

/** @param {Head} head @returns {Problem | null} null where the page has not the head's q and k */
export const problemOf = ({ computing: c, n, m, rules }) =>
  c && { n, m, q: c.q, k: c.k, v: c.v, L: c.L, vLost: c.vLost, rules };

/** A number of q, k or v. @param {Rows} rows @param {number} row @param {number} col */
export const cell = (rows, row, col) => rows.data[rows.start + row * rows.width + col];

/**
 * One query with every key. O(keys·d_k).
 * @param {Problem} problem @param {number} i @param {number} [chosen]      key @returns {Row & {logits: Float64Array}}
 */
export function rowAt({ q, k, L: sums, rules, m }, i, chosen = 0) {
  const scores = Float64Array.from({ length: m }, (_, j) => dot(q, i, k, j));
  const logits = scores.map((score, j) => logit(rules, score, i, j));
  const own = logsumexp(m, (j) => logits[j], rules.sink);
  const sumOf = (/** @type {number} */ j) => (rules.over === "rows" ? own : sums[sumAt(rules, i, j)]);
  const weights = logits.map((x, j) => (x === -Infinity ? 0 : Math.exp(x - sumOf(j))));
  const seen = logits.reduce((sum, x) => sum + Number(x !== -Infinity), 0);
  return { scores, logits, L: sumOf(chosen), weights, seen };
}

/** What each rule makes of a score: its value after scaling, capping and biases. @param {Rules} rules @param {number} score @param {number} i @param {number} j */
export function throughRules(rules, score, i, j) {
  const scaled = score * rules.scale;
  const afterCap = capped(rules, scaled);
  return { scaled, capped: afterCap, biased: biased(rules, afterCap, i, j), visible: visible(rules, i, j) };
}

/**
 * One number of a query's output, and how far it may be off where each weight and value may be off by a share.
 * @param {Problem} problem @param {Row} row @param {number} c @param {number} [share] @returns {[number, number]}
 */
export function outputAt({ v, m }, row, c, share = 0) {
  let [sum, size] = [0, 0];
  if (v)
    for (let j = 0; j < m; j++)
      if (row.logits[j] !== -Infinity) {
        const part = row.weights[j] * cell(v, j, c);
        sum += part;
        size += Math.abs(part);
      }
  return [sum, size * share];
}
