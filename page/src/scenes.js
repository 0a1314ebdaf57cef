// The three kinds of figure: a product, a single matrix, and a matrix before and after a change of its cells. Each says
// where its matrices stand and which cells belong to the chosen one, and writes its computation out.

import { bare, fmt, listOf } from "./numbers.js";
import { h } from "./dom.js";
import { transposed } from "./matrix.js";
import { sumOfProducts, sym } from "./written.js";

/** A matrix's symbol as one of its elements has it: m for M, s′ for S′. */
export const letterOf = (/** @type {Matrix} */ m) => m.symbol[0].toLowerCase() + (m.symbol[1] === "′" ? "′" : "");

/**
 * a · b = r, for one b or for several side by side. Where tokens are columns, all are transposed, and a stands above.
 * @param {Story} s @param {Matrix} a @param {Part[]} parts @returns {Scene}
 */
export function productScene(s, a, parts) {
  const pairs = s.columns
    ? [{ top: transposed(a), result: transposed(parts[0].r) }]
    : parts.map(({ b, r }) => ({ top: b, result: r }));
  const layout = product(s.columns ? transposed(parts[0].b) : a, pairs, s.units, s.room < 640);
  const left = s.columns ? 1 : 0;
  let last = 0;
  const partOf = (/** @type {number} */ block) => parts[Math.max(0, Math.ceil(block / 2) - 1)];
  const inOrder = (/** @type {any[]} */ list) => (s.columns ? list.reverse() : list); // kᵀ·q where tokens are columns
  const now = (/** @type {StateAxis} */ axis, /** @type {number} */ size) => Math.min(s.state[axis], size - 1);
  const cursor = () => {
    const { r, axes } = parts[last];
    return { block: 2 + 2 * last, row: now(axes[0], r.rows), col: now(axes[1], r.cols) };
  };
  return {
    layout,
    cursor,
    locate({ block, row, col }) {
      if (block === left) return { ...cursor(), row };
      const part = partOf(block);
      last = parts.indexOf(part);
      if (block === 2 + 2 * last) return { block, row, col };
      return { ...cursor(), col: part.b.flip ? row : col };
    },
    marks({ block, row, col }) {
      const { b } = partOf(block);
      return [
        { block: left, row, kind: a.role },
        { block: s.columns ? 0 : block - 1, ...(b.flip ? { row: col } : { col }), kind: b.role },
        { block, row, col, kind: "result" },
      ];
    },
    written({ block, row, col }) {
      const { b, r, bias, extra } = partOf(block);
      const seen = listOf(a.cols, (x) => x).filter((x) => !a.hidden?.(row, x));
      const terms = seen.map((x) => /** @type {[number, number]} */ (inOrder([a.value(row, x), b.value(x, col)])));
      return [
        sumOfProducts({
          name: sym(letterOf(r), s.indices(row, col), r.role),
          symbols: [
            ...inOrder([sym(letterOf(a), row, a.role), "·", sym(letterOf(b), col, b.role)]),
            bias ? [" + ", sym("b", col, "plain")] : null,
          ],
          terms,
          roles: /** @type {[string, string]} */ (inOrder([a.role, b.role])),
          plus: bias?.(row, col),
          total: r.value(row, col),
          more: (count, sum) => s.t("more", { count, sum }),
        }),
        extra?.(row, col),
      ];
    },
    pin({ block, row, col }) {
      const { axes } = partOf(block);
      s.commit({ [axes[0]]: row, [axes[1]]: col });
    },
    next: (block, by) => (block > 1 && parts[block / 2 - 1 + by] ? block + 2 * by : null),
  };
}

/** A single matrix. @param {Story} s @param {Matrix} m @param {StateAxis} axis @param {string} [note] @returns {Scene} */
export const singleScene = (s, m, axis, note) => ({
  layout: beside([s.laid(m)], "", s.units, s.room),
  cursor: () => ({ block: 0, row: s.state[axis], col: Math.min(s.state.feature, m.cols - 1) }),
  locate: (place) => place,
  marks: ({ row, col }) => [
    { block: 0, row, kind: m.role },
    { block: 0, row, col, kind: "result" },
  ],
  written: ({ row, col }) => [sym(letterOf(m), s.indices(row, col), m.role), " = ", h("b", fmt(m.value(row, col), 5))],
  pin: ({ row, col }) => s.commit({ [axis]: row, feature: col }),
  notes: note ? [note] : [],
});

/**
 * A matrix before and after each of its cells is changed, or (`whole`) each row as a whole.
 * @param {Story} s @param {Matrix} before @param {Matrix} after
 * @param {string} done      what stands between the two
 * @param {(i: number, j: number) => Child} written @param {boolean} [whole] @returns {Scene[]}
 */
export function beforeAfterScene(s, before, after, done, written, whole = false) {
  return [
    {
      layout: beside([s.laid(before), s.laid(after)], done, s.units, s.room),
      cursor: () => ({ block: 1, row: s.state.query, col: s.state.key }),
      locate: (place) => ({ ...place, block: 1 }),
      marks: ({ row, col }) => [
        ...(whole ? [0, 1].map((block) => ({ block, row, kind: "faint" })) : []),
        { block: 0, row, col, kind: "weights" },
        { block: 1, row, col, kind: "result" },
      ],
      written: ({ row, col }) => written(row, col),
      pin: ({ row, col }) => s.commit({ query: row, key: col }),
      notes: whole ? [] : [s.t("same scale")],
    },
  ];
}

