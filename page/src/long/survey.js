// What a whole head amounts to: its largest weight, and what each key receives.

import { MASKED, rowInto } from "../attention.js";
import { breathe } from "../dom.js";

/** @typedef {{largest: number, aside: number, received: Float32Array | null}} Survey      aside: the largest, the first key left out */

/** @type {WeakMap<object, Promise<Survey>>} */
const known = new WeakMap();

/** @param {import("./source.js").Head} head */
export function surveyOf(head) {
  const found = known.get(head);
  if (found) return found;
  const made = head.small.most ? Promise.resolve(fromPicture(head)) : fromWeights(head);
  known.set(head, made);
  return made;
}

/** @param {import("./source.js").Head} head @returns {Survey} */
function fromPicture(head) {
  const p = head.small.most;
  const [rows, cols] = p.pixels;
  let [whole, first] = [0, 0];
  for (let at = 0; at < rows * cols; at++) whole = Math.max(whole, p.data[p.at + at]);
  for (let at = 0; at < rows; at++) first = Math.max(first, p.first[p.firstAt + at]);
  const most = Math.max(whole, first, 1);
  return { largest: p.largest, aside: p.largest * (whole / most) ** 2, received: head.received };
}

/** @param {import("./source.js").Head} head @returns {Promise<Survey>} */
async function fromWeights(head) {
  const { computing: c, n, m, first } = head;
  if (!c) return { largest: 1, aside: 1, received: head.received };
  const received = new Float32Array(m);
  const line = new Float32Array(m);
  let [largest, aside] = [0, 0];
  let since = performance.now();
  for (let i = 0; i < n; i++) {
    rowInto(c.q, c.k, c.L, head.rules, i, 0, m, line, 0);
    for (let j = 0; j < m; j++) {
      if (line[j] === MASKED) continue;
      received[j] += line[j];
      if (j === first) largest = Math.max(largest, line[j]);
      else aside = Math.max(aside, line[j]);
    }
    if (performance.now() - since > 8) {
      await breathe();
      since = performance.now();
    }
  }
  return { largest: Math.max(largest, aside), aside, received };
}
