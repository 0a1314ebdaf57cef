// What takes long of a head, computed in short slices of time so that the page stays responsive: tiles of 256 × 256 pixels,
// of which the last 64 are kept, and where the colour scale ends.

import { MASKED } from "../attention.js";
import { later, pacer } from "../dom.js";
import { kept } from "../numbers.js";
import { ask } from "./source.js";

/** @typedef {{head: Head, level: number, row: number, col: number}} Wanted      a pixel covers 2^level × 2^level weights */

export const SIDE = 256;
const KEPT = 64;

/** @type {Map<string, {head: Head, tile: Float32Array}>} */
const done = new Map();
/** @type {Map<string, Wanted>} */
const wanted = new Map();
let working = false;
let ready = () => {};
let lost = (/** @type {unknown} */ _) => {};

/** Call the first when a tile is there, the second when it cannot be had. @param {() => void} then @param {(why: unknown) => void} otherwise */
export const whenReady = (then, otherwise) => void ([ready, lost] = [then, otherwise]);

/** A tile's weights, row by row, MASKED where masked; null while they are computed. @param {Wanted} w */
export function tileOf(w) {
  const { head, level, row, col } = w;
  const live = head.version > 0; // computed at once: it changes with every frame
  const key = `${Object.values(head.address)} ${live} ${level} ${row} ${col}`;
  const old = done.get(key);
  if (old && (!live || old.head === head)) return keep(key, head, old.tile); // the latest used is the last to go
  if (live) {
    const tile = (old?.tile ?? new Float32Array(SIDE * SIDE)).fill(MASKED);
    for (let y = 0; y < SIDE; y++) pixelRow(w, y, tile);
    return keep(key, head, tile);
  }
  wanted.set(key, w);
  if (!working) later(work);
  working = true;
  return null;
}

/** @param {string} key @param {Head} head @param {Float32Array} tile */
function keep(key, head, tile) {
  done.delete(key);
  done.set(key, { head, tile });
  if (done.size > KEPT) done.delete(/** @type {string} */ (done.keys().next().value));
  return tile;
}

/** Drops the requests for tiles that are not in view any more. */
export const forgetWanted = () => wanted.clear();

async function work() {
  for (let [first] = wanted; first; [first] = wanted) {
    const [key, w] = first;
    const start = performance.now();
    const tile = await compute(w, () => wanted.has(key)).catch((why) => (lost(why), null));
    wanted.delete(key);
    if (!tile) continue;
    if (!w.level) performance.measure("clearhead tile", { start });
    keep(key, w.head, tile);
    ready();
  }
  working = false;
}

async function compute(/** @type {Wanted} */ w, /** @type {() => boolean} */ stillWanted) {
  const out = new Float32Array(SIDE * SIDE).fill(MASKED);
  if (w.head.served) return served(w, out);
  await w.head.loading;
  const pause = pacer();
  for (let y = 0; y < SIDE; y++) {
    pixelRow(w, y, out);
    if ((await pause()) && !stillWanted()) return null;
  }
  return out;
}

/** The same from the viewer's server. @param {Wanted} w @param {Float32Array} out */
async function served({ head, level, row, col }, out) {
  const step = 2 ** level;
  const [top, left] = [row * SIDE * step, col * SIDE * step];
  const [end, right] = [Math.min(head.n, top + SIDE * step), Math.min(head.m, left + SIDE * step)];
  const pixels = await ask(head, "tile", { rows: [top, end], cols: [left, right], step });
  const wide = Math.ceil((right - left) / step);
  for (let y = 0; y * wide < pixels.length; y++) out.set(pixels.subarray(y * wide, (y + 1) * wide), y * SIDE);
  return out;
}

/** One row of pixels, each with the largest of its weights. @param {Wanted} w @param {number} y @param {Float32Array} out */
export function pixelRow({ head: { computing: c, n, m }, level, row, col }, y, out) {
  const step = 2 ** level;
  const [first, end] = [(row * SIDE + y) * step, Math.min(n, (row * SIDE + y + 1) * step)];
  const from = col * SIDE * step;
  const to = Math.min(m, from + SIDE * step);
  if (!c || first >= end || from >= to) return;
  const start = y * SIDE;
  if (!level) return c.rowInto(first, from, to, out, start);
  const line = new Float32Array(to - from);
  for (let i = first; i < end; i++) {
    c.rowInto(i, from, to, line, 0);
    for (let j = 0; j < line.length; j++) {
      const x = start + Math.floor(j / step);
      out[x] = Math.max(out[x], line[j]); // NaN before all, MASKED last
    }
  }
}

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

export const surveyOf = (/** @type {Head} */ head) => kept(known, head, () => survey(head));

/** @param {Head} head @returns {Promise<Survey>} */
async function survey({ computing: c, n, m, small, layer, address }) {
  if (small) return { whole: layer.reach[address.head], nonfinite: small.nonfinite() };
  if (!c) return { whole: 1, nonfinite: false };
  const [line, peaks] = [new Float32Array(m), new Float32Array(n)];
  let nonfinite = false;
  const pause = pacer();
  for (let i = 0; i < n; i++) {
    c.rowInto(i, 0, m, line, 0);
    for (let j = 0; j < m; j++) {
      if (line[j] === MASKED) continue;
      nonfinite ||= !Number.isFinite(line[j]);
      peaks[i] = Math.max(peaks[i], line[j] || 0);
    }
    await pause();
  }
  return { whole: reachOf([...peaks]), nonfinite };
}
