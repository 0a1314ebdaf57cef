// The figures of each step: which matrices they show.

import { signed } from "./colour.js";
import { h } from "./dom.js";
import { beside } from "./layout.js";
import { transposed } from "./matrix.js";
import { fmt, listOf } from "./numbers.js";
import { beforeAfterScene, letterOf, productScene, singleScene } from "./scenes.js";
import { matrix, most, weightMatrix } from "./story.js";
import { num, softmaxOf, sym } from "./written.js";

/** @param {Story} s */
const names = (s) => ({ rowName: s.queryName });
/** @param {Story} s @param {string} symbol @param {Cell} value @param {Partial<Matrix>} [more] */
const square = (s, symbol, value, more) =>
  matrix(symbol, "weights", [s.head.n, "n"], [s.head.m, "m"], value, { ...names(s), colName: s.keyName, ...more });
/** @param {Story} s */
const Q = (s) => matrix("Q", "query", [s.head.n, "n"], [s.head.dk, "d_k"], s.head.q, { rowName: s.queryName });
/** @param {Story} s */
const K = (s) => matrix("K", "key", [s.head.m, "m"], [s.head.dk, "d_k"], s.head.k, { rowName: s.keyName });
/** @param {Story} s */
const V = (s) => matrix("V", "value", [s.head.m, "m"], [s.head.dv, "d_v"], s.head.v, { rowName: s.keyName });
/** @param {Story} s */
const O = (s) => matrix("O", "value", [s.head.n, "n"], [s.head.dv, "d_v"], s.head.output, { rowName: s.queryName });

/** Q, K and V: as projections of X where the page has X, else by themselves. @param {Story} s @returns {Scene[]} */
export function inputScenes(s) {
  const inputs = [Q(s), K(s), V(s)];
  /** @type {StateAxis[]} */
  const axes = ["query", "key", "key"];
  const X = (/** @type {string} */ name) => {
    const { data, shape } = /** @type {NumberArray} */ (s.named(name));
    const [, rows, cols] = shape;
    const start = Math.min(s.state.batch, shape[0] - 1) * rows;
    const value = (/** @type {number} */ i, /** @type {number} */ c) => data[(start + i) * cols + c];
    return name === "x"
      ? matrix("X", "plain", [rows, "n"], [cols, "d_model"], value, { rowName: s.queryName })
      : matrix("C", "plain", [rows, "m"], [cols, "d_model"], value, { rowName: s.keyName });
  };
  const plain = inputs.map((m, place) => singleScene(s, m, axes[place]));
  if (!s.named("x")) return plain;
  if (!s.named("w_q")) return [singleScene(s, X("x"), "query", s.t("no projections")), ...plain];
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
  const norm = (/** @type {Cell} */ value, /** @type {number} */ i) =>
    Math.hypot(...listOf(head.dk, (c) => value(i, c)));
  const extra = (/** @type {number} */ i, /** @type {number} */ j) => {
    const [q, k] = [norm(head.q, i), norm(head.k, j)];
    const cosine = num(q && k ? head.scores(i, j) / q / k : 0);
    return h("span.aside.line", " = ‖q‖·‖k‖·cos θ = ", num(q, "query"), "·", num(k, "key"), "·", cosine);
  };
  return [
    productScene(s, Q(s), [
      { b: transposed({ ...K(s), symbol: "Kᵀ" }), r: square(s, "S", head.scores), axes: ["query", "key"], extra },
    ]),
  ];
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
  const { scale, softcap } = head.rules;
  const steps = logitSteps(s);
  const place = steps.findIndex((step) => step.name === name);
  const [from, to] = [steps[place - 1], steps[place]];
  const shade = signed(
    "weights",
    Math.max(most(head.n, head.m, from.value), name === "scaled" ? 0 : most(head.n, head.m, to.value)),
  );
  const root = Math.abs(scale * Math.sqrt(head.dk) - 1) < 1e-12;
  const cap = fmt(softcap ?? 0);
  const [before, after] = [square(s, from.symbol, from.value, { shade }), square(s, to.symbol, to.value, { shade })];
  const how = /** @type {Record<string, (x: number, y: number) => Child>} */ ({
    scaled: (x) => [num(x), root ? ` / √${head.dk}` : [" · ", num(scale)]],
    capped: (x) => [`${cap}·tanh(`, num(x), `/${cap})`],
    biased: (x, y) => [num(x), " + ", num(y - x)],
  });
  const done = name === "scaled" ? (root ? `÷ √${head.dk}` : `× ${fmt(scale)}`) : name === "capped" ? "tanh" : "+";
  const written = (/** @type {number} */ i, /** @type {number} */ j) => {
    const [x, y] = [from.value(i, j), to.value(i, j)];
    return [sym(letterOf(after), s.indices(i, j), "weights"), " = ", how[name](x, y), " = ", h("b", fmt(y, 5))];
  };
  return beforeAfterScene(s, before, after, done, written);
}

