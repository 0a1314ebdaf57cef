// What single edges did, in place of their weights: the formulas of core/effects.py, in float64.
// With t_ij = g_i·v_j, the contribution of an edge is a_ij·t_ij, and its cut what g_i·o_i changes by when i may not see j:
// the row is normalised anew, or of "moved" the edge's weight goes to the first key, or to a learned sink.

import { dot, logsumexp, MASKED } from "../attention.js";
import { kept, largestAt } from "../numbers.js";

const KEPT = 2 ** 20; // weights: of heads up to this size effects are kept
/** What a head has not whose numbers are computed here. */
const COMPUTED = { served: false, small: null, wide: () => Promise.resolve(null) };
export const SHOWS = ["weights", "contributions", "cuts", "moved"];

/** Whether a page has what the effects of a layer's edges need. @param {any} layer @param {number} place      the head's place */
export const hasEffects = ({ statistics, values, exact }, place) =>
  Boolean(statistics.effect && values && exact.includes(place));

/** @type {WeakMap<Head, Record<string, Head>>} */
const known = new WeakMap();

/** A head whose edges' effects are shown as its weights would be; the head itself where the page has no g or v. @param {Head} head @param {Shows} shows @returns {Head} */
export function showing(head, shows) {
  const { computing: c, n, m } = head;
  if (shows === "weights" || !c?.g || !c.rows.v) return head;
  /** @type {Record<string, Head>} */
  const made = kept(known, head, () => ({}));
  const small = n * m <= KEPT;
  const rows = new Float32Array(small ? n * m : m);
  const there = new Uint8Array(n);
  /** @param {number} i @param {number} from @param {number} to @param {Float32Array} out @param {number} place */
  const rowInto = (i, from, to, out, place) => {
    const row = small ? rows.subarray(i * m, (i + 1) * m) : rows;
    if (!small || !there[i]) effects(head, shows, i, row);
    there[i] = 1;
    out.set(row.subarray(from, to), place);
  };
  return (made[shows] ??= { ...head, ...COMPUTED, shows, computing: { ...c, bound: () => 0, rowInto } });
}

/** One row, MASKED where the key may not be seen. O(keys·(d_k + d_v)). @param {Head} head @param {Shows} shows @param {number} i @param {Float32Array} out */
function effects({ computing, rules, m }, shows, i, out) {
  const { rows, g, masked } = /** @type {any} */ (computing);
  const term = (/** @type {number} */ i, /** @type {number} */ j) => dot(g, i, rows.v, j);
  const [x, t] = [new Float64Array(m), new Float64Array(m)];
  for (let j = 0; j < m; j++) {
    x[j] = masked(i, j);
    if (x[j] !== -Infinity) t[j] = term(i, j);
  }
  const best = largestAt(/** @type {any} */ (x));
  const without = (/** @type {number} */ j) => (j === best ? -Infinity : x[j]);
  const lost = Math.max(rules.sink, logsumexp(m, without, rules.sink)); // of all keys but the strongest, and the sink
  const others = x.reduce((sum, _, j) => (without(j) === -Infinity ? sum : sum + Math.exp(x[j] - lost) * t[j]), 0);
  const [top, strong] = [x[best], t[best]];
  const ratio = Math.exp(lost - top); // of the others to the strongest, as sums of exponentials
  const most = 1 / (1 + ratio);
  const whole = most * (strong + ratio * others);
  const first = rules.sink === -Infinity ? term(i, 0) : 0; // what an edge's weight brings where it moves
  for (let j = 0; j < m; j++) {
    const a = Math.exp(x[j] - top) * most;
    const cut = j === best ? a * (others - strong) : (a / (1 - a)) * (whole - t[j]);
    out[j] = shows === "cuts" ? cut : a * (shows === "moved" ? first - t[j] : t[j]);
    if (out[j] === MASKED) out[j] += 2 ** -24; // an effect, and not the sign of a masked cell
    if (x[j] === -Infinity) out[j] = MASKED;
  }
}
