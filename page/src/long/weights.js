// Draws the weights in view: computed tiles where the map is zoomed in, the stored picture elsewhere and until they are ready.

import { MASKED } from "../attention.js";
import { hatching } from "../canvas.js";
import { drawNumbers } from "./cells.js";
import { colouredTile } from "./coloured.js";
import { drawPicture, pictureOf } from "./picture.js";
import { reachOf } from "./survey.js";
import { forgetWanted, SIDE, tileOf } from "./tiles.js";
import { endOf, filled } from "./view.js";

/** @typedef {{top: number, left: number, weights: Float32Array | null}} Tile      top, left: its first query and key */

const COMPUTED = 8; // up to so many weights along a pixel are computed; above, the stored picture
const NUMBERED = 34; // from so many pixels on a cell has its number

/**
 * Draw them; says how many weights a pixel has, whether that is a stored picture's, and how many tiles are missing.
 * @param {CanvasRenderingContext2D} pen @param {Shown} shown @param {Frame} f
 */
export function drawWeights(pen, shown, f) {
  const { view, head } = shown;
  const level = Math.max(0, Math.floor(Math.log2(view.step * 1.001)));
  const near = 2 ** level <= COMPUTED || !head.small;
  shown.high = shown.whole;
  forgetWanted();
  const size = filled(shown, f);
  const hatch = (pen.fillStyle = hatching(pen));
  pen.fillRect(0, 0, size.wide, size.high);
  if (!near || !head.exact) {
    drawPicture(pen, shown, f);
    const [high, wide] = pictureOf(shown)?.pixels ?? [1, 1];
    return { rows: Math.ceil(head.n / high), cols: Math.ceil(head.m / wide), stretched: true, missing: 0 };
  }
  const tiles = tilesInView(shown, f, level);
  const there = tiles.filter((tile) => tile.weights);
  const missing = tiles.length - there.length;
  if (shown.inView && !missing) shown.high = reachOf(there.length ? peaksOf(there, level) : []);
  if (missing) drawPicture(pen, shown, f);
  for (const tile of there) drawTile(pen, shown, f, tile, level, missing ? hatch : null);
  return { rows: 2 ** level, cols: 2 ** level, stretched: false, missing };
}

/** @param {Shown} shown @param {Frame} f @param {number} level @returns {Tile[]} */
function tilesInView(shown, f, level) {
  const { head, view } = shown;
  const span = SIDE * 2 ** level;
  const end = endOf(shown, f);
  const tiles = [];
  for (let row = Math.floor(view.y / span); row * span < end.y; row++)
    for (let col = Math.floor(view.x / span); col * span < end.x; col++) {
      const weights = tileOf({ head, level, row, col });
      tiles.push({ top: row * span, left: col * span, weights });
    }
  return tiles;
}

/** The largest weight of each row of pixels in these tiles. @param {Tile[]} tiles @param {number} level */
function peaksOf(tiles, level) {
  /** @type {Map<number, number>} */
  const peaks = new Map([[0, 0]]); // row 0 is left out, in view or not
  const step = 2 ** level;
  for (const { weights, top } of tiles) {
    if (weights)
      for (let index = 0; index < weights.length; index++) {
        const value = weights[index] === MASKED ? 0 : Math.abs(weights[index]);
        const row = top / step + Math.floor(index / SIDE);
        if (value > (peaks.get(row) ?? 0)) peaks.set(row, value);
      }
  }
  return [...peaks.values()];
}

/** @param {CanvasRenderingContext2D} pen @param {Shown} shown @param {Frame} f @param {Tile} tile @param {number} level @param {CanvasPattern | null} under      covers the picture, which stands in for missing tiles */
function drawTile(pen, shown, f, { top, left, weights }, level, under) {
  if (!weights) return;
  const { view } = shown;
  const size = (SIDE * 2 ** level) / view.step;
  const [x, y] = [(left - view.x) / view.step, (top - view.y) / view.step];
  if (under) pen.fillStyle = under;
  if (under) pen.fillRect(x, y, size, size);
  pen.drawImage(colouredTile(weights, shown), x, y, size, size);
  if (1 / view.step >= NUMBERED) drawNumbers(pen, shown, f, weights, top, left);
}
