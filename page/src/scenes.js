// The three kinds of figure: a product, a single matrix, and a matrix before and after a change of its cells. Each says
// which cells belong to the chosen one, and writes its computation out.

import { h } from "./dom.js";
import { beside, product } from "./layout.js";
import { transposed } from "./matrix.js";
import { fmt } from "./numbers.js";
import { sumOfProducts, sym } from "./written.js";

/** A matrix's symbol as one of its elements has it: m for M, s′ for S′. */
export const letterOf = (/** @type {Matrix} */ m) => m.symbol[0].toLowerCase() + (m.symbol[1] === "′" ? "′" : "");

/**
 * a · b = r, for one b or for several side by side. Where tokens are columns, all are transposed, and a stands above.
 * @param {Story} s @param {Matrix} a @param {Part[]} parts @returns {Scene}
 */
export function productScene(s, a, parts) {
  const tight = s.room < 640;
  const layout = s.columns
    ? product(transposed(parts[0].b), [{ top: transposed(a), result: transposed(parts[0].r) }], s.units, tight)
    : product(
        a,
        parts.map(({ b, r }) => ({ top: b, result: r })),
        s.units,
        tight,
      );
  const left = s.columns ? 1 : 0;
  let last = 0;
  const partOf = (/** @type {number} */ block) => parts[Math.max(0, Math.ceil(block / 2) - 1)];
  const blockOf = (/** @type {Part} */ part) => 2 + 2 * parts.indexOf(part);
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
      if (block === blockOf(part)) return { block, row, col };
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
      /** @type {[number, number][]} */
      const terms = [];
      for (let x = 0; x < a.cols; x++)
        if (!a.hidden?.(row, x))
          terms.push(/** @type {[number, number]} */ (inOrder([a.value(row, x), b.value(x, col)])));
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
  layout: beside([s.laid(m)], [], s.units, s.room),
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
      layout: beside([s.laid(before), s.laid(after)], [done], s.units, s.room),
      cursor: () => ({ block: 1, row: s.state.query, col: s.state.key }),
      locate: (place) => ({ ...place, block: 1 }),
      marks: ({ row, col }) => [
        ...(whole
          ? [
              { block: 0, row, kind: "faint" },
              { block: 1, row, kind: "faint" },
            ]
          : []),
        { block: 0, row, col, kind: "weights" },
        { block: 1, row, col, kind: "result" },
      ],
      written: ({ row, col }) => written(row, col),
      pin: ({ row, col }) => s.commit({ query: row, key: col }),
      notes: whole ? [] : [s.t("same scale")],
    },
  ];
}
