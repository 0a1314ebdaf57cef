// Draws the stored picture of a head, stretched over the view.

import { colour, fill } from "../canvas.js";
import { shadeOf } from "./coloured.js";
import { listOf } from "../numbers.js";
import { firstPixel, forbidden, pixel } from "./source.js";
import { tokenAt } from "./units.js";
import { filled } from "./view.js";

/** The finest picture; a difference needs two of one size. @param {Shown} shown @returns {Picture | undefined} */
export const pictureOf = ({ head, other, wide, rule }) =>
  (!other && !head.supposition && wide.most ? wide : head.small)[rule];

/** @param {CanvasRenderingContext2D} pen @param {Shown} shown @param {Frame} f */
export function drawPicture(pen, shown, f) {
  const picture = pictureOf(shown);
  if (!picture) return;
  const { head, view } = shown;
  const other = shown.other?.small[shown.rule];
  const [pixelsHigh, pixelsWide] = picture.pixels;
  const size = filled(shown, f);
  const [high, wide] = [Math.ceil(size.high), Math.ceil(size.wide)];
  const rows = pixelsUnder(high, view.y, view.step, shown.queries, head.n, pixelsHigh);
  const cols = pixelsUnder(wide, view.x, view.step, shown.keys, head.m, pixelsWide);
  const valueOf = readerOf(shown);
  const masked = -2; // no value, and no difference
  const values = Float32Array.from({ length: wide * high }, (_, index) => {
    const [row, col] = [rows[Math.floor(index / wide)], cols[index % wide]];
    const value = valueOf(picture, row, col) - (other ? valueOf(other, row, col) : 0);
    return value === 0 && isMasked(head, picture, row, col) ? masked : value;
  });
  const paint = (/** @type {Uint32Array} */ pixels) => colour(pixels, values, shadeOf(shown), 0, masked);
  const sheet = fill(wide, high, paint);
  pen.drawImage(sheet, 0, 0, wide, high);
}

/** For each pixel of the screen the picture's pixel. @param {number} size @param {number} start @param {number} step @param {Units} units @param {number} tokens @param {number} pixels */
const pixelsUnder = (size, start, step, units, tokens, pixels) =>
  listOf(size, (index) => {
    const unit = Math.min(units.count - 1, Math.floor(start + (index + 0.5) * step));
    return Math.min(pixels - 1, Math.floor(((tokenAt(units, unit) + 0.5) * pixels) / tokens));
  });

/** Reads a pixel. The first key is stored separately; it is added to its pixel again unless it is left out. @param {Shown} shown */
function readerOf({ head: { m, first }, aside, rule }) {
  return (/** @type {Picture} */ picture, /** @type {number} */ row, /** @type {number} */ col) => {
    const wide = picture.pixels[1];
    const { value } = pixel(picture, row, col);
    if (aside || col !== Math.floor((first * wide) / m)) return value;
    const alone = firstPixel(picture, row).value;
    return rule === "most" ? Math.max(value, alone) : value + alone / Math.max(1, m / wide);
  };
}

/** Whether the rules mask every weight of a pixel. @param {Head} head @param {Picture} picture @param {number} row @param {number} col */
function isMasked({ n, m, rules }, { pixels }, row, col) {
  const edge = (/** @type {number} */ index, /** @type {number} */ size, /** @type {number} */ count) =>
    Math.floor((index * size) / count);
  const top = edge(row, n, pixels[0]);
  return forbidden(
    rules,
    top,
    Math.max(edge(row + 1, n, pixels[0]), top + 1),
    edge(col, m, pixels[1]),
    edge(col + 1, m, pixels[1]),
  );
}
