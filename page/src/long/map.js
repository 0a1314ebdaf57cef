// The matrix as a map: from the whole down to single weights, with names, numbers, and the profiles of the chosen row and column.

import { MASKED } from "../attention.js";
import { css, inkOn, rgb, signed, weighed } from "../colour.js";
import { h } from "../dom.js";
import { short, spelled } from "../numbers.js";
import { firstPixel, forbidden, pixel } from "./source.js";
import { forgetWanted, SIDE, tileOf } from "./tiles.js";
import { tokenAt, unitName, unitOf } from "./units.js";

/** @typedef {import("./source.js").Head} Head */
/** @typedef {import("./units.js").Units} Units */
/** @typedef {{y: number, x: number, step: number}} View      the first row and column, and units for each pixel of the screen */
/**
 * @typedef {object} Shown
 * @property {Head} head
 * @property {Head | null} other      subtracted
 * @property {Record<string, import("./source.js").Picture>} wide
 * @property {Units} rows
 * @property {Units} cols
 * @property {"most" | "mean"} rule
 * @property {"sqrt" | "linear" | "log"} scale
 * @property {boolean} aside
 * @property {number} whole      the head's largest weight
 * @property {number} high      the scale's end
 * @property {boolean} inView      the scale ends at what is in view
 * @property {View} view
 * @property {{i: number, j: number, pinned: boolean}} cell      in units
 * @property {Float32Array | null} row      weights of the chosen query, by token
 * @property {Float32Array | null} column
 * @property {(token: number) => string} rowName
 * @property {(token: number) => string} colName
 */

const NEAREST = 1 / 48; // units for a pixel: cells of 48 pixels
const COMPUTED = 8; // up to so many units in a pixel are computed; above, the stored picture
const LEFT = 88;
const TOP = 76;
const STRIP = 44;
const GAP = 6;

/** @param {Shown} s @param {number} side */
export const wholeStep = (s, side) => Math.max(NEAREST, Math.max(s.rows.count, s.cols.count) / side);

/** How the map's canvas is divided. @param {number} width @param {Shown} s */
export function frame(width, s) {
  const narrow = width < 520;
  const [left, top] = narrow ? [54, 56] : [LEFT, TOP];
  const side = Math.max(120, Math.min(640, width - left - STRIP - GAP));
  const ratio = Math.min(1, Math.max(0.12, s.rows.count / s.cols.count));
  return { left, top, side, high: Math.max(96, Math.round(side * ratio)), width: left + side + GAP + STRIP, height: top + Math.max(96, Math.round(side * ratio)) + GAP + STRIP };
}

/** Keep the view inside the matrix. @param {Shown} s @param {{side: number, high: number}} f */
export function settle(s, f) {
  const { view } = s;
  view.step = Math.min(Math.max(view.step, NEAREST), Math.max(NEAREST, s.rows.count / f.high, s.cols.count / f.side));
  view.y = Math.max(0, Math.min(view.y, s.rows.count - f.high * view.step));
  view.x = Math.max(0, Math.min(view.x, s.cols.count - f.side * view.step));
}

/** Nearer or farther around a unit that stays where it is. @param {Shown} s @param {{side: number, high: number}} f @param {number} factor @param {number} row @param {number} col */
export function zoom(s, f, factor, row, col) {
  const { view } = s;
  const before = view.step;
  view.step = Math.max(NEAREST, before * factor);
  const change = view.step / before;
  view.y = row - (row - view.y) * change;
  view.x = col - (col - view.x) * change;
  settle(s, f);
}

/** Bring the cell into view. @param {Shown} s @param {{side: number, high: number}} f */
export function follow(s, f) {
  const { view, cell } = s;
  const [tall, wide] = [f.high * view.step, f.side * view.step];
  if (cell.i < view.y) view.y = cell.i;
  if (cell.i + 1 > view.y + tall) view.y = cell.i + 1 - tall;
  if (cell.j < view.x) view.x = cell.j;
  if (cell.j + 1 > view.x + wide) view.x = cell.j + 1 - wide;
  settle(s, f);
}

