// The figures of each step: which matrices, what a cell lights up, and how it is written out.

import { signed } from "./colour.js";
import { h } from "./dom.js";
import { beside, product } from "./layout.js";
import { turn } from "./matrix.js";
import { fmt } from "./numbers.js";
import { matrix, most, weightMatrix } from "./story.js";
import { num, softmaxOf, sumOfProducts, sym } from "./written.js";

/** @typedef {import("./story.js").Story} Story */
/** @typedef {import("./matrix.js").Matrix} Matrix */
/** @typedef {import("./section.js").Scene} Scene */

/**
 * a · b = r as a figure; `a` and `r` share rows, `b` and `r` share columns. In columns convention all are transposed.
 * @param {Story} s
 * @param {Matrix} a
 * @param {Matrix} b
 * @param {Matrix} r
 */
function productOf(s, a, b, r) {
  const layout = s.columns ? product(turn(b), [{ top: turn(a), result: turn(r) }], s.units) : product(a, [{ top: b, result: r }], s.units);
  return { layout, a: s.columns ? 1 : 0, b: s.columns ? 0 : 1, r: 2 };
}

const more = (/** @type {Story} */ s) => (/** @type {number} */ count, /** @type {string} */ sum) => s.t("more", { count, sum });
const range = (/** @type {number} */ size) => Array.from({ length: size }, (_, i) => i);

/** @param {Story} s */
export const Q = (s) => matrix("Q", "query", [s.head.n, "n"], [s.head.dk, "d_k"], s.head.q, { rowName: s.queryName });
/** @param {Story} s */
export const K = (s) => matrix("K", "key", [s.head.m, "m"], [s.head.dk, "d_k"], s.head.k, { rowName: s.keyName });
/** @param {Story} s */
export const V = (s) => matrix("V", "value", [s.head.m, "m"], [s.head.dv, "d_v"], s.head.v, { rowName: s.keyName });
/** @param {Story} s */
const O = (s) => matrix("O", "value", [s.head.n, "n"], [s.head.dv, "d_v"], s.head.output, { rowName: s.queryName });

/** Where attention begins with Q, K, V as given. @param {Story} s @returns {Scene[]} */
export function givenScenes(s) {
  return [Q(s), K(s), V(s)].map((m) => {
    const own = m.symbol === "Q" ? "query" : "key";
    const letter = m.symbol.toLowerCase();
    return {
      layout: beside([s.laid(m)], [], s.units, s.room),
      target: 0,
      name: m.symbol,
      cursor: () => ({ row: s.state[own], col: Math.min(s.state.feature, m.cols - 1) }),
      locate: (place) => place,
      marks: (row, col) => [{ block: 0, row }, { block: 0, row, col, kind: "result" }],
      written: (row, col) => [sym(letter, `${row},${col}`, m.role), " = ", h("b", {}, fmt(m.at(row, col), 5))],
      pin: (row, col) => s.commit({ [own]: row, feature: col }),
    };
  });
}

/** X·W = Q, K, V. @param {Story} s @returns {Scene[]} */
export function projectionScenes(s) {
  const parts = [
    { m: Q(s), source: "x", letter: "Q", head: s.head.number, own: /** @type {const} */ ("query") },
    { m: K(s), source: s.named("context") ? "context" : "x", letter: "K", head: s.head.shared, own: /** @type {const} */ ("key") },
    { m: V(s), source: s.named("context") ? "context" : "x", letter: "V", head: s.head.shared, own: /** @type {const} */ ("key") },
  ];
  const X = (/** @type {string} */ name) => {
    const { data, shape } = /** @type {import("./container.js").NumberArray} */ (s.named(name));
    const [, rows, cols] = shape;
    const own = name === "x";
    const start = Math.min(s.state.batch, shape[0] - 1) * rows;
    return matrix(own ? "X" : "C", "plain", [rows, own ? "n" : "m"], [cols, "d_model"], (i, c) => data[(start + i) * cols + c], { rowName: own ? s.queryName : s.keyName });
  };
  if (!s.named("w_q")) return [plainScene(s, X("x")), ...givenScenes(s)];
  return parts.map(({ m, source, letter, head, own }) => {
    const { data, shape } = /** @type {import("./container.js").NumberArray} */ (s.named(`w_${letter.toLowerCase()}`));
    const bias = s.named(`b_${letter.toLowerCase()}`);
    const x = X(source);
    const W = matrix(`W^${letter}`, m.role, [shape[0], "d_model"], [m.cols, m.colDim], (c, j) => data[c * shape[1] + head * m.cols + j]);
    const { layout, a, b, r } = productOf(s, x, W, { ...m, rowName: x.rowName });
    return {
      layout,
      target: r,
      name: m.symbol,
      cursor: () => ({ row: s.state[own], col: Math.min(s.state.feature, m.cols - 1) }),
      locate: (place) => ({ row: place.block === b ? s.state[own] : place.row, col: place.block === a ? Math.min(s.state.feature, m.cols - 1) : place.col }),
      marks: (row, col) => [{ block: a, row, kind: "plain" }, { block: b, col, kind: m.role }, { block: r, row, col, kind: "result" }],
      written: (row, col) =>
        sumOfProducts({
          name: sym(letter.toLowerCase(), `${row},${col}`, m.role),
          symbols: [sym(x.symbol.toLowerCase(), row, "plain"), "·", sym("w", col, m.role), bias ? [" + ", sym("b", col, "plain")] : null],
          terms: range(x.cols).map((c) => [x.at(row, c), W.at(c, col)]),
          roles: ["plain", m.role],
          plus: bias ? bias.data[head * m.cols + col] : undefined,
          total: m.at(row, col),
          more: more(s),
        }),
      pin: (row, col) => s.commit({ [own]: row, feature: col }),
    };
  });
}

