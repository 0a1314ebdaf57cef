// The matrix as a map: its weights, computed as tiles where it is zoomed in, elsewhere and until these are ready the stored
// picture; names beside them, and the chosen cell.

import { MASKED } from "../attention.js";
import { colour, css, fill, hatching, inkOn, penOn, rgb, weighed } from "../colour.js";
import { short } from "../numbers.js";
import { labelOf } from "./said.js";
import { forbidden } from "./source.js";
import { forgetWanted, SIDE, tileOf } from "./tiles.js";
import { endOf, filled } from "./view.js";

/** @typedef {{top: number, left: number, weights: Float32Array}} Tile      top, left: its first query and key */

const COMPUTED = 8; // up to so many weights along a pixel are computed; above, the stored picture
const NUMBERED = 34; // from so many pixels on a cell has its number

/**
 * Draw everything; says how many weights a pixel has, whether that is a stored picture's, and how many tiles are missing.
 * @param {HTMLCanvasElement} canvas @param {Look} look @param {Frame} f
 */
export function draw(canvas, look, f) {
  const pen = penOn(canvas, f.width, f.height);
  pen.imageSmoothingEnabled = false;
  const clip = (/** @type {number} */ more) => {
    pen.save();
    pen.beginPath();
    pen.rect(f.left - more, f.top - more, f.side + 2 * more, f.high + 2 * more);
    pen.clip();
  };
  clip(0);
  pen.translate(f.left, f.top);
  const how = drawWeights(pen, look, f);
  pen.restore();
  const { wide, high } = filled(look, f);
  pen.strokeStyle = css(rgb("line"));
  pen.strokeRect(f.left - 0.5, f.top - 0.5, wide + 1, high + 1);
  drawNames(pen, look, f);
  clip(2);
  drawCell(pen, look, f);
  pen.restore();
  return how;
}

/** @param {CanvasRenderingContext2D} pen @param {Look} look @param {Frame} f */
function drawWeights(pen, look, f) {
  const { view, head } = look;
  const { wide, high } = filled(look, f);
  const level = Math.max(0, Math.floor(Math.log2(view.step * 1.001)));
  forgetWanted();
  const hatch = (pen.fillStyle = hatching(pen));
  pen.fillRect(0, 0, wide, high);
  if (!head.exact || (2 ** level > COMPUTED && head.small)) {
    const { rows, cols } = drawPicture(pen, look, wide, high) ?? { rows: 1, cols: 1 };
    return { rows: Math.ceil(head.n / rows), cols: Math.ceil(head.m / cols), stretched: true, missing: 0 };
  }
  const [there, missing] = tilesInView(look, f, level);
  if (missing) drawPicture(pen, look, wide, high);
  const size = (SIDE * 2 ** level) / view.step;
  for (const tile of there) {
    const [x, y] = [(tile.left - view.x) / view.step, (tile.top - view.y) / view.step];
    pen.fillStyle = hatch;
    if (missing) pen.fillRect(x, y, size, size); // covers the picture
    const paint = (/** @type {Uint32Array} */ pixels) => colour(pixels, tile.weights, weighed(look.whole), 0); // masked: the hatching shows
    pen.drawImage(coloured(tile.weights, look, SIDE, SIDE, paint), x, y, size, size);
    if (1 / view.step >= NUMBERED) drawNumbers(pen, look, f, tile);
  }
  return { rows: 2 ** level, cols: 2 ** level, stretched: false, missing };
}

/** The tiles that are there, and how many are not. @param {Look} look @param {Frame} f @param {number} level @returns {[Tile[], number]} */
function tilesInView(look, f, level) {
  const { head, view } = look;
  const span = SIDE * 2 ** level;
  const end = endOf(look, f);
  /** @type {Tile[]} */
  const there = [];
  let missing = 0;
  for (let row = Math.floor(view.y / span); row * span < end.y; row++)
    for (let col = Math.floor(view.x / span); col * span < end.x; col++) {
      const weights = tileOf({ head, level, row, col });
      if (weights) there.push({ top: row * span, left: col * span, weights });
      else missing++;
    }
  return [there, missing];
}

/** @type {WeakMap<object, {how: string, sheet: HTMLCanvasElement}>} */
const sheets = new WeakMap();

/** A tile or a picture in colour, painted where its colours are others than before. @param {object} key @param {Look} look @param {number} wide @param {number} high @param {(pixels: Uint32Array) => void} paint */
function coloured(key, look, wide, high, paint) {
  const shade = weighed(look.whole);
  const how = [look.whole, shade.along(0), shade.along(1), look.head.version].join();
  const known = sheets.get(key);
  if (known?.how === how) return known.sheet;
  const sheet = fill(wide, high, paint, known?.sheet);
  sheets.set(key, { how, sheet });
  return sheet;
}

