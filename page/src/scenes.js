// The figures of each step: which matrices, what a cell lights up, and how it is written out.

import { signed } from "./colour.js";
import { h } from "./dom.js";
import { beside, product } from "./layout.js";
import { turn } from "./matrix.js";
import { fmt, listOf } from "./numbers.js";
import { matrix, most, weightMatrix } from "./story.js";
import { num, softmaxOf, sumOfProducts, sym } from "./written.js";

/** @typedef {import("./story.js").Story} Story */
/** @typedef {import("./matrix.js").Matrix} Matrix */
/** @typedef {import("./section.js").Scene} Scene */
/** @typedef {import("./dom.js").Child} Child */
/** @typedef {(i: number, j: number) => number} Cell */
/** @typedef {"query" | "key" | "feature"} Own      which part of the story's state an axis is */
/** @typedef {{b: Matrix, r: Matrix, own: [Own, Own], bias?: Cell, extra?: (i: number, j: number) => Child}} Part */

const low = (/** @type {Matrix} */ m) => m.symbol[0].toLowerCase() + (m.symbol[1] === "′" ? "′" : "");

/**
 * a · b = r, for one b or for several beside each other. In columns convention all are transposed, and a stands above.
 * @param {Story} s
 * @param {Matrix} a
 * @param {Part[]} parts
 * @returns {Scene}
 */
function productScene(s, a, parts) {
  const tight = s.room < 640;
  const layout = s.columns
    ? product(turn(parts[0].b), [{ top: turn(a), result: turn(parts[0].r) }], s.units, tight)
    : product(a, parts.map(({ b, r }) => ({ top: b, result: r })), s.units, tight);
  const at = s.columns ? 1 : 0;
  let last = 0;
  const partOf = (/** @type {number} */ block) => parts[Math.max(0, Math.ceil(block / 2) - 1)];
  const blockOf = (/** @type {Part} */ part) => 2 + 2 * parts.indexOf(part);
  const turned = (/** @type {any[]} */ list) => (s.columns ? list.reverse() : list); // kᵀ·q where tokens are columns
  const now = (/** @type {Own} */ own, /** @type {number} */ size) => Math.min(s.state[own], size - 1);
  const cursor = () => {
    const { r, own } = parts[last];
    return { block: 2 + 2 * last, row: now(own[0], r.rows), col: now(own[1], r.cols) };
  };
  return {
    layout,
    cursor,
    locate({ block, row, col }) {
      if (block === at) return { ...cursor(), row };
      const part = partOf(block);
      last = parts.indexOf(part);
      if (block === blockOf(part)) return { block, row, col };
      return { ...cursor(), col: part.b.flip ? row : col };
    },
    marks({ block, row, col }) {
      const { b } = partOf(block);
      return [{ block: at, row, kind: a.role }, { block: s.columns ? 0 : block - 1, ...(b.flip ? { row: col } : { col }), kind: b.role }, { block, row, col, kind: "result" }];
    },
    written({ block, row, col }) {
      const { b, r, bias, extra } = partOf(block);
      /** @type {[number, number][]} */
      const terms = [];
      for (let x = 0; x < a.cols; x++) if (!a.hidden?.(row, x)) terms.push(/** @type {[number, number]} */ (turned([a.at(row, x), b.at(x, col)])));
      return [
        sumOfProducts({
          name: sym(low(r), s.at(row, col), r.role),
          symbols: [...turned([sym(low(a), row, a.role), "·", sym(low(b), col, b.role)]), bias ? [" + ", sym("b", col, "plain")] : null],
          terms,
          roles: /** @type {[string, string]} */ (turned([a.role, b.role])),
          plus: bias?.(row, col),
          total: r.at(row, col),
          more: (count, sum) => s.t("more", { count, sum }),
        }),
        extra?.(row, col),
      ];
    },
    pin({ block, row, col }) {
      const { own } = partOf(block);
      s.commit({ [own[0]]: row, [own[1]]: col });
    },
    next: (block, by) => (block > 1 && parts[block / 2 - 1 + by] ? block + 2 * by : null),
  };
}