/** The colours of this map's values. @param {Shown} s */
export const shadeOf = (s) => (s.other ? signed("weights", s.high) : weighed(s.high, s.scale));

/**
 * Draw everything; says how: at which level, and whether tiles are missing.
 * @param {HTMLCanvasElement} canvas @param {Shown} s
 */
export function draw(canvas, s) {
  const f = frame(canvas.parentElement?.clientWidth ?? 700, s);
  settle(s, f);
  const dense = window.devicePixelRatio || 1;
  canvas.width = f.width * dense;
  canvas.height = f.height * dense;
  canvas.style.width = `${f.width}px`;
  canvas.style.height = `${f.height}px`;
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  pen.scale(dense, dense);
  pen.imageSmoothingEnabled = false;
  pen.save();
  pen.beginPath();
  pen.rect(f.left, f.top, f.side, f.high);
  pen.clip();
  pen.translate(f.left, f.top);
  const how = weights(pen, s, f, canvas);
  pen.restore();
  pen.strokeStyle = css(rgb("line"));
  pen.strokeRect(f.left - 0.5, f.top - 0.5, Math.min(f.side, s.cols.count / s.view.step) + 1, Math.min(f.high, s.rows.count / s.view.step) + 1);
  names(pen, s, f);
  profiles(pen, s, f);
  marks(pen, s, f);
  return { ...how, frame: f };
}

/**
 * @param {CanvasRenderingContext2D} pen @param {Shown} s @param {{side: number, high: number}} f @param {HTMLCanvasElement} canvas
 */
function weights(pen, s, f, canvas) {
  const { view, head, other } = s;
  s.high = s.whole;
  const level = Math.max(0, Math.floor(Math.log2(view.step * 1.001)));
  const near = 2 ** level <= COMPUTED || !head.small.most;
  forgetWanted();
  const computed = near && head.exact && (!other || other.exact);
  const [rows, cols] = [f.high * view.step, f.side * view.step];
  if (!computed) {
    picture(pen, s, f, table(s));
    return { level: -1, missing: 0, pixels: pictureUsed(s)?.pixels ?? [1, 1] };
  }
  const span = SIDE * 2 ** level;
  const tiles = [];
  for (let row = Math.floor(view.y / span); row * span < Math.min(s.rows.count, view.y + rows); row++)
    for (let col = Math.floor(view.x / span); col * span < Math.min(s.cols.count, view.x + cols); col++) {
      const place = { rows: s.rows, cols: s.cols, level, row, col, rule: s.rule };
      tiles.push({ row, col, one: tileOf({ head, ...place }), two: other && tileOf({ head: other, ...place }) });
    }
  const there = tiles.filter(({ one, two }) => one && (two || !other));
  const missing = tiles.length - there.length;
  if (s.inView && !missing) s.high = Math.max(1e-12, ...there.map(({ one, two, col }) => largestOf(one, two, s.aside ? unitOf(s.cols, head.first) - col * span : -1)));
  const colours = table(s);
  if (missing) picture(pen, s, f, colours);
  for (const { row, col, one, two } of there) {
    if (!one) continue;
    const [x, y, size] = [(col * span - view.x) / view.step, (row * span - view.y) / view.step, span / view.step];
    pen.drawImage(painted(one, two, s, colours, col * span, level), x, y, size, size);
    if (1 / view.step >= 34) numbers(pen, s, one, two, row * SIDE, col * SIDE, f);
  }
  canvas.dataset.level = String(level);
  return { level, missing, pixels: [1, 1] };
}

/** The largest of a tile, but for the first key's column where that is set aside. @param {Float32Array | null} one @param {Float32Array | null} two @param {number} aside */
function largestOf(one, two, aside) {
  let most = 0;
  if (one) for (let at = 0; at < one.length; at++) if (at % SIDE !== aside) most = Math.max(most, two ? Math.abs(one[at] - Math.max(0, two[at])) : one[at]);
  return most;
}

