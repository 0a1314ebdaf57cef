// The figures of each step: which matrices they show.

import { signed, weighed } from "./colour.js";
import { h } from "./dom.js";
import { beside, letterOf, productScene, sceneOf } from "./scenes.js";
import { transposed } from "./matrix.js";
import { fmt, listOf } from "./numbers.js";
import { matrix, most } from "./story.js";
import { bold, changed, isRoot, num, rankOf, sym } from "./written.js";

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

/** A single matrix. @param {Story} s @param {Matrix} m @param {StateAxis} axis @param {...string} notes */
function singleScene(s, m, axis, ...notes) {
  const letter = letterOf(m);
  /** @type {Result["written"]} */
  const written = (row, col) => [sym(letter, s.indices(row, col), m.role), " = ", bold(m.value(row, col))];
  const layout = beside([s.laid(m)], "", s.units, s.room);
  return sceneOf(s, layout, [{ block: 0, r: m, axes: [axis, "feature"], from: [], written }], notes);
}

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

/**
 * The steps from the scores to the weights that this layer has: each changes the one before cell by cell, the softmax row by row.
 * @param {Story} s @returns {{name: string, symbol: string, value: Cell, done: string, hidden?: Test | null}[]}
 */
export function chainOf(s) {
  const { head, hidden } = s;
  const { scale, temperature } = head.rules;
  const over = temperature === 1 ? "" : "/T";
  const all = [
    { name: "scores", symbol: "S", value: head.scores, done: "" },
    { name: "scaled", symbol: "S′", value: head.scaled, done: isRoot(head) ? `÷ √${head.dk}` : `× ${fmt(scale)}` },
    { name: "capped", symbol: "C", value: head.capped, done: "tanh" },
    { name: "biased", symbol: "B", value: head.biased, done: "+" },
    { name: "masked", symbol: `M${over}`, value: head.masked, done: over, hidden },
    { name: "weights", symbol: "A", value: head.weights, done: "softmax", hidden },
  ];
  return all.filter(({ name }) => !/capped|biased/.test(name) || s.step(name));
}

/** A step of the chain after the scores: its matrix beside the one before. @param {Story} s @param {string} name @returns {Scene[]} */
export function chainScenes(s, name) {
  const { head } = s;
  const chain = chainOf(s);
  const at = chain.findIndex((step) => step.name === name);
  const [before, after] = chain.slice(at - 1, at + 1);
  const whole = name === "weights";
  const sizes = [before, after].map(({ value }) => most(head.n, head.m, value));
  const shade = signed("weights", whole ? sizes[0] : Math.max(...sizes));
  const from = square(s, before.symbol, before.value, { shade, hidden: before.hidden });
  const r = whole ? A(s) : square(s, after.symbol, after.value, { shade, hidden: after.hidden });
  const written = (/** @type {number} */ i, /** @type {number} */ j) => {
    const made = changed(head, name, i, j, s.t, s.indices(i, j));
    return whole ? [made, rankOf(head, i, j, s.t)] : made;
  };
  const layout = beside([s.laid(from), s.laid(r)], after.done, s.units, s.room);
  const source = { block: 0, row: 0, col: 1, line: whole, kind: "weights" };
  const notes = whole ? [] : [s.t("same scale")];
  return [sceneOf(s, layout, [{ block: 1, r, axes: ["query", "key"], from: [source], written }], notes)];
}

/** O = A·V. @param {Story} s @returns {Scene[]} */
export const outputScenes = (s) => [productScene(s, A(s), [{ b: V(s), r: O(s), axes: ["query", "feature"] }])];

/** H: the outputs of all heads side by side. @param {Story} s */
function joined(s) {
  const { dv } = s.head;
  const value = (/** @type {number} */ i, /** @type {number} */ c) => s.headAt(Math.floor(c / dv)).output(i, c % dv);
  return made(s, "H", "value", [s.head.n, "n"], [s.layer.heads * dv, "h·d_v"], value, { split: dv });
}

/** What the layer puts out: H·W^O. Where W^O is not in the file, H, and the run's output if that is there. @param {Story} s @returns {Scene[]} */
export function layerOutputScenes(s) {
  const H = joined(s);
  const [w, bias, run] = ["w_o", "b_o", "output"].map(s.named);
  const n = s.head.n;
  const U = (/** @type {number} */ wide, /** @type {Cell} */ value) =>
    made(s, "U", "plain", [n, "n"], [wide, "d_model"], value);
  if (w) {
    const [high, wide] = w.shape;
    const b = matrix("W^O", "plain", [high, "h·d_v"], [wide, "d_model"], (c, j) => w.data[c * wide + j]);
    const added = bias ? (/** @type {number} */ _, /** @type {number} */ c) => bias.data[c] : undefined;
    return [productScene(s, H, [{ b, r: U(wide, s.layerOutput), axes: ["query", "feature"], bias: added }])];
  }
  if (!run && s.step("output").formula === "U = H") return [singleScene(s, { ...H, symbol: "U" }, "query")];
  if (!run) return [singleScene(s, H, "query", s.t("no projections"))];
  const [wide, start] = [run.shape[2], s.state.batch * n];
  const output = U(wide, (i, c) => run.data[(start + i) * wide + c]);
  return [singleScene(s, H, "query"), singleScene(s, output, "query", s.t("no projections"))];
}