/** The mask: which keys each query may see. @param {Story} s @returns {Scene[]} */
export function maskedScenes(s) {
  const { head } = s;
  const { symbol, value } = logitSteps(s).slice(-1)[0];
  const shade = signed("weights", most(head.n, head.m, value));
  const before = square(s, symbol, value, { shade });
  const written = (/** @type {number} */ i, /** @type {number} */ j) => [
    sym("m", s.indices(i, j), "weights"),
    " = ",
    head.visible(i, j)
      ? [sym(letterOf(before), s.indices(i, j), "weights"), " = ", h("b", fmt(value(i, j), 5))]
      : [h("b", "−∞"), ` (${s.t("masked cell")})`],
  ];
  return beforeAfterScene(s, before, { ...before, symbol: "M", hidden: s.hidden }, "", written);
}

/** The symbol of what goes into the softmax. @param {Story} s */
export const insideSoftmax = (s) =>
  (s.hidden ? "M" : logitSteps(s).slice(-1)[0].symbol) + (s.head.rules.temperature === 1 ? "" : "/T");

/** The symbol of what is masked. @param {Story} s */
export const beforeMask = (s) => logitSteps(s).slice(-1)[0].symbol;

/** A = softmax(M), row by row. @param {Story} s @returns {Scene[]} */
export function weightScenes(s) {
  const { head } = s;
  const before = square(s, insideSoftmax(s), head.masked, { hidden: s.hidden });
  return beforeAfterScene(s, before, weightMatrix(s), "softmax", (i, j) => softmaxOf(s, i, j), true);
}

/** O = A·V. @param {Story} s @returns {Scene[]} */
export const outputScenes = (s) => [
  productScene(s, weightMatrix(s), [{ b: V(s), r: O(s), axes: ["query", "feature"] }]),
];

/** H: the outputs of all heads side by side. @param {Story} s */
function joined(s) {
  const { dv } = s.head;
  const value = (/** @type {number} */ i, /** @type {number} */ c) => s.headAt(Math.floor(c / dv)).output(i, c % dv);
  return matrix("H", "value", [s.head.n, "n"], [s.layer.heads * dv, "h·d_v"], value, { ...names(s), split: dv });
}

/** @param {Story} s @returns {Scene[]} */
export function concatScenes(s) {
  const { dv, number } = s.head;
  const output = O(s);
  return [
    {
      layout: beside([s.laid(output), s.laid(joined(s))], ["concat"], s.units, s.room),
      cursor: () => ({ block: 1, row: s.state.query, col: number * dv + Math.min(s.state.feature, dv - 1) }),
      locate: ({ block, row, col }) => ({ block: 1, row, col: block ? col : number * dv + col }),
      marks: ({ row, col }) => [
        ...(Math.floor(col / dv) === number ? [{ block: 0, row, col: col % dv, kind: "value" }] : []),
        { block: 1, row, col, kind: "result" },
      ],
      written: ({ row, col }) => {
        const [from, c] = [Math.floor(col / dv), col % dv];
        const { output } = s.headAt(from);
        const parts = [sym("h", s.indices(row, col), "value"), " = ", sym("o", s.indices(row, c), "value")];
        return [...parts, ` (${s.t("head")} ${from}) = `, h("b", fmt(output(row, c), 5))];
      },
      pin: ({ row, col }) => s.commit({ query: row, feature: col % dv, head: Math.floor(col / dv) }),
    },
  ];
}

/** U = H·W^O. Where W^O is not in the file, the run's output, and where that is not there either, H. @param {Story} s @returns {Scene[]} */
export function layerOutputScenes(s) {
  const H = joined(s);
  const w = s.named("w_o");
  const bias = s.named("b_o");
  const run = s.named("output");
  if (!w && run) {
    const [, n, wide] = run.shape;
    const value = (/** @type {number} */ i, /** @type {number} */ c) => run.data[(s.state.batch * n + i) * wide + c];
    const U = matrix("U", "plain", [n, "n"], [wide, "d_model"], value, names(s));
    return [singleScene(s, U, "query", s.t("no projections"))];
  }
  if (!w) return [singleScene(s, { ...H, symbol: "U", role: "plain", split: undefined }, "query")];
  const wide = w.shape[1];
  const output = s.layerOutput();
  const r = matrix("U", "plain", [H.rows, "n"], [wide, "d_model"], (i, c) => output[i * wide + c], names(s));
  const b = matrix("W^O", "plain", [H.cols, "h·d_v"], [wide, "d_model"], (c, j) => w.data[c * wide + j]);
  return [productScene(s, H, [{ b, r, axes: ["query", "feature"], bias: bias ? (_, c) => bias.data[c] : undefined }])];
}
