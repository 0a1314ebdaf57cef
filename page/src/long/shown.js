// The state of the view of one head, one plain object: the map draws it; the cell, the text and the controls change it.

import { showing } from "./effects.js";
import { areAlike } from "./source.js";
import { under, underRules } from "./supposing.js";
import { tokens, unitOf, words } from "./units.js";

/** @typedef {import("./source.js").Head} Head */
/** @typedef {import("./units.js").Units} Units */
/** @typedef {{y: number, x: number, step: number}} View      the first query and key, and units for each pixel of the screen */
/** @typedef {{i: number, j: number, pinned: boolean}} Cell      in units */

/**
 * All that the map needs.
 * @typedef {object} Shown
 * @property {Head} head      under what is supposed
 * @property {Head | null} other      subtracted
 * @property {Record<string, import("./source.js").Picture>} wide      the finer pictures, once they are loaded
 * @property {Units} queries
 * @property {Units} keys
 * @property {(token: number) => string} queryName
 * @property {(token: number) => string} keyName
 * @property {"most" | "mean"} rule      of a pixel with many weights
 * @property {"sqrt" | "linear" | "log"} scale
 * @property {boolean} aside      the first key is left out
 * @property {number} whole      the end of the colour scale for the whole head
 * @property {number} high      the end of the colour scale
 * @property {boolean} inView      the scale's end is that of the rows in view
 * @property {boolean} fixed      the scale's end is 1
 * @property {View} view
 * @property {Cell} cell
 * @property {Float32Array | null} row      weights of the chosen query, by key token
 * @property {Float32Array | null} column      weights on the chosen key, by query token
 * @property {ArrayLike<number> | null} received      what each key token receives from all queries
 * @property {boolean} nonfinite      NaN or infinity is among the weights
 */

/**
 * The elements whose content changes.
 * @typedef {object} Parts
 * @property {HTMLElement} ribbon      says that the weights are not the run's
 * @property {HTMLElement} box      of the map
 * @property {HTMLCanvasElement} canvas
 * @property {HTMLElement} where
 * @property {HTMLElement} scale
 * @property {HTMLElement} readout
 * @property {HTMLDetailsElement} table
 * @property {HTMLElement} lists
 * @property {HTMLElement} text
 * @property {import("./decoding.js").Decoding | null} decoding
 */

/**
 * The arguments of the view of a head.
 * @typedef {object} Given
 * @property {import("../container.js").Page} page
 * @property {import("./page.js").State} state
 * @property {import("./page.js").Answer} answer
 * @property {import("../dive/dive.js").Dive} dive
 * @property {import("../place.js").Place} place
 * @property {import("../shell.js").Shell} shell
 * @property {Head} head
 * @property {Head | null} other
 * @property {(head: Head) => void} shownAs      the chosen head is shown under a supposition, or as it ran
 * @property {(at: import("./source.js").Address) => void} pick
 * @property {() => Promise<void>} again      draws the head again, from the present state
 * @property {(why: unknown) => null} failed
 */

/** @typedef {Given & Shown & {actual: Head, actualOther: Head | null, offset: number, keyTexts: string[] | null, canWords: boolean, parts: Parts, jumpTo: (query: number, key: number) => void, drawSoon: () => void, resting: ReturnType<typeof setTimeout> | undefined}} Look      actual: as it ran; offset: the key position of query 0 */

/** Whether this view is still on the page. @param {Look} look */
export const onPage = ({ parts }) => parts.box.isConnected;

/** Returns a function that tells whether the present cell is still chosen: results for an older cell are dropped. @param {Look} look */
export function stillAt(look) {
  const { cell } = look;
  const { i, j } = cell;
  return () => onPage(look) && cell.i === i && cell.j === j;
}

/** @param {string[] | null} texts @param {number} offset @returns {(token: number) => string} */
const nameOf = (texts, offset) => (at) => texts?.[at + offset] ?? String(at);

/** The head, and the one that is subtracted, under what is supposed; of their edges the weights, or what they did. @param {Head} head @param {Head | null} other @param {import("../head.js").WhatIf} what @param {import("./effects.js").Shows} shows */
export function shownUnder(head, other, what, shows) {
  const own = showing(under(head, what), shows);
  const minus = other && showing(underRules(other, what), shows);
  return { head: own, other: minus && minus.shows === own.shows ? minus : null };
}

/** The view of a head, as the page's state says. @param {Given} given @param {Parts} parts @returns {Look} */
export function lookAt(given, parts) {
  const { page, state, head, other } = given;
  const { what } = given.place;
  const fixed = state.fixed && state.shows === "weights";
  const subtracted = other && areAlike(page, head, other.layer, other.address.head) ? other : null;
  const { layer, n, m } = head;
  const run = page.header.runs[state.at.run];
  const queryTexts = /** @type {string[] | null} */ (run.tokens);
  const keyTexts = /** @type {string[] | null} */ (layer.cross ? run.sources : run.tokens);
  const offset = layer.cross ? 0 : layer.rules.query_offset[0];
  const canWords = Boolean(queryTexts && keyTexts);
  if (!canWords) state.words = false;
  const unitsOf = (/** @type {string[] | null} */ texts, /** @type {number} */ length) =>
    state.words && texts ? words(texts) : tokens(length);
  const queries = unitsOf(queryTexts && queryTexts.slice(offset, offset + n), n);
  const keys = unitsOf(keyTexts, m);
  return {
    ...given,
    actual: head,
    actualOther: subtracted,
    ...shownUnder(head, subtracted, what, state.shows),
    parts,
    offset,
    keyTexts,
    canWords,
    queries,
    keys,
    wide: {},
    queryName: nameOf(queryTexts, offset),
    keyName: nameOf(keyTexts, 0),
    rule: state.rule,
    scale: state.scale,
    aside: state.aside,
    whole: 1,
    high: 1,
    inView: !fixed && (state.inView ?? n * m > 2 ** 20),
    fixed,
    view: state.view ?? { y: 0, x: 0, step: 1 },
    cell: { i: unitOf(queries, state.query), j: unitOf(keys, Math.max(0, state.key)), pinned: state.pinned },
    row: null,
    column: null,
    received: head.received,
    nonfinite: false,
    jumpTo: () => {},
    drawSoon: () => {},
    resting: undefined,
  };
}