/** @param {Story} s @param {Matrix} m @returns {Scene} */
function plainScene(s, m) {
  return {
    layout: beside([s.laid(m)], [], s.units, s.room),
    target: 0,
    name: m.symbol,
    cursor: () => ({ row: s.state.query, col: 0 }),
    locate: (place) => place,
    marks: (row, col) => [{ block: 0, row }, { block: 0, row, col, kind: "result" }],
    written: (row, col) => [sym(m.symbol.toLowerCase(), `${row},${col}`, m.role), " = ", h("b", {}, fmt(m.at(row, col), 5)), h("br"), h("span", { class: "aside" }, s.t("no projections"))],
    pin: (row) => s.commit({ query: row }),
  };
}

/** S = Q·Kᵀ. @param {Story} s @returns {Scene[]} */
export function scoreScenes(s) {
  const { head } = s;
  const { layout, a, b, r } = productOf(s, Q(s), turn({ ...K(s), symbol: "Kᵀ" }), scoreMatrix(s, "S", head.scores));
  const norm = (/** @type {(i: number, c: number) => number} */ at, /** @type {number} */ i) => Math.hypot(...range(head.dk).map((c) => at(i, c)));
  return [
    {
      layout,
      target: r,
      name: "S",
      cursor: () => ({ row: s.state.query, col: s.state.key }),
      locate: (place) => ({ row: place.block === b ? s.state.query : place.row, col: place.block === b ? place.row : place.block === a ? s.state.key : place.col }),
      marks: (row, col) => [{ block: a, row, kind: "query" }, { block: b, row: col, kind: "key" }, { block: r, row, col, kind: "result" }],
      written: (i, j) => {
        const [q, k] = [norm(head.q, i), norm(head.k, j)];
        const cosine = q && k ? head.scores(i, j) / q / k : 0;
        return [
          sumOfProducts({ name: sym("s", `${i},${j}`, "weights"), symbols: [sym("q", i, "query"), "·", sym("k", j, "key")], terms: range(head.dk).map((c) => [head.q(i, c), head.k(j, c)]), roles: ["query", "key"], total: head.scores(i, j), more: more(s) }),
          h("br"),
          h("span", { class: "aside" }, "= ", s.t("cosine"), " = ", num(q, "query"), "·", num(k, "key"), "·", num(cosine)),
        ];
      },
      pin: (row, col) => s.commit({ query: row, key: col }),
    },
  ];
}

/** @param {Story} s @param {string} symbol @param {(i: number, j: number) => number} at @param {Partial<Matrix>} [more] */
const scoreMatrix = (s, symbol, at, more = {}) => matrix(symbol, "weights", [s.head.n, "n"], [s.head.m, "m"], at, { rowName: s.queryName, colName: s.keyName, ...more });

/**
 * One matrix before and after something is done to each of its cells.
 * @param {Story} s
 * @param {Matrix} before
 * @param {Matrix} after
 * @param {string} done
 * @param {(i: number, j: number) => import("./dom.js").Child} written
 * @param {{whole?: boolean, notes?: string[]}} [more]      whole: the after-cell comes of the whole row
 * @returns {Scene[]}
 */
function change(s, before, after, done, written, { whole = false, notes } = {}) {
  return [
    {
      layout: beside([s.laid(before), s.laid(after)], [done], s.units, s.room),
      target: 1,
      name: after.symbol,
      cursor: () => ({ row: s.state.query, col: s.state.key }),
      locate: (place) => ({ row: place.row, col: place.col }),
      marks: (row, col) => [
        { block: 0, row, col: whole ? undefined : col, kind: "weights" },
        ...(whole ? [{ block: 0, row, col, kind: "weights" }, { block: 1, row, kind: "faint" }] : []),
        { block: 1, row, col, kind: "result" },
      ],
      written,
      pin: (row, col) => s.commit({ query: row, key: col }),
      notes,
    },
  ];
}

