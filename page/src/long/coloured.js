// Weights as coloured pixels.

import { colour, fill } from "../canvas.js";
import { signed, weighed } from "../colour.js";
import { SIDE } from "./tiles.js";

/** The colours of the map's values. @param {Shown} shown */
export const shadeOf = ({ head, high }) =>
  head.shows === "weights" ? weighed(high) : signed(head.shows, high, "sqrt");

/** @type {WeakMap<Float32Array, {how: string, sheet: HTMLCanvasElement}>} */
const sheets = new WeakMap();

/** A tile in colour. @param {Float32Array} weights @param {Shown} shown */
export function colouredTile(weights, shown) {
  const { high, head } = shown;
  const shade = shadeOf(shown);
  const how = [high, shade.along(0), shade.along(1), head.version].join();
  const known = sheets.get(weights);
  if (known?.how === how) return known.sheet;
  const paint = (/** @type {Uint32Array} */ pixels) => colour(pixels, weights, shade, 0); // masked: transparent, so that the hatching shows
  const sheet = fill(SIDE, SIDE, paint, known?.sheet);
  sheets.set(weights, { how, sheet });
  return sheet;
}