/** @param {Story} s @param {string} symbol @param {Cell} at @param {Partial<Matrix>} [more] */
const square = (s, symbol, at, more) => matrix(symbol, "weights", [s.head.n, "n"], [s.head.m, "m"], at, { rowName: s.queryName, colName: s.keyName, ...more });
/** @param {Story} s */
const Q = (s) => matrix("Q", "query", [s.head.n, "n"], [s.head.dk, "d_k"], s.head.q, { rowName: s.queryName });
/** @param {Story} s */
const K = (s) => matrix("K", "key", [s.head.m, "m"], [s.head.dk, "d_k"], s.head.k, { rowName: s.keyName });
/** @param {Story} s */
const V = (s) => matrix("V", "value", [s.head.m, "m"], [s.head.dv, "d_v"], s.head.v, { rowName: s.keyName });
/** @param {Story} s */
const O = (s) => matrix("O", "value", [s.head.n, "n"], [s.head.dv, "d_v"], s.head.output, { rowName: s.queryName });

/** One matrix by itself. @param {Story} s @param {Matrix} m @param {Own} own @param {string} [note] @returns {Scene} */
const alone = (s, m, own, note) => ({
  layout: beside([s.laid(m)], [], s.units, s.room),
  cursor: () => ({ block: 0, row: s.state[own], col: Math.min(s.state.feature, m.cols - 1) }),
  locate: (place) => place,
  marks: ({ row, col }) => [{ block: 0, row, kind: m.role }, { block: 0, row, col, kind: "result" }],
  written: ({ row, col }) => [sym(low(m), s.at(row, col), m.role), " = ", h("b", fmt(m.at(row, col), 5))],
  pin: ({ row, col }) => s.commit({ [own]: row, feature: col }),
  notes: note ? [note] : [],
});

/** Q, K and V: projected from X where the page has it, or as they were given. @param {Story} s @returns {Scene[]} */
export function inputScenes(s) {
  const given = [Q(s), K(s), V(s)];
  /** @type {Own[]} */
  const owns = ["query", "key", "key"];
  const X = (/** @type {string} */ name) => {
    const { data, shape } = /** @type {import("./container.js").NumberArray} */ (s.named(name));
    const [, rows, cols] = shape;
    const start = Math.min(s.state.batch, shape[0] - 1) * rows;
    const at = (/** @type {number} */ i, /** @type {number} */ c) => data[(start + i) * cols + c];
    return name === "x" ? matrix("X", "plain", [rows, "n"], [cols, "d_model"], at, { rowName: s.queryName }) : matrix("C", "plain", [rows, "m"], [cols, "d_model"], at, { rowName: s.keyName });
  };
  const plain = given.map((m, place) => alone(s, m, owns[place]));
  if (!s.named("x")) return plain;
  if (!s.named("w_q")) return [alone(s, X("x"), "query", s.t("no projections")), ...plain];
  const parts = given.map((r, place) => {
    const letter = "qkv"[place];
    const { data, shape } = /** @type {import("./container.js").NumberArray} */ (s.named(`w_${letter}`));
    const bias = s.named(`b_${letter}`);
    const from = (place ? s.head.shared : s.head.number) * r.cols;
    const b = matrix(`W^${r.symbol}`, r.role, [shape[0], "d_model"], [r.cols, r.colDim], (c, j) => data[c * shape[1] + from + j]);
    return /** @type {Part} */ ({ b, r, own: [owns[place], "feature"], bias: bias ? (_, j) => bias.data[from + j] : undefined });
  });
  const [x, context] = [X("x"), s.named("context") ? X("context") : null];
  if (!context && !s.columns) {
    const whole = productScene(s, x, parts);
    if (whole.layout.width <= s.room) return [whole];
  }
  return parts.map((part, place) => productScene(s, (place && context) || x, [part]));
}

/** S = Q·Kᵀ, and the same by norms and angle. @param {Story} s @returns {Scene[]} */
export function scoreScenes(s) {
  const { head } = s;
  const norm = (/** @type {Cell} */ at, /** @type {number} */ i) => Math.hypot(...listOf(head.dk, (c) => at(i, c)));
  const extra = (/** @type {number} */ i, /** @type {number} */ j) => {
    const [q, k] = [norm(head.q, i), norm(head.k, j)];
    return h("span.aside.line", " = ‖q‖·‖k‖·cos θ = ", num(q, "query"), "·", num(k, "key"), "·", num(q && k ? head.scores(i, j) / q / k : 0));
  };
  return [productScene(s, Q(s), [{ b: turn({ ...K(s), symbol: "Kᵀ" }), r: square(s, "S", head.scores), own: ["query", "key"], extra }])];
}

