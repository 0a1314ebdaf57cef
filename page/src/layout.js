// Positions of the matrices of a figure. A product is laid out so that each result lies where its row and column meet.

import { bare } from "./numbers.js";

const MAX_CELL = 54; // pixels

/**
 * Pixels for one step along each axis. They are the same in every figure, so the same dimension has the same length.
 * @param {number} width      of a figure, at most
 * @param {Record<string, number>} sizes @returns {AxisUnits}
 */
export function unitsFor(width, sizes) {
  const part = Math.min(1, Math.max(0.3, width / 1080));
  const { d_k, d_v, d_model } = sizes;
  const narrow = d_model ? 154 : 290;
  const room = /** @type {Record<string, number>} */ ({
    n: 418,
    m: 418,
    d_k: narrow,
    d_v: narrow,
    d_model: 198,
    "h·d_v": 198,
  });
  const even = d_model && width > 640 ? (width - 400) / (d_model + 2 * d_k + d_v) : 0; // X, W, Q, K, V in square cells
  const units = /** @type {AxisUnits} */ ({});
  for (const [dim, size] of Object.entries(sizes)) {
    const fitting = (room[dim] * part) / Math.max(1, size);
    units[dim] = Math.min(MAX_CELL, even >= 24 && dim !== "n" && dim !== "m" ? even : fitting);
  }
  return units;
}

const wide = (/** @type {Matrix} */ m, /** @type {AxisUnits} */ u) => Math.max(5, m.cols * u[m.colDim]);
const tall = (/** @type {Matrix} */ m, /** @type {AxisUnits} */ u) => Math.max(5, m.rows * u[m.rowDim]);

/** Room for row names. @param {Matrix} m */
function nameWidth(m) {
  if (!m.rowName) return 0;
  let most = 0;
  for (let i = 0; i < Math.min(m.rows, 300); i++) most = Math.max(most, lengthOf(bare(m.rowName(i), 10)));
  return most * 7 + 12;
}

/** @param {Matrix} m @param {AxisUnits} u */
function nameHeight(m, u) {
  if (!m.colName) return 0;
  if (u[m.colDim] >= 44) return 16;
  let most = 0;
  for (let j = 0; j < Math.min(m.cols, 300); j++) most = Math.max(most, lengthOf(bare(m.colName(j), 8)));
  return most * 7.4 + 12;
}

/** Wide characters count twice. @param {string} text */
const lengthOf = (text) =>
  [...text].reduce((sum, c) => sum + (/[\u1100-\uffdc]|\p{Extended_Pictographic}/u.test(c) ? 1.8 : 1), 0);

/**
 * left · top = result, for one or more pairs of top and result beside each other.
 * @param {Matrix} left @param {{top: Matrix, result: Matrix}[]} pairs @param {AxisUnits} u
 * @param {boolean} tight      on a phone
 * @returns {Layout}
 */
export function product(left, pairs, u, tight) {
  const names = nameWidth(left);
  const x0 = names + (tight ? 24 : 34);
  const above = Math.max(...pairs.map(({ top }) => nameHeight(top, u) + 30));
  const y1 = above + Math.max(...pairs.map(({ top }) => tall(top, u))) + 40;
  /** @type {Block[]} */
  const blocks = [
    { m: left, x: x0, y: y1, w: wide(left, u), h: tall(left, u), named: "l", measured: `l${names + 10}b` },
  ];
  /** @type {Label[]} */
  const marks = [{ text: left.symbol, role: left.role, x: x0 + wide(left, u) / 2, y: y1 - 12 }];
  let x = x0 + wide(left, u) + (tight ? 52 : 66);
  for (const { top, result } of pairs) {
    const [w, h] = [wide(top, u), tall(top, u)];
    const cols = nameHeight(top, u);
    blocks.push({ m: top, x, y: y1 - 40 - h, w, h, named: "t", measured: `lt${cols + 8}` });
    blocks.push({ m: result, x, y: y1, w: wide(result, u), h: tall(result, u), named: "", measured: "rb" });
    marks.push(
      { text: top.symbol, role: top.role, end: true, x: x - 32, y: y1 - 40 - h / 2 + 5 },
      { text: result.symbol, role: result.role, x: x + w / 2, y: y1 - 12 },
    );
    x += Math.max(w, 30) + (pairs.length > 1 ? 74 : 24);
  }
  return { blocks, marks, width: Math.ceil(x), height: Math.ceil(y1 + tall(left, u) + 34) };
}

/**
 * Matrices side by side, with a text between them; one below the other where there is no room.
 * @param {Matrix[]} matrices @param {string[]} between @param {AxisUnits} u @param {number} room @returns {Layout}
 */
export function beside(matrices, between, u, room) {
  const gap = 86;
  const names = Math.max(...matrices.map(nameWidth));
  const lead = names + (room < 640 ? 24 : 34);
  const total = lead + matrices.reduce((sum, m) => sum + wide(m, u), 0) + gap * (matrices.length - 1) + 8;
  const stacked = total > room && matrices.length > 1;
  /** @type {Block[]} */
  const blocks = [];
  /** @type {Label[]} */
  const marks = [];
  let [x, y] = [lead, 0];
  const tops = Math.max(...matrices.map((m) => nameHeight(m, u)));
  let height = 0;
  let width = 0;
  for (const [place, m] of matrices.entries()) {
    const [w, h] = [wide(m, u), tall(m, u)];
    const top = y + tops + 30;
    const first = place === 0 || stacked;
    blocks.push({ m, x, y: top, w, h, named: first ? "lt" : "t", measured: first ? `l${names + 10}b` : "b" });
    marks.push({ text: m.symbol, role: m.role, x: x + w / 2, y: y + 14 });
    height = Math.max(height, top + h + 36);
    width = Math.max(width, x + w + 22);
    const more = place < matrices.length - 1 && between[place];
    if (more)
      marks.push(
        stacked
          ? { text: `↓ ${between[place]}`, x: x + w / 2, y: height + 10 }
          : { text: `${between[place]}`, x: x + w + gap / 2, y: top + h / 2 - 8 },
        ...(stacked ? [] : [{ text: "→", x: x + w + gap / 2, y: top + h / 2 + 12 }]),
      );
    if (stacked) y = height + 26;
    else x += w + gap;
  }
  return { blocks, marks, width: Math.ceil(width), height: Math.ceil(height) };
}