/** Colours by place on the scale, for speed. @param {Shown} s */
function table(s) {
  const shade = shadeOf(s);
  const entries = Array.from({ length: 256 }, (_, at) => shade.along(at / 255).map(Math.round));
  return { of: (/** @type {number} */ x) => entries[Math.max(0, Math.min(255, Math.round(shade.shade(x) * 255)))], masked: rgb("hatch-ground"), aside: rgb("ground") };
}

/** @typedef {ReturnType<typeof table>} Colours */

/** @type {WeakMap<Float32Array, {how: string, sheet: HTMLCanvasElement}>} */
const sheets = new WeakMap();

/** A tile in colour. @param {Float32Array} one @param {Float32Array | null} two @param {Shown} s @param {Colours} colours @param {number} from @param {number} level */
function painted(one, two, s, colours, from, level) {
  const how = `${s.scale} ${s.high} ${s.aside} ${colours.masked} ${two ? Object.values(/** @type {Head} */ (s.other).address) : ""}`;
  const known = sheets.get(one);
  if (known?.how === how) return known.sheet;
  const sheet = known?.sheet ?? document.createElement("canvas");
  sheet.width = sheet.height = SIDE;
  sheets.set(one, { how, sheet });
  const pen = /** @type {CanvasRenderingContext2D} */ (sheet.getContext("2d"));
  const image = pen.createImageData(SIDE, SIDE);
  const bytes = image.data;
  const aside = s.aside && !level ? unitOf(s.cols, s.head.first) - from : -1;
  for (let at = 0; at < one.length; at++) {
    const hidden = one[at] === MASKED;
    const x = two ? one[at] - (two[at] === MASKED ? 0 : two[at]) : one[at];
    const c = hidden ? colours.masked : at % SIDE === aside ? colours.aside : colours.of(x);
    bytes[4 * at] = c[0];
    bytes[4 * at + 1] = c[1];
    bytes[4 * at + 2] = c[2];
    bytes[4 * at + 3] = 255;
  }
  pen.putImageData(image, 0, 0);
  return sheet;
}

/** @param {Shown} s */
const pictureUsed = (s) => (s.other ? s.head.small : s.wide.most ? s.wide : s.head.small)[s.rule];

/** The stored picture, stretched; a pixel of the screen takes the pixel its first unit falls on. @param {CanvasRenderingContext2D} pen @param {Shown} s @param {{side: number, high: number}} f @param {Colours} colours */
function picture(pen, s, f, colours) {
  const p = pictureUsed(s);
  if (!p) return;
  const q = s.other ? s.other.small[s.rule] : null;
  const { n, m, rules, first } = s.head;
  const [high, wide] = [Math.ceil(Math.min(f.high, s.rows.count / s.view.step)), Math.ceil(Math.min(f.side, s.cols.count / s.view.step))];
  const image = pen.createImageData(wide, high);
  const places = (/** @type {number} */ size, /** @type {number} */ start, /** @type {Units} */ u, /** @type {number} */ tokens, /** @type {number} */ pixels) =>
    Array.from({ length: size }, (_, at) => Math.min(pixels - 1, Math.floor(((tokenAt(u, Math.min(u.count - 1, Math.floor(start + (at + 0.5) * s.view.step))) + 0.5) * pixels) / tokens)));
  const [ys, xs] = [places(high, s.view.y, s.rows, n, p.pixels[0]), places(wide, s.view.x, s.cols, m, p.pixels[1])];
  const sinkAt = Math.floor((first * p.pixels[1]) / m);
  const edge = (/** @type {number} */ at, /** @type {number} */ size, /** @type {number} */ pixels) => Math.floor((at * size) / pixels);
  for (let y = 0; y < high; y++)
    for (let x = 0; x < wide; x++) {
      const [row, col] = [ys[y], xs[x]];
      const value = (/** @type {import("./source.js").Picture} */ from) => {
        const own = pixel(from, row, col).value;
        return col === sinkAt && !s.aside ? (s.rule === "most" ? Math.max(own, firstPixel(from, row).value) : own + firstPixel(from, row).value / Math.max(1, m / p.pixels[1])) : own;
      };
      const x1 = q ? value(p) - value(q) : value(p);
      const gone = x1 === 0 && forbidden(rules, edge(row, n, p.pixels[0]), Math.max(edge(row + 1, n, p.pixels[0]), edge(row, n, p.pixels[0]) + 1), edge(col, m, p.pixels[1]), edge(col + 1, m, p.pixels[1]));
      const c = gone ? colours.masked : colours.of(x1);
      image.data.set([c[0], c[1], c[2], 255], 4 * (y * wide + x));
    }
  const scratch = document.createElement("canvas");
  scratch.width = wide;
  scratch.height = high;
  /** @type {CanvasRenderingContext2D} */ (scratch.getContext("2d")).putImageData(image, 0, 0);
  pen.drawImage(scratch, 0, 0, wide, high);
}