/**
 * One matrix before and after something is done to each of its cells, or to each row as a whole.
 * @param {Story} s
 * @param {Matrix} before
 * @param {Matrix} after
 * @param {string} done
 * @param {(i: number, j: number) => Child} written
 * @param {boolean} [whole]
 * @returns {Scene[]}
 */
function change(s, before, after, done, written, whole = false) {
  return [
    {
      layout: beside([s.laid(before), s.laid(after)], [done], s.units, s.room),
      cursor: () => ({ block: 1, row: s.state.query, col: s.state.key }),
      locate: (place) => ({ ...place, block: 1 }),
      marks: ({ row, col }) => [...(whole ? [{ block: 0, row, kind: "faint" }, { block: 1, row, kind: "faint" }] : []), { block: 0, row, col, kind: "weights" }, { block: 1, row, col, kind: "result" }],
      written: ({ row, col }) => written(row, col),
      pin: ({ row, col }) => s.commit({ query: row, key: col }),
      notes: whole ? [] : [s.t("same scale")],
    },
  ];
}

/** The numbers on the way from S to what is masked. @param {Story} s @returns {{name: string, symbol: string, at: Cell}[]} */
function bends(s) {
  const all = /** @type {const} */ ([["scores", "S"], ["scaled", "S′"], ["capped", "C"], ["biased", "B"]]);
  return all.filter(([name]) => name === "scaled" || s.step(name)).map(([name, symbol]) => ({ name, symbol, at: s.head[name] }));
}

/** S → S′ → C → B, one of them. @param {Story} s @param {string} name @returns {Scene[]} */
export function bentScenes(s, name) {
  const { head } = s;
  const { scale, softcap } = head.rules;
  const steps = bends(s);
  const place = steps.findIndex((step) => step.name === name);
  const [from, to] = [steps[place - 1], steps[place]];
  const shade = signed("weights", Math.max(most(head.n, head.m, from.at), name === "scaled" ? 0 : most(head.n, head.m, to.at)));
  const root = Math.abs(scale * Math.sqrt(head.dk) - 1) < 1e-12;
  const cap = fmt(softcap ?? 0);
  const [before, after] = [square(s, from.symbol, from.at, { shade }), square(s, to.symbol, to.at, { shade })];
  const how = /** @type {Record<string, (x: number, y: number) => Child>} */ ({
    scaled: (x) => [num(x), root ? ` / √${head.dk}` : [" · ", num(scale)]],
    capped: (x) => [`${cap}·tanh(`, num(x), `/${cap})`],
    biased: (x, y) => [num(x), " + ", num(y - x)],
  });
  const done = name === "scaled" ? (root ? `÷ √${head.dk}` : `× ${fmt(scale)}`) : name === "capped" ? "tanh" : "+";
  const written = (/** @type {number} */ i, /** @type {number} */ j) => {
    const [x, y] = [from.at(i, j), to.at(i, j)];
    return [sym(low(after), s.at(i, j), "weights"), " = ", how[name](x, y), " = ", h("b", fmt(y, 5))];
  };
  return change(s, before, after, done, written);
}

/** What may be seen. @param {Story} s @returns {Scene[]} */
export function maskedScenes(s) {
  const { head } = s;
  const { symbol, at } = bends(s).slice(-1)[0];
  const shade = signed("weights", most(head.n, head.m, at));
  const before = square(s, symbol, at, { shade });
  const written = (/** @type {number} */ i, /** @type {number} */ j) => [
    sym("m", s.at(i, j), "weights"),
    " = ",
    head.visible(i, j) ? [sym(low(before), s.at(i, j), "weights"), " = ", h("b", fmt(at(i, j), 5))] : [h("b", "−∞"), ` (${s.t("masked cell")})`],
  ];
  return change(s, before, { ...before, symbol: "M", hidden: s.hidden }, "", written);
}

