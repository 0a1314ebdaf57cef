// Weights as coloured pixels.

import { MASKED } from "../attention.js";
import { colour, fill, pixelOf } from "../canvas.js";
import { rgb, signed, weighed } from "../colour.js";
import { SIDE } from "./tiles.js";
import { unitOf } from "./units.js";

/** The colours of the map's values. @param {Shown} shown */
export const shadeOf = ({ head, other, high, scale }) =>
  head.shows !== "weights" ? signed(head.shows, high, scale) : other ? signed("weights", high) : weighed(high, scale);

/** A tile's value, or its difference from the other head's. @param {Float32Array} weights @param {Float32Array | null} other @param {number} index */
export const minus = (weights, other, index) =>
  other ? weights[index] - (other[index] === MASKED ? 0 : other[index]) : weights[index];

/** @type {WeakMap<Float32Array, {how: string, sheet: HTMLCanvasElement}>} */
const sheets = new WeakMap();

/** A tile in colour; left: its first key. @param {Float32Array} weights @param {Float32Array | null} other @param {Shown} shown @param {number} left @param {number} level */
export function colouredTile(weights, other, shown, left, level) {
  const { scale, high, aside, keys, head } = shown;
  const shade = shadeOf(shown);
  const ground = rgb("ground");
  const place = Object.values(shown.other?.address ?? []);
  const how = [scale, high, aside, shade.along(0), shade.along(1), ground, head.supposition, place].join();
  const known = sheets.get(weights);
  if (known?.how === how) return known.sheet;
  const first = aside && !level ? unitOf(keys, head.first) - left : -1;
  const values = other
    ? weights.map((a, index) => (a === MASKED ? a : Math.max(minus(weights, other, index), MASKED + 2 ** -24)))
    : weights;
  const paint = (/** @type {Uint32Array} */ pixels) => {
    colour(pixels, values, shade, 0); // masked: transparent, so that the hatching shows
    if (first >= 0)
      for (let index = first; index < pixels.length; index += SIDE) if (pixels[index]) pixels[index] = pixelOf(ground);
  };
  const sheet = fill(SIDE, SIDE, paint, known?.sheet);
  sheets.set(weights, { how, sheet });
  return sheet;
}