const MAX_CELL = 54; // pixels

/**
 * Pixels for one step along each axis. They are the same in every figure, so the same dimension has the same length.
 * @param {number} width      of a figure, at most
 * @param {Record<string, number>} sizes @returns {AxisUnits}
 */
export function unitsFor(width, sizes) {
  const part = Math.min(1, Math.max(0.3, width / 1080));
  const { d_k, d_v, d_model } = sizes;
  const room = /** @type {Record<string, number>} */ ({ n: 418, m: 418, d_model: 198, "h·d_v": 198 });
  const narrow = d_model ? 154 : 290; // for d_k and d_v
  const even = d_model && width > 640 ? (width - 400) / (d_model + 2 * d_k + d_v) : 0; // X, W, Q, K, V in square cells
  const units = /** @type {AxisUnits} */ ({});
  for (const [dim, size] of Object.entries(sizes)) {
    const fitting = ((room[dim] ?? narrow) * part) / Math.max(1, size);
    units[dim] = Math.min(MAX_CELL, even >= 24 && dim !== "n" && dim !== "m" ? even : fitting);
  }
  return units;
}

const wide = (/** @type {Matrix} */ m, /** @type {AxisUnits} */ u) => Math.max(5, m.cols * u[m.colDim]);
const tall = (/** @type {Matrix} */ m, /** @type {AxisUnits} */ u) => Math.max(5, m.rows * u[m.rowDim]);

/** @param {Matrix} m @param {number} x @param {number} y @param {AxisUnits} u @param {string} named @param {string} measured @returns {Block} */
const blockOf = (m, x, y, u, named, measured) => ({ m, x, y, w: wide(m, u), h: tall(m, u), named, measured });

/** Pixels of the longest of some names; wide characters count twice. @param {Matrix["rowName"]} name @param {number} count @param {number} most      characters of each @param {number} each      pixels of a character */
function roomFor(name, count, most, each) {
  if (!name) return 0;
  const wide = /[\u1100-\uffdc]|\p{Extended_Pictographic}/u;
  const lengths = listOf(Math.min(count, 300), (i) =>
    [...bare(name(i), most)].reduce((sum, c) => sum + (wide.test(c) ? 1.8 : 1), 0),
  );
  return Math.max(0, ...lengths) * each + 12;
}
const nameWidth = (/** @type {Matrix} */ m) => roomFor(m.rowName, m.rows, 10, 7);
const nameHeight = (/** @type {Matrix} */ m, /** @type {AxisUnits} */ u) =>
  m.colName && u[m.colDim] >= 44 ? 16 : roomFor(m.colName, m.cols, 8, 7.4);

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
  const blocks = [blockOf(left, x0, y1, u, "l", `l${names + 10}b`)];
  /** @type {Label[]} */
  const marks = [{ text: left.symbol, role: left.role, x: x0 + wide(left, u) / 2, y: y1 - 12 }];
  let x = x0 + wide(left, u) + (tight ? 52 : 66);
  for (const { top, result } of pairs) {
    const [w, h] = [wide(top, u), tall(top, u)];
    blocks.push(
      blockOf(top, x, y1 - 40 - h, u, "t", `lt${nameHeight(top, u) + 8}`),
      blockOf(result, x, y1, u, "", "rb"),
    );
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
 * @param {Matrix[]} matrices @param {string} between @param {AxisUnits} u @param {number} room @returns {Layout}
 */
export function beside(matrices, between, u, room) {
  const gap = 86;
  const names = Math.max(...matrices.map(nameWidth));
  const lead = names + (room < 640 ? 24 : 34);
  const total = lead + matrices.reduce((sum, m) => sum + wide(m, u), 0) + gap * (matrices.length - 1) + 8;
  const stacked = total > room && matrices.length > 1;
  const tops = Math.max(...matrices.map((m) => nameHeight(m, u)));
  /** @type {Block[]} */
  const blocks = [];
  /** @type {Label[]} */
  const marks = [];
  let [x, y, height, width] = [lead, 0, 0, 0];
  for (const [place, m] of matrices.entries()) {
    const [w, h] = [wide(m, u), tall(m, u)];
    const top = y + tops + 30;
    const first = place === 0 || stacked;
    blocks.push(blockOf(m, x, top, u, first ? "lt" : "t", first ? `l${names + 10}b` : "b"));
    marks.push({ text: m.symbol, role: m.role, x: x + w / 2, y: y + 14 });
    height = Math.max(height, top + h + 36);
    width = Math.max(width, x + w + 22);
    const middle = x + w + gap / 2;
    if (between && place < matrices.length - 1) {
      if (stacked) marks.push({ text: `↓ ${between}`, x: x + w / 2, y: height + 10 });
      else marks.push({ text: between, x: middle, y: top + h / 2 - 8 }, { text: "→", x: middle, y: top + h / 2 + 12 });
    }
    if (stacked) y = height + 26;
    else x += w + gap;
  }
  return { blocks, marks, width: Math.ceil(width), height: Math.ceil(height) };
}
