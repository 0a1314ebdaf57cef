// What all steps share: the chosen layer, head, query and key; the head's numbers; the figures' units and names.

import { signed, weighed } from "./colour.js";
import { asRun, headOf, isAsRun } from "./head.js";
import { unitsFor } from "./layout.js";
import { transposed } from "./matrix.js";

/** @typedef {import("./matrix.js").Matrix} Matrix */
/** @typedef {ReturnType<typeof makeStory>} Story */
/** @typedef {{edited: boolean, layer: number, batch: number, head: number, query: number, key: number, feature: number, next: number, less: number, what: import("./head.js").WhatIf}} State */

/** @param {import("./container.js").Page} page @param {import("./place.js").Place} place @returns {State} */
export function begin(page, { chosen: { layer, head, query, key }, what }) {
  return {
    edited: Boolean(page.header.edited),
    layer,
    batch: 0,
    head,
    query,
    key,
    feature: 0,
    next: -1,
    less: -1,
    what,
  };
}

/**
 * @param {import("./container.js").Page} page
 * @param {import("./shell.js").Shell} shell
 * @param {State} state
 * @param {number} room      pixels that a figure may take
 * @param {(element: Element, draw: () => void) => void} whenSeen
 * @param {(change: Partial<State>) => void} commit
 */
export function makeStory(page, shell, state, room, whenSeen, commit) {
  const { header } = page;
  const run = state.edited ? header.edited : header; // the run with edits or the one without
  const layer = run.layers[state.layer];
  const { t } = shell;
  /** @type {Map<number, Float64Array>} */
  const scores = new Map();
  /** @type {Map<number, import("./head.js").Head>} */
  const heads = new Map();
  const make = (/** @type {number} */ number, /** @type {import("./head.js").WhatIf} */ what) => {
    const edited = Object.keys(what.values).length > 0;
    const own = number === state.head;
    const supposed = own ? what : { ...what, values: {} };
    const made = headOf(page, layer, state.batch, number, supposed, edited && own ? undefined : scores.get(number));
    if (!edited || !own) scores.set(number, made.raw);
    return made;
  };
  const headAt = (/** @type {number} */ number) => {
    const known = heads.get(number) ?? make(number, state.what);
    heads.set(number, known);
    return known;
  };
  const named = (/** @type {string} */ name) => (layer.arrays[name] ? page.array(layer.arrays[name]) : null);
  const width = (/** @type {string} */ name) => named(name)?.shape.at(-1) ?? 0;
  const { tokens, sources } = header;
  const columns = header.convention === "columns";
  const { dk, dv, n, m } = headAt(state.head);
  const sizes = { n, m, d_k: dk, d_v: dv, d_model: Math.max(width("x"), width("w_o")), "h·d_v": layer.heads * dv };
  /** U = H·W^O + b^O, from all heads. */
  const computeOutput = () => {
    const w = /** @type {import("./container.js").NumberArray} */ (named("w_o"));
    const bias = named("b_o");
    const wide = w.shape[1];
    const made = new Float64Array(n * wide);
    for (let i = 0; i < n; i++) {
      for (let x = 0; x < w.shape[0]; x++) {
        const value = headAt(Math.floor(x / dv)).passed(i, x % dv);
        for (let c = 0; c < wide; c++) made[i * wide + c] += value * w.data[x * wide + c];
      }
      if (bias) for (let c = 0; c < wide; c++) made[i * wide + c] += bias.data[c];
    }
    return made;
  };
  /** What is computed from the chosen head and from what is supposed. */
  const derived = () => {
    const head = headAt(state.head);
    /** @type {import("./head.js").Head | null} */
    let actualHead = null;
    /** @type {Float64Array | null} */
    let output = null;
    const hidden = (/** @type {number} */ i, /** @type {number} */ j) => !head.visible(i, j);
    return {
      head,
      hidden: someOf(n, m, hidden) ? hidden : null,
      /** The head of the actual run, where the page shows a supposition; else null. */
      actual: () => (isAsRun(state.what) ? null : (actualHead ??= make(state.head, asRun()))),
      layerOutput: () => (output ??= computeOutput()),
    };
  };
  const story = Object.assign(
    {
      page,
      shell,
      t,
      state,
      commit,
      whenSeen,
      layer,
      facts: { ...header.facts, ...run.facts },
      headAt,
      named,
      sizes,
      room,
      columns,
      units: unitsFor(room, sizes),
      queryName: (/** @type {number} */ i) => tokens?.[i] ?? `q${subscript(i)}`,
      keyName: (/** @type {number} */ j) => (sources ?? tokens)?.[j] ?? `k${subscript(j)}`,
      /** A cell's indices, row first: tokens are rows, or columns by the other convention. @param {number} token @param {number} other */
      at: (token, other) => (columns ? `${other},${token}` : `${token},${other}`),
      /** @param {string} key */
      words: (key) => (header.words[shell.language()][key] ?? "").replace("-∞", "−∞"),
      /** @param {string} key */
      step: (key) => layer.steps.find((/** @type {any} */ step) => step.name === key),
      /** @param {string} text */
      translated(text) {
        for (const [from, to] of Object.entries(header.words[shell.language()].formulas ?? {}))
          text = text.replace(from, String(to));
        return text;
      },
      /** A matrix as it is shown: transposed where tokens are columns. @param {Matrix} m */
      laid: (m) => (columns ? transposed(m) : m),
    },
    derived(),
  );
  /** Where no key is chosen, the one with the largest weight. */
  const chooseKey = () => {
    if (state.key < 0 || state.key >= m) state.key = strongest(story.head, state.query);
  };
  chooseKey();
  return Object.assign(story, {
    /** Follows a change of the state; `supposed`: what is supposed has changed, so every head is computed again. @param {boolean} supposed */
    refresh(supposed) {
      if (supposed) heads.clear();
      Object.assign(story, derived());
    },
    chooseKey,
  });
}

