// The figures of each step: which matrices they show.

import { signed, weighed } from "./colour.js";
import { h } from "./dom.js";
import { beforeAfterScene, beside, letterOf, productScene, singleScene } from "./scenes.js";
import { transposed } from "./matrix.js";
import { fmt, listOf } from "./numbers.js";
import { matrix, most } from "./story.js";
import { changed, isRoot, num, softmaxOf, sym } from "./written.js";

/**
 * A matrix of the steps: its axes name its rows and columns, n queries and m keys.
 * @param {Story} s @param {string} symbol @param {string} role @param {[number, string]} rows @param {[number, string]} cols
 * @param {Cell} value @param {Partial<Matrix>} [more]
 */
function made(s, symbol, role, rows, cols, value, more) {
  const names = /** @type {Record<string, (i: number) => string>} */ ({ n: s.queryName, m: s.keyName });
  return matrix(symbol, role, rows, cols, value, { rowName: names[rows[1]], colName: names[cols[1]], ...more });
}
/** @param {Story} s @param {string} symbol @param {Cell} value @param {Partial<Matrix>} [more] */
const square = (s, symbol, value, more) => made(s, symbol, "weights", [s.head.n, "n"], [s.head.m, "m"], value, more);
/** @typedef {(s: Story) => Matrix} Of */
const Q = /** @type {Of} */ ((s) => made(s, "Q", "query", [s.head.n, "n"], [s.head.dk, "d_k"], s.head.q));
const K = /** @type {Of} */ ((s) => made(s, "K", "key", [s.head.m, "m"], [s.head.dk, "d_k"], s.head.k));
const V = /** @type {Of} */ ((s) => made(s, "V", "value", [s.head.m, "m"], [s.head.dv, "d_v"], s.head.v));
const O = /** @type {Of} */ ((s) => made(s, "O", "value", [s.head.n, "n"], [s.head.dv, "d_v"], s.head.output));
const A = /** @type {Of} */ ((s) => square(s, "A", s.head.weights, { shade: weighed(1), hidden: s.hidden }));

/** Q, K and V: as projections of X where the page has X, else by themselves. @param {Story} s @returns {Scene[]} */
export function inputScenes(s) {
  const inputs = [Q(s), K(s), V(s)];
  /** @type {StateAxis[]} */
  const axes = ["query", "key", "key"];
  const read = (/** @type {string} */ name, /** @type {string} */ symbol, /** @type {string} */ dim) => {
    const x = s.named(name);
    if (!x) return null;
    const [batch, rows, cols] = x.shape;
    const start = Math.min(s.state.batch, batch - 1) * rows;
    return made(s, symbol, "plain", [rows, dim], [cols, "d_model"], (i, c) => x.data[(start + i) * cols + c]);
  };
  const plain = inputs.map((m, place) => singleScene(s, m, axes[place]));
  const [x, context] = [read("x", "X", "n"), read("context", "C", "m")];
  if (!x) return plain;
  if (!s.named("w_q")) return [singleScene(s, x, "query", s.t("no projections")), ...plain];
  const parts = inputs.map((r, place) => {
    const letter = "qkv"[place];
    const { data, shape } = /** @type {NumberArray} */ (s.named(`w_${letter}`));
    const bias = s.named(`b_${letter}`);
    const from = (place ? s.head.shared : s.head.number) * r.cols;
    const weight = (/** @type {number} */ c, /** @type {number} */ j) => data[c * shape[1] + from + j];
    const b = matrix(`W^${r.symbol}`, r.role, [shape[0], "d_model"], [r.cols, r.colDim], weight);
    const added = bias ? (/** @type {number} */ _, /** @type {number} */ j) => bias.data[from + j] : undefined;
    return /** @type {Part} */ ({ b, r, axes: [axes[place], "feature"], bias: added });
  });
  if (!context && !s.columns) {
    const whole = productScene(s, x, parts);
    if (whole.layout.width <= s.room) return [whole];
  }
  return parts.map((part, place) => productScene(s, (place && context) || x, [part]));
}

/** S = Q·Kᵀ, and the same by norms and angle. @param {Story} s @returns {Scene[]} */
export function scoreScenes(s) {
  const { head } = s;
  const norm = (/** @type {Cell} */ value, /** @type {number} */ i) =>
    Math.hypot(...listOf(head.dk, (c) => value(i, c)));
  const extra = (/** @type {number} */ i, /** @type {number} */ j) => {
    const [q, k] = [norm(head.q, i), norm(head.k, j)];
    const cosine = num(q && k ? head.scores(i, j) / q / k : 0);
    return h("span.aside.line", " = ‖q‖·‖k‖·cos θ = ", num(q, "query"), "·", num(k, "key"), "·", cosine);
  };
  const keys = transposed({ ...K(s), symbol: "Kᵀ" });
  return [productScene(s, Q(s), [{ b: keys, r: square(s, "S", head.scores), axes: ["query", "key"], extra }])];
}

/** The matrices from the scores to what is masked: scores, scaled, capped, biased; those that this layer has. @param {Story} s @returns {{name: string, symbol: string, value: Cell}[]} */
function logitSteps(s) {
  const symbols = { scores: "S", scaled: "S′", capped: "C", biased: "B" };
  const all = /** @type {(keyof typeof symbols)[]} */ (Object.keys(symbols));
  const here = all.filter((name) => name === "scaled" || s.step(name));
  return here.map((name) => ({ name, symbol: symbols[name], value: s.head[name] }));
}

