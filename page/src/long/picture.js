// Draws the stored picture of a head, stretched over the view.

import { colour, fill } from "../canvas.js";
import { shadeOf } from "./coloured.js";
import { listOf } from "../numbers.js";
import { firstPixel, forbidden, pixel } from "./source.js";
import { filled } from "./view.js";

/** The finest picture. @param {Shown} shown */
export const pictureOf = ({ head, wide }) => (head.shows === "weights" && wide) || head.small;

/** @param {CanvasRenderingContext2D} pen @param {Shown} shown @param {Frame} f */
export function drawPicture(pen, shown, f) {
  const picture = pictureOf(shown);
  if (!picture) return;
  const { head, view } = shown;
  const [pixelsHigh, pixelsWide] = picture.pixels;
  const size = filled(shown, f);
  const [high, wide] = [Math.ceil(size.high), Math.ceil(size.wide)];
  const rows = pixelsUnder(high, view.y, view.step, head.n, pixelsHigh);
  const cols = pixelsUnder(wide, view.x, view.step, head.m, pixelsWide);
  const valueOf = readerOf(shown);
  const masked = -2; // no value
  const values = Float32Array.from({ length: wide * high }, (_, index) => {
    const [row, col] = [rows[Math.floor(index / wide)], cols[index % wide]];
    const value = valueOf(picture, row, col);
    return value === 0 && isMasked(head, picture, row, col) ? masked : value;
  });
  const paint = (/** @type {Uint32Array} */ pixels) => colour(pixels, values, shadeOf(shown), 0, masked);
  const sheet = fill(wide, high, paint);
  pen.drawImage(sheet, 0, 0, wide, high);
}

/** For each pixel of the screen the picture's pixel. @param {number} size @param {number} start @param {number} step @param {number} tokens @param {number} pixels */
const pixelsUnder = (size, start, step, tokens, pixels) =>
  listOf(size, (index) => {
    const token = Math.min(tokens - 1, Math.floor(start + (index + 0.5) * step));
    return Math.min(pixels - 1, Math.floor(((token + 0.5) * pixels) / tokens));
  });

/** Reads a pixel. The first key is stored separately; it is added to its pixel again. @param {Shown} shown */
function readerOf({ head: { m, first } }) {
  return (/** @type {Picture} */ picture, /** @type {number} */ row, /** @type {number} */ col) => {
    const wide = picture.pixels[1];
    const { value } = pixel(picture, row, col);
    if (col !== Math.floor((first * wide) / m)) return value;
    return Math.max(value, firstPixel(picture, row).value);
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