/** The steps between S and A that this run has, each with the symbol and the numbers it starts from. @param {Story} s */
export function scoreSteps(s) {
  const { head } = s;
  const found = [{ name: "scores", symbol: "S", at: head.scores }];
  for (const [name, symbol] of /** @type {const} */ ([["scaled", "S'"], ["capped", "C"], ["biased", "B"]])) if (name === "scaled" || s.step(name)) found.push({ name, symbol, at: head[name] });
  return found;
}

/** S → S' → C → B, one of them. @param {Story} s @param {string} name @returns {Scene[]} */
export function bentScenes(s, name) {
  const { head, t } = s;
  const steps = scoreSteps(s);
  const place = steps.findIndex((step) => step.name === name);
  const [from, to] = [steps[place - 1], steps[place]];
  const shade = signed("weights", Math.max(most(head.n, head.m, from.at), name === "scaled" ? 0 : most(head.n, head.m, to.at)));
  const root = Math.abs(head.rules.scale * Math.sqrt(head.dk) - 1) < 1e-12;
  const letter = from.symbol.replace("'", "′").toLowerCase();
  const cap = fmt(head.rules.softcap ?? 0);
  const done = name === "scaled" ? (root ? `÷ √${head.dk}` : `× ${fmt(head.rules.scale)}`) : name === "capped" ? `≤ ${cap}` : "+";
  const written = (/** @type {number} */ i, /** @type {number} */ j) => {
    const [x, y] = [from.at(i, j), to.at(i, j)];
    const how = name === "scaled" ? [num(x), root ? ` / √${head.dk}` : [" · ", num(head.rules.scale)]] : name === "capped" ? [`${cap}·tanh(`, num(x), `/${cap})`] : [num(x), " + ", num(y - x)];
    return [sym(to.symbol.replace("'", "′").toLowerCase(), `${i},${j}`, "weights"), " = ", sym(letter, `${i},${j}`, "weights"), root && name === "scaled" ? [" / √", h("var", { class: "dim", "data-dim": "d_k" }, "d", h("sub", {}, "k"))] : null, " = ", how, " = ", h("b", {}, fmt(y, 5))];
  };
  return change(s, scoreMatrix(s, from.symbol, from.at, { shade }), scoreMatrix(s, to.symbol, to.at, { shade }), done, written, { notes: [t("same scale")] });
}

/** What may be seen. @param {Story} s @returns {Scene[]} */
export function maskedScenes(s) {
  const { head } = s;
  const last = /** @type {{symbol: string, at: (i: number, j: number) => number}} */ (scoreSteps(s).at(-1));
  const shade = signed("weights", most(head.n, head.m, last.at));
  const hidden = (/** @type {number} */ i, /** @type {number} */ j) => !head.visible(i, j);
  const written = (/** @type {number} */ i, /** @type {number} */ j) => [
    sym("m", `${i},${j}`, "weights"),
    " = ",
    hidden(i, j) ? [h("b", {}, "−∞"), ` (${s.t("masked cell")})`] : [sym(last.symbol.replace("'", "′").toLowerCase(), `${i},${j}`, "weights"), " = ", h("b", {}, fmt(last.at(i, j), 5))],
  ];
  return change(s, scoreMatrix(s, last.symbol, last.at, { shade }), scoreMatrix(s, "M", last.at, { shade, hidden }), "", written, { notes: [s.t("same scale")] });
}

/** A = softmax(M), row by row. @param {Story} s @returns {Scene[]} */
export function weightScenes(s) {
  const { head } = s;
  const shade = signed("weights", most(head.n, head.m, head.masked));
  const hidden = (/** @type {number} */ i, /** @type {number} */ j) => !head.visible(i, j);
  return change(s, scoreMatrix(s, "M", head.masked, { shade, hidden }), weightMatrix(s), "softmax", (i, j) => softmaxOf(head, i, j, s.t), { whole: true });
}

/** O = A·V. @param {Story} s @returns {Scene[]} */
export function outputScenes(s) {
  const { head } = s;
  const { layout, a, b, r } = productOf(s, weightMatrix(s), V(s), O(s));
  const feature = () => Math.min(s.state.feature, head.dv - 1);
  return [
    {
      layout,
      target: r,
      name: "O",
      cursor: () => ({ row: s.state.query, col: feature() }),
      locate: (place) => ({ row: place.block === b ? s.state.query : place.row, col: place.block === a ? feature() : place.col }),
      marks: (row, col) => [{ block: a, row, kind: "weights" }, { block: b, col, kind: "value" }, { block: r, row, col, kind: "result" }],
      written: (i, c) =>
        sumOfProducts({ name: sym("o", `${i},${c}`, "value"), symbols: [sym("a", i, "weights"), "·", sym("v", c, "value")], terms: range(head.m).filter((j) => head.visible(i, j)).map((j) => [head.weights(i, j), head.v(j, c)]), roles: ["weights", "value"], total: head.output(i, c), more: more(s) }),
      pin: (row, col) => s.commit({ query: row, feature: col }),
    },
  ];
}