/** The run's own number, beside a supposed one. @param {Story} s @param {"weights" | "output"} name @param {number} i @param {number} j */
function inTheRun(s, name, i, j) {
  const own = s.own();
  return own && h("span.aside.line", s.t("in the run", { x: fmt(own[name](i, j), 5) }));
}

/** What goes into the softmax. @param {Story} s */
export const insideSoftmax = (s) => (s.hidden ? "M" : bends(s).slice(-1)[0].symbol) + (s.state.what.temperature === 1 ? "" : "/T");

/** What is masked. @param {Story} s */
export const beforeMask = (s) => bends(s).slice(-1)[0].symbol;

/** A = softmax(M), row by row. @param {Story} s @returns {Scene[]} */
export function weightScenes(s) {
  const { head } = s;
  const before = square(s, insideSoftmax(s), head.masked, { hidden: s.hidden });
  return change(s, before, weightMatrix(s), "softmax", (i, j) => [softmaxOf(s, i, j), inTheRun(s, "weights", i, j)], true);
}

/** O = A·V. @param {Story} s @returns {Scene[]} */
export const outputScenes = (s) => [productScene(s, weightMatrix(s), [{ b: V(s), r: O(s), own: ["query", "feature"], extra: (i, c) => inTheRun(s, "output", i, c) }])];

/** H: all heads' outputs beside each other. @param {Story} s */
function joined(s) {
  const { dv } = s.head;
  const at = (/** @type {number} */ i, /** @type {number} */ c) => s.headAt(Math.floor(c / dv)).output(i, c % dv);
  return matrix("H", "value", [s.head.n, "n"], [s.layer.heads * dv, "h·d_v"], at, { rowName: s.queryName, split: dv });
}

/** @param {Story} s @returns {Scene[]} */
export function concatScenes(s) {
  const { dv, number } = s.head;
  const own = O(s);
  return [
    {
      layout: beside([s.laid(own), s.laid(joined(s))], ["concat"], s.units, s.room),
      cursor: () => ({ block: 1, row: s.state.query, col: number * dv + Math.min(s.state.feature, dv - 1) }),
      locate: ({ block, row, col }) => ({ block: 1, row, col: block ? col : number * dv + col }),
      marks: ({ row, col }) => [...(Math.floor(col / dv) === number ? [{ block: 0, row, col: col % dv, kind: "value" }] : []), { block: 1, row, col, kind: "result" }],
      written: ({ row, col }) => {
        const [from, c] = [Math.floor(col / dv), col % dv];
        return [sym("h", s.at(row, col), "value"), " = ", sym("o", s.at(row, c), "value"), ` (${s.t("head")} ${from}) = `, h("b", fmt(s.headAt(from).output(row, c), 5))];
      },
      pin: ({ row, col }) => s.commit({ query: row, feature: col % dv, head: Math.floor(col / dv) }),
    },
  ];
}

/** U = H·W^O; without W^O it is H, or what the run said where W^O is not in the file. @param {Story} s @returns {Scene[]} */
export function mixedScenes(s) {
  const H = joined(s);
  const w = s.named("w_o");
  const bias = s.named("b_o");
  const run = s.named("output");
  if (!w && run) {
    const [, n, wide] = run.shape;
    const U = matrix("U", "plain", [n, "n"], [wide, "d_model"], (i, c) => run.data[(s.state.batch * n + i) * wide + c], { rowName: s.queryName });
    return [alone(s, U, "query", s.t("no projections"))];
  }
  if (!w) return [alone(s, { ...H, symbol: "U", role: "plain", split: undefined }, "query")];
  const wide = w.shape[1];
  const made = s.mixed();
  const r = matrix("U", "plain", [H.rows, "n"], [wide, "d_model"], (i, c) => made[i * wide + c], { rowName: s.queryName });
  const b = matrix("W^O", "plain", [H.cols, "h·d_v"], [wide, "d_model"], (c, j) => w.data[c * wide + j]);
  return [productScene(s, H, [{ b, r, own: ["query", "feature"], bias: bias ? (_, c) => bias.data[c] : undefined }])];
}