/** @param {CanvasRenderingContext2D} pen @param {Shown} s @param {Float32Array} one @param {Float32Array | null} two @param {number} i0 @param {number} j0 @param {{side: number, high: number}} f */
function numbers(pen, s, one, two, i0, j0, f) {
  const { view } = s;
  const size = 1 / view.step;
  const shade = shadeOf(s);
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (let i = Math.max(i0, Math.floor(view.y)); i < Math.min(i0 + SIDE, s.rows.count, Math.ceil(view.y + f.high * view.step)); i++)
    for (let j = Math.max(j0, Math.floor(view.x)); j < Math.min(j0 + SIDE, s.cols.count, Math.ceil(view.x + f.side * view.step)); j++) {
      const at = (i - i0) * SIDE + j - j0;
      const [x, y] = [(j - view.x + 0.5) * size, (i - view.y + 0.5) * size];
      if (one[at] === MASKED) {
        pen.strokeStyle = css(rgb("hatch"));
        pen.beginPath();
        for (const part of [0.5, 1, 1.5]) {
          const [from, to] = [Math.max(0, part - 1) * size, Math.min(1, part) * size];
          pen.moveTo(x - size / 2 + from, y - size / 2 + to);
          pen.lineTo(x - size / 2 + to, y - size / 2 + from);
        }
        pen.stroke();
        continue;
      }
      const value = two ? one[at] - (two[at] === MASKED ? 0 : two[at]) : one[at];
      pen.fillStyle = inkOn(shade.at(value)) === "dark" ? "#000" : "#fff";
      pen.fillText(short(value), x, y);
    }
}

/** Names of rows and columns where there is room, else numbers. @param {CanvasRenderingContext2D} pen @param {Shown} s @param {ReturnType<typeof frame>} f */
function names(pen, s, f) {
  const { view } = s;
  const size = 1 / view.step;
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const characters = Math.floor((f.left - 10) / 7);
  const named = size >= 13;
  const every = named ? 1 : niceStep(64 * view.step);
  const ends = { rows: Math.min(s.rows.count, view.y + f.high * view.step), cols: Math.min(s.cols.count, view.x + f.side * view.step) };
  for (let i = Math.ceil(view.y / every) * every; i < ends.rows; i += every) {
    const y = f.top + (i + (named ? 0.5 : 0) - view.y) * size;
    if (y < f.top - 1 || y > f.top + f.high) continue;
    pen.textAlign = "right";
    pen.fillStyle = i === s.cell.i ? css(rgb("query")) : css(rgb("soft"));
    pen.fillText(named ? spelled(unitName(s.rows, s.rowName, i), characters) : String(i), f.left - 6, y);
  }
  for (let j = Math.ceil(view.x / every) * every; j < ends.cols; j += every) {
    const x = f.left + (j + (named ? 0.5 : 0) - view.x) * size;
    if (x < f.left - 1 || x > f.left + f.side) continue;
    pen.save();
    pen.translate(x, f.top - 6);
    pen.rotate(-Math.PI / 2);
    pen.textAlign = "left";
    pen.fillStyle = j === s.cell.j ? css(rgb("key")) : css(rgb("soft"));
    pen.fillText(named ? spelled(unitName(s.cols, s.colName, j), Math.floor((f.top - 10) / 7)) : String(j), 0, 0);
    pen.restore();
  }
}

