// Of a whole head: where its colour scale ends, and whether a weight is not finite.

import { MASKED } from "../attention.js";
import { breathe } from "../dom.js";

/** @typedef {{whole: number, nonfinite: boolean}} Survey      whole: the end of the colour scale */

/**
 * Where the scale of colour ends: the 90th percentile of the rows' largest weights, row 0 left out, as images.py has it.
 * @param {number[]} peaks      of each row its largest weight; rows that see nothing, or are not finite, do not count
 */
export function reachOf(peaks) {
  for (const some of [peaks.slice(1), peaks.slice(0, 1)]) {
    const counted = some.filter((peak) => peak > 0 && peak < Infinity).sort((a, b) => a - b);
    if (counted.length) return counted[Math.ceil((9 * counted.length) / 10) - 1];
  }
  return 1;
}

/** @type {WeakMap<object, Promise<Survey>>} */
const known = new WeakMap();

/** @param {Head} head */
export function surveyOf(head) {
  const made = known.get(head) ?? survey(head);
  known.set(head, made);
  return made;
}

/** @param {Head} head @returns {Promise<Survey>} */
async function survey({ computing: c, n, m, small, layer, address }) {
  if (small) return { whole: layer.reach[address.head], nonfinite: small.nonfinite() };
  if (!c) return { whole: 1, nonfinite: false };
  const [line, peaks] = [new Float32Array(m), new Float32Array(n)];
  let nonfinite = false;
  let since = performance.now();
  for (let i = 0; i < n; i++) {
    c.rowInto(i, 0, m, line, 0);
    for (let j = 0; j < m; j++) {
      if (line[j] === MASKED) continue;
      nonfinite ||= !Number.isFinite(line[j]);
      peaks[i] = Math.max(peaks[i], Math.abs(line[j]) || 0);
    }
    if (performance.now() - since > 8) {
      await breathe();
      since = performance.now();
    }
  }
  return { whole: reachOf([...peaks]), nonfinite };
}
