// Tiles of 256 × 256 pixels, computed in short slices of time so that the page stays responsive; the last 64 are kept.

import { listOf } from "../numbers.js";
import { MASKED } from "../attention.js";
import { breathe } from "../dom.js";
import { ask } from "./source.js";
import { KEPT as KEPT_WEIGHTS } from "./supposing.js";
import { tokenAt } from "./units.js";

/** @typedef {{head: Head, rows: Units, cols: Units, level: number, row: number, col: number, rule: "most" | "mean"}} Wanted */

export const SIDE = 256;
const KEPT = 64;
const SLICE = 8; // milliseconds

/** @type {Map<string, {head: Head, tile: Float32Array}>} */
const done = new Map();
/** @type {Map<string, Wanted>} */
const wanted = new Map();
let working = false;
let ready = () => {};
let lost = (/** @type {unknown} */ _) => {};

/** Call the first when a tile is there, the second when it cannot be had. @param {() => void} then @param {(why: unknown) => void} otherwise */
export function whenReady(then, otherwise) {
  ready = then;
  lost = otherwise;
}

/** A tile's weights, row by row, MASKED where masked; null while they are computed. @param {Wanted} w @param {string} [supposed]      where the tile of what is supposed is kept, in place of the one before */
export function tileOf(w, supposed = "if") {
  const { head, rows, level, row, col, rule } = w;
  const live = head.supposition && head.n * head.m <= KEPT_WEIGHTS; // computed at once: it changes with every frame
  const rest = `${rows.edges ? "w" : "t"} ${level} ${row} ${col} ${level || rows.edges ? rule : ""}`;
  const key = `${Object.values(head.address)} ${live ? supposed : head.supposition} ${rest}`;
  const kept = done.get(key);
  if (kept && (!live || kept.head === head)) {
    keep(key, head, kept.tile); // the latest used is the last to go
    return kept.tile;
  }
  if (live) {
    const tile = (kept?.tile ?? new Float32Array(SIDE * SIDE)).fill(MASKED);
    for (let y = 0; y < SIDE; y++) pixelRow(w, y, tile);
    keep(key, head, tile);
    return tile;
  }
  wanted.set(key, w);
  if (!working) {
    working = true;
    setTimeout(work);
  }
  return null;
}

/** @param {string} key @param {Head} head @param {Float32Array} tile */
function keep(key, head, tile) {
  done.delete(key);
  done.set(key, { head, tile });
  if (done.size > KEPT) done.delete(/** @type {string} */ (done.keys().next().value));
}

/** Drops the requests for tiles that are not in view any more. */
export const forgetWanted = () => wanted.clear();

async function work() {
  for (;;) {
    const [first] = wanted;
    if (!first) break;
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

/** @param {Wanted} w @param {() => boolean} stillWanted */
async function compute(w, stillWanted) {
  if (w.head.served) return served(w);
  await w.head.loading;
  const out = new Float32Array(SIDE * SIDE).fill(MASKED);
  let since = performance.now();
  for (let y = 0; y < SIDE; y++) {
    pixelRow(w, y, out);
    if (performance.now() - since < SLICE) continue;
    await breathe();
    if (!stillWanted()) return null;
    since = performance.now();
  }
  return out;
}

/** The same from the viewer's server. @param {Wanted} w */
async function served({ head, rows, cols, level, row, col, rule }) {
  const step = 2 ** level;
  const edges = (/** @type {Units} */ u, /** @type {number} */ place) => {
    const first = place * SIDE * step;
    return listOf(Math.min(u.count, first + SIDE * step) - first + 1, (place) => tokenAt(u, first + place));
  };
  const [down, across] = [edges(rows, row), edges(cols, col)];
  const pixels = await ask(head, "tile", { rows: down, cols: across, step, rule });
  const wide = Math.ceil((across.length - 1) / step);
  const out = new Float32Array(SIDE * SIDE).fill(MASKED);
  for (let y = 0; y * wide < pixels.length; y++) out.set(pixels.subarray(y * wide, (y + 1) * wide), y * SIDE);
  return out;
}

/**
 * One row of pixels: each covers 2^level × 2^level units.
 * @param {Wanted} w @param {number} y @param {Float32Array} out
 */
export function pixelRow({ head, rows, cols, level, row, col, rule }, y, out) {
  const { computing: c } = head;
  if (!c) return;
  const step = 2 ** level;
  const [u0, u1] = [(row * SIDE + y) * step, Math.min(rows.count, (row * SIDE + y + 1) * step)];
  const v0 = col * SIDE * step;
  const v1 = Math.min(cols.count, v0 + SIDE * step);
  if (u0 >= u1 || v0 >= v1) return;
  if (!level && !rows.edges && !cols.edges) return c.rowInto(u0, v0, v1, out, y * SIDE);
  const [from, to] = [tokenAt(cols, v0), tokenAt(cols, v1)];
  const line = new Float32Array(to - from);
  const unit = new Float32Array(v1 - v0);
  const start = y * SIDE;
  const sums = new Float64Array(SIDE);
  for (let u = u0; u < u1; u++) {
    const [i0, i1] = [tokenAt(rows, u), tokenAt(rows, u + 1)];
    unit.fill(MASKED);
    for (let i = i0; i < i1; i++) {
      c.rowInto(i, from, to, line, 0);
      if (cols.edges) addWords(line, from, cols.edges, v0, unit, 1 / (i1 - i0));
      else unit.set(line);
    }
    for (let v = 0; v < unit.length; v++) {
      const a = unit[v];
      if (a === MASKED) continue;
      const x = level ? Math.floor(v / step) : v;
      if (rule === "most" || !level) out[start + x] = larger(out[start + x], a);
      else {
        out[start + x] = 0;
        sums[x] += a;
      }
    }
  }
  if (rule === "mean" && level)
    for (let x = 0; x < SIDE; x++) {
      const width = Math.min(v1 - v0, (x + 1) * step) - x * step;
      if (out[start + x] !== MASKED) out[start + x] = sums[x] / (width * (u1 - u0));
    }
}

/** The one of larger magnitude; NaN before all. @param {number} x @param {number} a */
const larger = (x, a) => (x === MASKED || Number.isNaN(a) || Math.abs(a) > Math.abs(x) ? a : x);

/**
 * @param {Float32Array} line @param {number} from @param {Int32Array} edges @param {number} v0 @param {Float32Array} unit @param {number} share
 */
function addWords(line, from, edges, v0, unit, share) {
  for (let v = 0; v < unit.length; v++)
    for (let j = edges[v0 + v]; j < edges[v0 + v + 1]; j++) {
      const a = line[j - from];
      if (a !== MASKED) unit[v] = (unit[v] === MASKED ? 0 : unit[v]) + a * share;
    }
}
