// Weights as coloured pixels.

import { colour, fill, pixelOf } from "../canvas.js";
import { rgb, signed, weighed } from "../colour.js";
import { SIDE } from "./tiles.js";

/** The colours of the map's values. @param {Shown} shown */
export const shadeOf = ({ head, high }) =>
  head.shows === "weights" ? weighed(high) : signed(head.shows, high, "sqrt");

/** @type {WeakMap<Float32Array, {how: string, sheet: HTMLCanvasElement}>} */
const sheets = new WeakMap();

/** A tile in colour; left: its first key. @param {Float32Array} weights @param {Shown} shown @param {number} left @param {number} level */
export function colouredTile(weights, shown, left, level) {
  const { high, aside, head } = shown;
  const shade = shadeOf(shown);
  const ground = rgb("ground");
  const how = [high, aside, shade.along(0), shade.along(1), ground, head.supposition].join();
  const known = sheets.get(weights);
  if (known?.how === how) return known.sheet;
  const first = aside && !level ? head.first - left : -1;
  const paint = (/** @type {Uint32Array} */ pixels) => {
    colour(pixels, weights, shade, 0); // masked: transparent, so that the hatching shows
    if (first >= 0)
      for (let index = first; index < pixels.length; index += SIDE) if (pixels[index]) pixels[index] = pixelOf(ground);
  };
  const sheet = fill(SIDE, SIDE, paint, known?.sheet);
  sheets.set(weights, { how, sheet });
  return sheet;
}