/** 1, 2 or 5 times a power of ten. @param {number} least */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((part) => part * power).find((step) => step >= least) ?? 10 * power;
}

/** Below: what the chosen query gives the keys in view. At the right: what the chosen key gets from the queries in view. @param {CanvasRenderingContext2D} pen @param {Shown} s @param {ReturnType<typeof frame>} f */
function profiles(pen, s, f) {
  const shade = shadeOf({ ...s, other: null });
  const bars = (/** @type {Float32Array} */ values, /** @type {Units} */ u, /** @type {number} */ start, /** @type {number} */ length, /** @type {string} */ role, /** @type {(at: number, size: number) => [number, number, number, number]} */ box) => {
    pen.fillStyle = css(rgb(role));
    for (let at = 0; at < length; at++) {
      const from = Math.floor(start + at * s.view.step);
      if (from >= u.count) break;
      const to = Math.max(from + 1, Math.floor(start + (at + 1) * s.view.step));
      let most = 0;
      for (let token = tokenAt(u, from); token < tokenAt(u, Math.min(to, u.count)); token++) if (!(s.aside && u === s.cols && token === s.head.first)) most = Math.max(most, values[token]);
      if (most > 0) pen.fillRect(...box(at, Math.max(1, Math.min(1, shade.shade(most)) * STRIP)));
    }
  };
  if (s.row) bars(s.row, s.cols, s.view.x, f.side, "query", (at, size) => [f.left + at, f.top + f.high + GAP, 1, size]);
  if (s.column) bars(s.column, s.rows, s.view.y, f.high, "key", (at, size) => [f.left + f.side + GAP, f.top + at, size, 1]);
}

/** The chosen cell: its row and column, and the cell itself. @param {CanvasRenderingContext2D} pen @param {Shown} s @param {ReturnType<typeof frame>} f */
function marks(pen, s, f) {
  const size = 1 / s.view.step;
  const [x, y] = [f.left + (s.cell.j - s.view.x) * size, f.top + (s.cell.i - s.view.y) * size];
  const box = Math.max(size, 3);
  pen.save();
  pen.beginPath();
  pen.rect(f.left - 2, f.top - 2, f.side + 4, f.high + 4);
  pen.clip();
  pen.lineWidth = 1;
  pen.setLineDash(s.cell.pinned ? [] : [3, 3]);
  pen.strokeStyle = css(rgb("query"));
  pen.strokeRect(f.left - 4, y - 0.5, f.side + 8, box + 1);
  pen.strokeStyle = css(rgb("key"));
  pen.strokeRect(x - 0.5, f.top - 4, box + 1, f.high + 8);
  pen.setLineDash([]);
  pen.lineWidth = 2;
  pen.strokeStyle = css(rgb("ink"));
  pen.strokeRect(x - 1, y - 1, box + 2, box + 2);
  pen.restore();
}

/** The cell under a point of the canvas, in units; null outside. @param {Shown} s @param {ReturnType<typeof frame>} f @param {number} px @param {number} py */
export function cellAt(s, f, px, py) {
  const [j, i] = [s.view.x + (px - f.left) * s.view.step, s.view.y + (py - f.top) * s.view.step];
  if (px < f.left || py < f.top || px > f.left + f.side || py > f.top + f.high || i < 0 || j < 0 || i >= s.rows.count || j >= s.cols.count) return null;
  return { i: Math.floor(i), j: Math.floor(j), row: i, col: j };
}