/** The key with the largest weight. @param {import("./head.js").Head} head @param {number} query */
export function strongest(head, query) {
  let best = 0;
  for (let j = 1; j < head.m; j++) if (head.weights(query, j) > head.weights(query, best)) best = j;
  return best;
}

/** @param {number} rows @param {number} cols @param {(i: number, j: number) => boolean} is */
function someOf(rows, cols, is) {
  for (let i = 0; i < rows; i++) for (let j = 0; j < cols; j++) if (is(i, j)) return true;
  return false;
}

/** @param {number} i */
export const subscript = (i) => String(i).replace(/\d/g, (digit) => "₀₁₂₃₄₅₆₇₈₉"[Number(digit)]);

/** The largest size among finite cells. @param {number} rows @param {number} cols @param {(i: number, j: number) => number} at */
export function most(rows, cols, at) {
  let found = 0;
  for (let i = 0; i < rows; i++)
    for (let j = 0; j < cols; j++) {
      const size = Math.abs(at(i, j));
      if (size > found && size < Infinity) found = size;
    }
  return found;
}

/**
 * A matrix of signed numbers, coloured for its own largest.
 * @param {string} symbol
 * @param {string} role
 * @param {[number, string]} rows
 * @param {[number, string]} cols
 * @param {(i: number, j: number) => number} at
 * @param {Partial<Matrix>} [more]
 * @returns {Matrix}
 */
export const matrix = (symbol, role, [rows, rowDim], [cols, colDim], at, more = {}) => ({
  symbol,
  role,
  rows,
  cols,
  rowDim,
  colDim,
  at,
  shade: more.shade ?? signed(role, most(rows, cols, at)),
  ...more,
});

/** @param {Story} s @param {Partial<Matrix>} [more] */
export const weightMatrix = (s, more = {}) =>
  matrix("A", "weights", [s.head.n, "n"], [s.head.m, "m"], s.head.weights, {
    shade: weighed(1),
    rowName: s.queryName,
    colName: s.keyName,
    hidden: s.hidden,
    ...more,
  });