/** One of the changes S → S′ → C → B. @param {Story} s @param {string} name @returns {Scene[]} */
export function logitScenes(s, name) {
  const { head } = s;
  const steps = logitSteps(s);
  const place = steps.findIndex((step) => step.name === name);
  const pair = [steps[place - 1], steps[place]];
  const largest = pair.map(({ value }) => most(head.n, head.m, value));
  const shade = signed("weights", name === "scaled" ? largest[0] : Math.max(...largest));
  const [before, after] = pair.map(({ symbol, value }) => square(s, symbol, value, { shade }));
  const factor = isRoot(head) ? `÷ √${head.dk}` : `× ${fmt(head.rules.scale)}`;
  const done = { scaled: factor, capped: "tanh" }[name] ?? "+";
  const written = (/** @type {number} */ i, /** @type {number} */ j) => {
    const result = h("b", fmt(after.value(i, j), 5));
    return [sym(letterOf(after), s.indices(i, j), "weights"), " = ", changed(head, name, i, j), " = ", result];
  };
  return beforeAfterScene(s, before, after, done, written);
}

/** The mask: which keys each query may see. @param {Story} s @returns {Scene[]} */
export function maskedScenes(s) {
  const { symbol, value } = logitSteps(s).slice(-1)[0];
  const before = square(s, symbol, value);
  const written = (/** @type {number} */ i, /** @type {number} */ j) => [
    sym("m", s.indices(i, j), "weights"),
    " = ",
    s.head.visible(i, j)
      ? [sym(letterOf(before), s.indices(i, j), "weights"), " = ", h("b", fmt(value(i, j), 5))]
      : [h("b", "−∞"), ` (${s.t("masked cell")})`],
  ];
  return beforeAfterScene(s, before, { ...before, symbol: "M", hidden: s.hidden }, "", written);
}

/** The symbol of what is masked. @param {Story} s */
export const beforeMask = (s) => logitSteps(s).slice(-1)[0].symbol;

/** The symbol of what goes into the softmax. @param {Story} s */
export const insideSoftmax = (s) => (s.hidden ? "M" : beforeMask(s)) + (s.head.rules.temperature === 1 ? "" : "/T");

/** A = softmax(M), row by row. @param {Story} s @returns {Scene[]} */
export function weightScenes(s) {
  const before = square(s, insideSoftmax(s), s.head.masked, { hidden: s.hidden });
  return beforeAfterScene(s, before, A(s), "softmax", (i, j) => softmaxOf(s, i, j), true);
}

/** O = A·V. @param {Story} s @returns {Scene[]} */
export const outputScenes = (s) => [productScene(s, A(s), [{ b: V(s), r: O(s), axes: ["query", "feature"] }])];

/** H: the outputs of all heads side by side. @param {Story} s */
function joined(s) {
  const { dv } = s.head;
  const value = (/** @type {number} */ i, /** @type {number} */ c) => s.headAt(Math.floor(c / dv)).output(i, c % dv);
  return made(s, "H", "value", [s.head.n, "n"], [s.layer.heads * dv, "h·d_v"], value, { split: dv });
}

/** @param {Story} s @returns {Scene[]} */
export function concatScenes(s) {
  const { dv, number } = s.head;
  return [
    {
      layout: beside([s.laid(O(s)), s.laid(joined(s))], "concat", s.units, s.room),
      cursor: () => ({ block: 1, row: s.state.query, col: number * dv + Math.min(s.state.feature, dv - 1) }),
      locate: ({ block, row, col }) => ({ block: 1, row, col: block ? col : number * dv + col }),
      marks: ({ row, col }) => [
        ...(Math.floor(col / dv) === number ? [{ block: 0, row, col: col % dv, kind: "value" }] : []),
        { block: 1, row, col, kind: "result" },
      ],
      written: ({ row, col }) => {
        const [from, c] = [Math.floor(col / dv), col % dv];
        const parts = [sym("h", s.indices(row, col), "value"), " = ", sym("o", s.indices(row, c), "value")];
        return [...parts, ` (${s.t("head")} ${from}) = `, h("b", fmt(s.headAt(from).output(row, c), 5))];
      },
      pin: ({ row, col }) => s.commit({ query: row, feature: col % dv, head: Math.floor(col / dv) }),
    },
  ];
}

/** U = H·W^O. Where W^O is not in the file, the run's output, and where that is not there either, H. @param {Story} s @returns {Scene[]} */
export function layerOutputScenes(s) {
  const H = joined(s);
  const [w, bias, run] = ["w_o", "b_o", "output"].map(s.named);
  const n = s.head.n;
  const U = (/** @type {number} */ wide, /** @type {ArrayLike<number>} */ data, start = 0) =>
    made(s, "U", "plain", [n, "n"], [wide, "d_model"], (i, c) => data[start + i * wide + c]);
  if (!w && run) {
    const wide = run.shape[2];
    return [singleScene(s, U(wide, run.data, s.state.batch * n * wide), "query", s.t("no projections"))];
  }
  if (!w) return [singleScene(s, { ...H, symbol: "U", role: "plain", split: undefined }, "query")];
  const wide = w.shape[1];
  const b = matrix("W^O", "plain", [H.cols, "h·d_v"], [wide, "d_model"], (c, j) => w.data[c * wide + j]);
  const added = bias ? (/** @type {number} */ _, /** @type {number} */ c) => bias.data[c] : undefined;
  return [productScene(s, H, [{ b, r: U(wide, s.layerOutput()), axes: ["query", "feature"], bias: added }])];
}
