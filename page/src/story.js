// What all steps share: the chosen layer, head, query and key; the head's numbers; the figures' units and names.

import { signed } from "./colour.js";
import { headOf } from "./head.js";
import { kept, largestAt, listOf } from "./numbers.js";
import { unitsFor } from "./scenes.js";
import { transposed } from "./matrix.js";

/**
 * @param {Page} page @param {Shell} shell @param {State} state
 * @param {number} room      pixels that a figure may take
 * @param {(change: Partial<State>) => void} commit
 */
export function makeStory(page, shell, state, room, commit) {
  const { header } = page;
  const { tokens, sources } = header;
  const columns = header.convention === "columns";
  const sentences = header.words[shell.language()];
  /** @type {Map<number, ReturnType<typeof headOf>>} */
  const heads = new Map();
  /** What is computed from the chosen head of the run. */
  const derived = () => {
    const layer = header.layers[state.layer];
    const named = (/** @type {string} */ name) => (layer.arrays[name] ? page.array(layer.arrays[name]) : null);
    const width = (/** @type {string} */ name) => named(name)?.shape.at(-1) ?? 0;
    const headAt = (/** @type {number} */ number) =>
      kept(heads, number, () => headOf(page, layer, state.batch, number));
    const head = headAt(state.head);
    const { dk, dv, n, m } = head;
    const sizes = { n, m, d_k: dk, d_v: dv, d_model: Math.max(width("x"), width("w_o")), "h·d_v": layer.heads * dv };
    const hidden = (/** @type {number} */ i, /** @type {number} */ j) => !head.visible(i, j);
    /** @type {Map<number, Float64Array>} */
    const rows = new Map();
    /** U = H·W^O + b^O, from all heads, row by row. @type {Cell} */
    const layerOutput = (i, c) => kept(rows, i, () => outputRow(headAt, i, dv, named("w_o"), named("b_o")))[c];
    const masks = most(n, m, (i, j) => Number(hidden(i, j)));
    return { layer, named, headAt, head, sizes, hidden: masks ? hidden : null, layerOutput };
  };
  const first = derived();
  const story = {
    ...{ page, shell, t: shell.t, state, commit, room, columns, facts: header.facts },
    units: unitsFor(room, first.sizes),
    queryName: (/** @type {number} */ i) => tokens?.[i] ?? `q${subscript(i)}`,
    keyName: (/** @type {number} */ j) => (sources ?? tokens)?.[j] ?? `k${subscript(j)}`,
    /** A cell's indices, row first: tokens are rows, or columns by the other convention. @param {number} token @param {number} other */
    indices: (token, other) => (columns ? `${other},${token}` : `${token},${other}`),
    words: (/** @type {string} */ key) => (sentences[key] ?? "").replace("-∞", "−∞"),
    step: (/** @type {string} */ key) => story.layer.steps.find((/** @type {any} */ step) => step.name === key),
    /** @param {string} text */
    translated(text) {
      for (const [from, to] of Object.entries(sentences.formulas ?? {})) text = text.replace(from, String(to));
      return text;
    },
    /** A matrix as it is shown: transposed where tokens are columns. @param {Matrix} m */
    laid: (m) => (columns ? transposed(m) : m),
    /** Follows a change of the state: of its head (`other`), of the whole run (`anew`). @param {boolean} other @param {boolean} anew */
    follow(other, anew) {
      if (anew) heads.clear();
      if (other) Object.assign(story, derived());
      const { m, weights } = story.head;
      if (state.key < 0 || state.key >= m) state.key = largestAt(listOf(m, (j) => weights(state.query, j)));
    },
    ...first,
  };
  story.follow(false, false);
  return story;
}

/** @param {(number: number) => ReturnType<typeof headOf>} headAt @param {number} i @param {number} dv @param {NumberArray | null} w @param {NumberArray | null} bias */
function outputRow(headAt, i, dv, w, bias) {
  const [high, wide] = w?.shape ?? [0, 0];
  const row = Float64Array.from({ length: wide }, (_, c) => bias?.data[c] ?? 0);
  for (let x = 0; x < high; x++) {
    const value = headAt(Math.floor(x / dv)).output(i, x % dv);
    for (let c = 0; c < wide; c++) row[c] += value * Number(w?.data[x * wide + c]);
  }
  return row;
}

export const subscript = (/** @type {number} */ i) => String(i).replace(/\d/g, (digit) => "₀₁₂₃₄₅₆₇₈₉"[Number(digit)]);

/** The largest size among finite cells. @param {number} rows @param {number} cols @param {Cell} value */
export function most(rows, cols, value) {
  let largest = 0;
  for (let i = 0; i < rows; i++)
    for (let j = 0; j < cols; j++) {
      const size = Math.abs(value(i, j));
      if (size > largest && size < Infinity) largest = size;
    }
  return largest;
}

/**
 * A matrix of signed numbers, coloured for its own largest.
 * @param {string} symbol @param {string} role @param {[number, string]} rows @param {[number, string]} cols
 * @param {Cell} value @param {Partial<Matrix>} [more] @returns {Matrix}
 */
export const matrix = (symbol, role, [rows, rowDim], [cols, colDim], value, more = {}) => ({
  ...{ symbol, role, rows, cols, rowDim, colDim, value },
  shade: more.shade ?? signed(role, most(rows, cols, value)),
  ...more,
});
