// Around the weights: names of queries and keys, and the profiles of the chosen two.

import { MASKED } from "../attention.js";
import { css, rgb, weighed } from "../colour.js";
import { fmt } from "../numbers.js";
import { labelOf } from "./names.js";
import { axesOf, GAP, STRIP } from "./view.js";

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

/** Profiles. Below: the chosen query's weights on the keys in view. On the right: the weights on the chosen key. @param {CanvasRenderingContext2D} pen @param {Shown} shown @param {Frame} f */
export function drawProfiles(pen, shown, f) {
  const { down, across } = axesOf(shown, f);
  const bottom = f.top + f.high + GAP;
  const right = f.left + f.side + GAP;
  pen.fillStyle = css(rgb("soft"));
  pen.textBaseline = "bottom";
  pen.textAlign = "right";
  pen.fillText(fmt(shown.high, 2), f.left - 4, bottom + STRIP); // the profiles end where the colour scale does
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  pen.save();
  pen.translate(right + STRIP - 4, f.top - 4);
  pen.rotate(-Math.PI / 2);
  pen.fillText(fmt(shown.high, 2), 0, 0);
  pen.restore();
  const { shows } = shown.head;
  const roles = shows === "weights" ? ["query", "key", "key"] : [shows, shows, `${shows}-minus`]; // no weight is below 0
  const [query, key, minus] = roles.map((role) => css(rgb(role)));
  eachBar(shown, across, shown.row, (position, size, below) => {
    pen.fillStyle = below ? minus : query;
    pen.fillRect(position, bottom, 1, size);
  });
  eachBar(shown, down, shown.column, (position, size, below) => {
    pen.fillStyle = below ? minus : key;
    pen.fillRect(right, position, size, 1);
  });
}

/** For each pixel along an axis the largest weight in it, as a bar. @param {Shown} shown @param {Axis} axis @param {Float32Array | null} line @param {(at: number, size: number, below: boolean) => void} draw */
function eachBar({ view, high, aside, head }, { count, start, from, length, role }, line, draw) {
  if (!line) return;
  const shade = weighed(high);
  const left = aside && role === "key" ? head.first : -1;
  for (let position = 0; position < length; position++) {
    const first = Math.floor(start + position * view.step);
    if (first >= count) break;
    const last = Math.min(count, Math.max(first + 1, Math.floor(start + (position + 1) * view.step)));
    let most = 0;
    for (let at = first; at < last; at++)
      if (at !== left && line[at] !== MASKED && Math.abs(line[at]) > Math.abs(most)) most = line[at];
    if (most) draw(from + position, Math.max(1, Math.min(1, shade.shade(Math.abs(most))) * STRIP), most < 0);
  }
}