/** H: all heads' outputs beside each other. @param {Story} s */
function joined(s) {
  const { dv } = s.head;
  const at = (/** @type {number} */ i, /** @type {number} */ c) => s.headAt(Math.floor(c / dv)).output(i, c % dv);
  return matrix("H", "value", [s.head.n, "n"], [s.layer.heads * dv, "h·d_v"], at, { rowName: s.queryName, split: dv });
}

/** @param {Story} s @returns {Scene[]} */
export function concatScenes(s) {
  const { dv } = s.head;
  const start = s.head.number * dv;
  return [
    {
      layout: beside([s.laid(O(s)), s.laid(joined(s))], ["concat"], s.units, s.room),
      target: 1,
      name: "H",
      cursor: () => ({ row: s.state.query, col: start + Math.min(s.state.feature, dv - 1) }),
      locate: (place) => ({ row: place.row, col: place.block === 0 ? start + place.col : place.col }),
      marks: (row, col) => [...(Math.floor(col / dv) === s.head.number ? [{ block: 0, row, col: col % dv, kind: "value" }] : []), { block: 1, row, col, kind: "result" }],
      written: (i, c) => [sym("h", `${i},${c}`, "value"), " = ", sym("o", `${i},${c % dv}`, "value"), ` (${s.t("head")} ${Math.floor(c / dv)}) = `, h("b", {}, fmt(s.headAt(Math.floor(c / dv)).output(i, c % dv), 5))],
      pin: (row, col) => s.commit({ query: row, feature: col % dv, head: Math.floor(col / dv) }),
    },
  ];
}

/** U = H·W^O. @param {Story} s @returns {Scene[]} */
export function mixedScenes(s) {
  const H = joined(s);
  const w = s.named("w_o");
  if (!w) return [{ ...concatScenes(s)[0], layout: beside([s.laid({ ...H, symbol: "U", split: undefined })], [], s.units, s.room), target: 0, name: "U", marks: (row, col) => [{ block: 0, row, col, kind: "result" }], locate: (place) => place }];
  const { layout, a, b, r } = productOf(s, H, matrix("W^O", "plain", [H.cols, "h·d_v"], [w.shape[1], "d_model"], (c, j) => w.data[c * w.shape[1] + j]), finalMatrix(s, H, w));
  const U = layout.blocks[r].m;
  const at = U.flip ? (/** @type {number} */ i, /** @type {number} */ j) => U.at(j, i) : U.at;
  const bias = s.named("b_o");
  const feature = () => Math.min(s.state.feature, w.shape[1] - 1);
  return [
    {
      layout,
      target: r,
      name: "U",
      cursor: () => ({ row: s.state.query, col: feature() }),
      locate: (place) => ({ row: place.block === b ? s.state.query : place.row, col: place.block === a ? feature() : place.col }),
      marks: (row, col) => [{ block: a, row, kind: "value" }, { block: b, col, kind: "plain" }, { block: r, row, col, kind: "result" }],
      written: (i, c) =>
        sumOfProducts({ name: sym("u", `${i},${c}`, "plain"), symbols: [sym("h", i, "value"), "·", sym("w", c, "plain"), bias ? [" + ", sym("b", c, "plain")] : null], terms: range(H.cols).map((x) => [H.at(i, x), w.data[x * w.shape[1] + c]]), roles: ["value", "plain"], plus: bias?.data[c], total: at(i, c), more: more(s) }),
      pin: (row, col) => s.commit({ query: row, feature: col }),
    },
  ];
}

/** @param {Story} s @param {Matrix} H @param {import("./container.js").NumberArray} w */
function finalMatrix(s, H, w) {
  const wide = w.shape[1];
  const bias = s.named("b_o");
  const made = new Float64Array(H.rows * wide);
  for (let i = 0; i < H.rows; i++) {
    for (let x = 0; x < H.cols; x++) {
      const value = H.at(i, x);
      for (let c = 0; c < wide; c++) made[i * wide + c] += value * w.data[x * wide + c];
    }
    if (bias) for (let c = 0; c < wide; c++) made[i * wide + c] += bias.data[c];
  }
  return matrix("U", "plain", [H.rows, "n"], [wide, "d_model"], (i, c) => made[i * wide + c], { rowName: s.queryName });
}