/** Draws the finest picture that there is, stretched over the view. @param {CanvasRenderingContext2D} pen @param {Look} look @param {number} wide @param {number} high */
function drawPicture(pen, look, wide, high) {
  const { head, view } = look;
  const picture = look.wide || head.small;
  if (!picture) return null;
  const { rows, cols } = picture;
  const paint = (/** @type {Uint32Array} */ pixels) => paintPicture(head, picture, weighed(look.whole), 0, pixels);
  const [down, across] = [rows / head.n, cols / head.m]; // pixels of a token
  const sheet = coloured(picture, look, cols, rows, paint);
  const part = [wide * view.step * across, high * view.step * down];
  pen.drawImage(sheet, view.x * across, view.y * down, part[0], part[1], 0, 0, wide, high);
  return picture;
}

/** The pixels of a stored picture in colour. @param {Head} head @param {Picture} picture @param {Shade} shade @param {number} masked      the pixel where the rules mask every weight @param {Uint32Array} pixels */
export function paintPicture({ n, m, rules }, { rows, cols, value }, shade, masked, pixels) {
  const top = (/** @type {number} */ row) => Math.floor((row * n) / rows);
  const left = (/** @type {number} */ col) => Math.floor((col * m) / cols);
  const values = Float32Array.from(pixels, (_, index) => {
    const [row, col] = [Math.floor(index / cols), index % cols];
    const end = Math.max(top(row + 1), top(row) + 1);
    const x = value(row, col);
    return x === 0 && forbidden(rules, top(row), end, left(col), left(col + 1)) ? MASKED : x;
  });
  colour(pixels, values, shade, masked);
}

/** The numbers of one tile. @param {CanvasRenderingContext2D} pen @param {Look} look @param {Frame} f @param {Tile} tile */
function drawNumbers(pen, look, f, { weights, top, left }) {
  const { view } = look;
  const shade = weighed(look.whole);
  const end = endOf(look, f);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (let i = Math.max(top, Math.floor(view.y)); i < Math.min(top + SIDE, end.y); i++)
    for (let j = Math.max(left, Math.floor(view.x)); j < Math.min(left + SIDE, end.x); j++) {
      const value = weights[(i - top) * SIDE + j - left];
      if (value === MASKED) continue;
      pen.fillStyle = inkOn(Number.isFinite(value) ? shade.colour(value) : rgb("warn")) === "dark" ? "#000" : "#fff";
      pen.fillText(short(value), (j + 0.5 - view.x) / view.step, (i + 0.5 - view.y) / view.step);
    }
}

/** Names of queries and keys where there is room, else numbers. @param {CanvasRenderingContext2D} pen @param {Look} look @param {Frame} f */
function drawNames(pen, { queries, keys, queryName, keyName, view, chosen }, f) {
  const { step } = view;
  const named = 1 / step >= 13;
  const every = named ? 1 : niceStep(64 * step);
  /** @param {number} count @param {(token: number) => string} name @param {number} start @param {number} length @param {number} room @param {(name: string, position: number, at: number) => void} write */
  const eachName = (count, name, start, length, room, write) => {
    for (let at = Math.ceil(start / every) * every; at < Math.min(count, start + length * step); at += every) {
      const position = (at + (named ? 0.5 : 0) - start) / step;
      const text = named ? labelOf(name, at, Math.floor((room - 10) / 7)) : String(at);
      if (position >= -1 && position <= length) write(text, position, at);
    }
  };
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  eachName(queries, queryName, view.y, f.high, f.left, (name, position, at) => {
    pen.fillStyle = css(rgb(at === chosen.query ? "query" : "soft"));
    pen.fillText(name, f.left - 6, f.top + position);
  });
  pen.textAlign = "left";
  eachName(keys, keyName, view.x, f.side, f.top, (name, position, at) => {
    pen.save();
    pen.translate(f.left + position, f.top - 6);
    pen.rotate(-Math.PI / 2);
    pen.fillStyle = css(rgb(at === chosen.key ? "key" : "soft"));
    pen.fillText(name, 0, 0);
    pen.restore();
  });
}

/** 1, 2 or 5 times a power of ten. @param {number} least */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((part) => part * power).find((step) => step >= least) ?? 10 * power;
}

/** The chosen cell: its row and column, and the cell itself. @param {CanvasRenderingContext2D} pen @param {Look} look @param {Frame} f */
function drawCell(pen, { view, chosen, state }, f) {
  const size = 1 / view.step;
  const [x, y] = [f.left + (chosen.key - view.x) * size, f.top + (chosen.query - view.y) * size];
  const box = Math.max(size, 3);
  pen.lineWidth = 1;
  pen.setLineDash(state.pinned ? [] : [3, 3]);
  pen.strokeStyle = css(rgb("query"));
  pen.strokeRect(f.left - 4, y - 0.5, f.side + 8, box + 1);
  pen.strokeStyle = css(rgb("key"));
  pen.strokeRect(x - 0.5, f.top - 4, box + 1, f.high + 8);
  pen.setLineDash([]);
  pen.lineWidth = 2;
  pen.strokeStyle = css(rgb("ink"));
  pen.strokeRect(x - 1, y - 1, box + 2, box + 2);
}
