// What the viewer's server sends for the arithmetic of a weight: a whole head's q, k, v and rules, or one query's and one key's.

import { dot, logit, MASKED, rulesOf } from "../attention.js";
import { openFrame } from "../container.js";
import { askBytes, bounds, computed } from "./source.js";

/**
 * One weight's numbers; null where those of the whole head came, which the head has from then on.
 * @param {Head} head @param {number} i @param {number} j
 */
export async function operandsAt(head, i, j) {
  const page = openFrame(await askBytes(head, "operands", { query: i, key: j }));
  const names = Object.keys(page.header.arrays);
  const layer = { ...head.layer, key_of: [0], arrays: Object.fromEntries(names.map((name) => [name, name])) };
  const rules = rulesOf(page, layer, 0, 0);
  if (page.header.whole) {
    head.rules = rules;
    head.computing = await computed(page, layer, 0, rules);
    return null;
  }
  /** The only row of an array, which is row `row` of the head's. @param {string} name @param {number} row */
  const only = (name, row) => {
    const { data, shape } = page.array(name);
    return { data, width: shape[2], start: -row * shape[2] };
  };
  const [q, k, v] = [only("q", i), only("k", j), page.has("v") ? only("v", j) : null];
  const [L] = page.array("logsumexp").data;
  const [longest] = page.array("longest").data;
  const row = page.array("row").data;
  const score = dot(q, i, k, j);
  const [scores, logits, weights] = [{ [j]: score }, { [j]: logit(rules, score, i, j) }, Float64Array.from(row)];
  weights[j] = logits[j] === -Infinity ? 0 : Math.exp(logits[j] - L);
  const mixed = v && { sum: page.array("output").data, size: page.array("size").data };
  return {
    head,
    i,
    j,
    problem: { n: head.n, m: head.m, q, k, v, vLost: 0, rules },
    row: { scores, logits, L, weights, seen: row.filter((a) => a !== MASKED).length, mixed },
    bound: bounds(q, { [i]: L }, rules, 0, () => longest)(i),
  };
}
