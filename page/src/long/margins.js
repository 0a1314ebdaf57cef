// Around the weights: names of queries and keys.

import { css, rgb } from "../colour.js";
import { labelOf } from "./names.js";
import { axesOf } from "./view.js";

/** @typedef {ReturnType<typeof axesOf>["down"]} Axis */

/** Names where there is room, else numbers. @param {CanvasRenderingContext2D} pen @param {Shown} shown @param {Frame} f */
export function drawNames(pen, shown, f) {
  const { down, across } = axesOf(shown, f);
  const { step } = shown.view;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  eachName(down, step, f.left, (name, position, colour) => {
    pen.fillStyle = colour;
    pen.fillText(name, f.left - 6, position);
  });
  pen.textAlign = "left";
  eachName(across, step, f.top, (name, position, colour) => {
    pen.save();
    pen.translate(position, f.top - 6);
    pen.rotate(-Math.PI / 2);
    pen.fillStyle = colour;
    pen.fillText(name, 0, 0);
    pen.restore();
  });
}

/** @param {Axis} axis @param {number} step @param {number} room @param {(name: string, at: number, colour: string) => void} write */
function eachName({ count, name, start, from, length, chosen, role }, step, room, write) {
  const named = 1 / step >= 13;
  const every = named ? 1 : niceStep(64 * step);
  for (let at = Math.ceil(start / every) * every; at < Math.min(count, start + length * step); at += every) {
    const position = (at + (named ? 0.5 : 0) - start) / step;
    if (position < -1 || position > length) continue;
    const text = named ? labelOf(name, at, Math.floor((room - 10) / 7)) : String(at);
    write(text, from + position, css(rgb(at === chosen ? role : "soft")));
  }
}

/** 1, 2 or 5 times a power of ten. @param {number} least */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((part) => part * power).find((step) => step >= least) ?? 10 * power;
}
