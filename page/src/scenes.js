// A figure of a step: matrices, of which some are results; each cell of a result is made from cells, rows or columns of the
// others. Where the matrices stand, and which cells belong to the chosen one.

import { penOf } from "./colour.js";
import { h } from "./dom.js";
import { transposed } from "./matrix.js";
import { bare, listOf } from "./numbers.js";
import { sumOfProducts, sym } from "./written.js";

/** A matrix's symbol as one of its elements has it: m for M, s′ for S′. */
export const letterOf = (/** @type {Matrix} */ m) => m.symbol[0].toLowerCase() + (m.symbol[1] === "′" ? "′" : "");

/**
 * @param {Story} s @param {Layout} layout @param {Result[]} results @param {string[]} [notes] @returns {Scene}
 */
export function sceneOf(s, layout, results, notes = []) {
  let last = results[0]; // that was pointed at
  const cursor = () => {
    const { block, r, axes } = last;
    return { block, row: Math.min(s.state[axes[0]], r.rows - 1), col: Math.min(s.state[axes[1]], r.cols - 1) };
  };
  const has = (/** @type {Result} */ { block, from }, /** @type {number} */ other) =>
    block === other || from.some((each) => each.block === other);
  return {
    ...{ layout, cursor, notes },
    locate({ block, row, col }) {
      last = [last, ...results].find((each) => has(each, block)) ?? last;
      const { from, block: own } = last;
      if (block === own) return { block, row, col };
      const now = cursor();
      const place = [now.row, now.col]; // what the source does not say goes to a third place, where nobody looks
      const source = from.find((each) => each.block === block);
      place[source?.row ?? 2] = row;
      place[source?.col ?? 2] = col;
      return { block: own, row: place[0], col: place[1] };
    },
    marks({ block, row, col }) {
      const along = (/** @type {number} */ axis = 2) => [row, col][axis];
      const marks = last.from.map((each) => ({ ...each, row: along(each.row), col: along(each.line ? 2 : each.col) }));
      return [...marks, { block, row, col, kind: "result" }];
    },
    written: ({ row, col }) => last.written(row, col),
    pin: ({ row, col }) => s.commit({ [last.axes[0]]: row, [last.axes[1]]: col }),
    next: (block, by) => results[results.findIndex((each) => each.block === block) + by]?.block ?? null,
  };
}

/**
 * a · b = r, for one b or for several side by side. Where tokens are columns, all are transposed, and a stands above.
 * @param {Story} s @param {Matrix} a @param {Part[]} parts @returns {Scene}
 */
export function productScene(s, a, parts) {
  const tops = s.columns ? [transposed(a)] : parts.map(({ b }) => b);
  const below = [s.columns ? transposed(parts[0].b) : a, ...parts.map(({ r }) => s.laid(r))];
  const layout = laidOut([[null, ...tops], below], s.units, s.room < 640);
  const inOrder = (/** @type {any[]} */ list) => (s.columns ? list.reverse() : list); // kᵀ·q where tokens are columns
  const results = parts.map(({ b, r, axes, bias, extra }, place) => ({
    ...{ block: parts.length + 1 + place, r, axes },
    from: [
      { block: s.columns ? 0 : parts.length, row: 0, kind: a.role },
      { block: s.columns ? 1 : place, [b.flip ? "row" : "col"]: 1, kind: b.role },
    ],
    written(/** @type {number} */ row, /** @type {number} */ col) {
      const seen = listOf(a.cols, (x) => x).filter((x) => !a.hidden?.(row, x));
      const sum = sumOfProducts({
        name: sym(letterOf(r), s.indices(row, col), r.role),
        symbols: [
          ...inOrder([sym(letterOf(a), row, a.role), "·", sym(letterOf(b), col, b.role)]),
          bias ? [" + ", sym("b", col, "plain")] : null,
        ],
        terms: seen.map((x) => /** @type {[number, number]} */ (inOrder([a.value(row, x), b.value(x, col)]))),
        roles: /** @type {[string, string]} */ (inOrder([a.role, b.role])),
        plus: bias?.(row, col),
        total: r.value(row, col),
        t: s.t,
      });
      return [sum, extra?.(row, col)];
    },
  }));
  return sceneOf(s, layout, results);
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

const pen = penOf(h("canvas"));

/** Pixels of the longest of some names. @param {Matrix["rowName"]} name @param {number} count @param {number} most      characters of each */
function roomFor(name, count, most) {
  if (!name) return 0;
  pen.font = "13px system-ui, sans-serif";
  return 12 + Math.max(0, ...listOf(Math.min(count, 300), (i) => pen.measureText(bare(name(i), most)).width));
}
const nameHeight = (/** @type {Matrix} */ m, /** @type {AxisUnits} */ u) =>
  m.colName && u[m.colDim] >= 44 ? 16 : roomFor(m.colName, m.cols, 8);

/**
 * Matrices in rows and columns: names and sizes along the edges, symbols beside or above, a text from each to the next.
 * @param {(Matrix | null)[][]} rows @param {AxisUnits} u @param {boolean} tight      on a phone
 * @param {string} [between] @returns {Layout}
 */
function laidOut(rows, u, tight, between) {
  const columns = rows[0].map((_, col) => rows.map((row) => row[col]));
  const widths = columns.map((column) => Math.max(30, ...column.map((m) => (m ? wide(m, u) : 0))));
  const [gap, stacked] = [tight ? 54 : 76, columns.length === 1];
  const names = Math.max(...columns[0].map((m) => (m ? roomFor(m.rowName, m.rows, 10) : 0)));
  /** @type {Layout} */
  const layout = { blocks: [], marks: [], width: 0, height: 0 };
  for (const [at, row] of rows.entries()) {
    const last = stacked || at === rows.length - 1;
    const over = row.map((m, col) =>
      m && !rows.slice(0, at).some((each) => each[col] && !stacked) ? nameHeight(m, u) : 0,
    );
    const top = layout.height + Math.max(...over) + (at && stacked ? 56 : 30);
    let x = names + (tight ? 24 : 34);
    for (const [col, m] of row.entries()) {
      const [w, h, middle] = [m ? wide(m, u) : 0, m ? tall(m, u) : 0, x + widths[col] / 2];
      const edges = `${col ? (last ? "" : "l") : `l${names + 10}`}${last ? "b" : `t${over[col] + 8}`}`;
      if (m) {
        layout.blocks.push({ m, x, y: top, w, h, named: `${col ? "" : "l"}${over[col] ? "t" : ""}`, measured: edges });
        const place = last ? { x: x + w / 2, y: top - over[col] - 14 } : { x: x - 36, y: top + h / 2 + 5, end: true };
        layout.marks.push({ text: m.symbol, role: m.role, ...place });
        layout.height = Math.max(layout.height, Math.ceil(top + h + (last ? 36 : 10)));
      }
      if (between && stacked && at) layout.marks.push({ text: `↓ ${between}`, x: middle, y: top - over[col] - 38 });
      else if (between && col)
        for (const [line, text] of [between, "→"].entries())
          layout.marks.push({ text, x: x - gap / 2, y: top + h / 2 - 8 + 20 * line });
      x += widths[col] + gap;
    }
    layout.width = Math.max(layout.width, Math.ceil(x - gap + 24));
  }
  return layout;
}

/** Matrices side by side, with a text between them; one below the other where there is no room. @param {Matrix[]} list @param {string} between @param {AxisUnits} u @param {number} room */
export function beside(list, between, u, room) {
  const [column, tight] = [list.map((m) => [m]), room < 640];
  const row = laidOut([list], u, tight, between);
  return row.width <= room ? row : laidOut(column, u, tight, between);
}
