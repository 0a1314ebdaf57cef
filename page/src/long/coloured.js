// Weights as coloured pixels.

import { MASKED } from "../attention.js";
import { rgb, signed, weighed } from "../colour.js";
import { SIDE } from "./tiles.js";
import { unitOf } from "./units.js";

/** @typedef {import("./shown.js").Shown} Shown */
/** @typedef {ReturnType<typeof coloursOf>} Colours */

/** The colours of the map's values. @param {Shown} shown */
export const shadeOf = ({ head, other, high, scale }) =>
  head.shows !== "weights" ? signed("effect", high, scale) : other ? signed("weights", high) : weighed(high, scale);

/** A tile's value, or its difference from the other head's. @param {Float32Array} weights @param {Float32Array | null} other @param {number} at */
export const minus = (weights, other, at) =>
  other ? weights[at] - (other[at] === MASKED ? 0 : other[at]) : weights[at];

/** Colours by place on the scale, for speed. @param {Shown} shown */
export function coloursOf(shown) {
  const shade = shadeOf(shown);
  const entries = Array.from({ length: 256 }, (_, at) => shade.along(at / 255).map(Math.round));
  const [warn, aside] = [rgb("warn"), rgb("ground")];
  return {
    of: (/** @type {number} */ x) => entries[Math.max(0, Math.min(255, Math.round(shade.shade(x) * 255)))] ?? warn,
    masked: [0, 0, 0, 0],
    aside,
    key: String([warn, aside, entries[0], entries[255]]),
  };
}

/** Fills a canvas with pixels of the colours that `colourAt` gives. @param {HTMLCanvasElement} sheet @param {number} wide @param {number} high @param {(at: number) => number[]} colourAt */
export function fill(sheet, wide, high, colourAt) {
  sheet.width = wide;
  sheet.height = high;
  const pen = /** @type {CanvasRenderingContext2D} */ (sheet.getContext("2d"));
  const image = pen.createImageData(wide, high);
  const bytes = image.data;
  for (let at = 0; at < wide * high; at++) {
    const c = colourAt(at);
    bytes[4 * at] = c[0];
    bytes[4 * at + 1] = c[1];
    bytes[4 * at + 2] = c[2];
    bytes[4 * at + 3] = c[3] ?? 255; // masked: transparent, so that the hatching shows
  }
  pen.putImageData(image, 0, 0);
  return sheet;
}

/** @type {WeakMap<Float32Array, {how: string, sheet: HTMLCanvasElement}>} */
const sheets = new WeakMap();

/** A tile in colour; left: its first key. @param {Float32Array} weights @param {Float32Array | null} other @param {Shown} shown @param {Colours} colours @param {number} left @param {number} level */
export function colouredTile(weights, other, shown, colours, left, level) {
  const { scale, high, aside, keys, head } = shown;
  const how = `${scale} ${high} ${aside} ${colours.key} ${other ? Object.values(/** @type {import("./source.js").Head} */ (shown.other).address) : ""}`;
  const known = sheets.get(weights);
  if (known?.how === how) return known.sheet;
  const sheet = known?.sheet ?? document.createElement("canvas");
  sheets.set(weights, { how, sheet });
  const first = aside && !level ? unitOf(keys, head.first) - left : -1;
  return fill(sheet, SIDE, SIDE, (at) =>
    weights[at] === MASKED
      ? colours.masked
      : at % SIDE === first
        ? colours.aside
        : colours.of(minus(weights, other, at)),
  );
}
