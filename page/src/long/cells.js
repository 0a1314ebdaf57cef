// Numbers in the map's cells, where these are large enough.

import { MASKED } from "../attention.js";
import { inkOn, rgb } from "../colour.js";
import { short } from "../numbers.js";
import { shadeOf } from "./coloured.js";
import { SIDE } from "./tiles.js";
import { endOf } from "./view.js";

/**
 * The numbers of one tile; top, left: its first query and key.
 * @param {CanvasRenderingContext2D} pen @param {Shown} shown @param {Frame} f @param {Float32Array} weights @param {number} top @param {number} left
 */
export function drawNumbers(pen, shown, f, weights, top, left) {
  const { view } = shown;
  const size = 1 / view.step;
  const shade = shadeOf(shown);
  const end = endOf(shown, f);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (let i = Math.max(top, Math.floor(view.y)); i < Math.min(top + SIDE, end.y); i++)
    for (let j = Math.max(left, Math.floor(view.x)); j < Math.min(left + SIDE, end.x); j++) {
      const index = (i - top) * SIDE + j - left;
      if (weights[index] === MASKED) continue;
      const [x, y] = [(j - view.x) * size, (i - view.y) * size];
      const value = weights[index];
      pen.fillStyle = inkOn(Number.isFinite(value) ? shade.colour(value) : rgb("warn")) === "dark" ? "#000" : "#fff";
      pen.fillText(short(value), x + size / 2, y + size / 2);
    }
}
