// The state of the view of one head, one plain object: the map draws it; the cell, the text and the controls change it.

import { showing } from "./effects.js";
import { areAlike } from "./source.js";
import { under, underRules } from "./supposing.js";
import { tokens, unitOf, words } from "./units.js";

/** Whether this view is still on the page. @param {Look} look */
export const onPage = ({ parts }) => parts.box.isConnected;

/** Returns a function that tells whether the present cell is still chosen: results for an older cell are dropped. @param {Look} look */
export function stillAt(look) {
  const { cell } = look;
  const { i, j } = cell;
  return () => onPage(look) && cell.i === i && cell.j === j;
}

/** @param {string[] | null} texts @param {number} offset @returns {(token: number) => string} */
const nameOf = (texts, offset) => (token) => texts?.[token + offset] ?? String(token);

/** The head, and the one that is subtracted, under what is supposed; of their edges the weights, or what they did. @param {Head} head @param {Head | null} other @param {WhatIf} what @param {Shows} shows */
export function shownUnder(head, other, what, shows) {
  const chosen = showing(under(head, what), shows);
  const minus = other && showing(underRules(other, what), shows);
  return { head: chosen, other: minus && minus.shows === chosen.shows ? minus : null };
}

/** The view of a head, as the page's state says. @param {Source} source @param {Parts} parts @returns {Look} */
export function lookAt(source, parts) {
  const { page, state, head, other } = source;
  const { what } = source.place;
  const fixed = state.fixed && state.shows === "weights";
  const subtracted = other && areAlike(page, head, other.layer, other.address.head) ? other : null;
  const { layer, n, m } = head;
  const run = page.header.runs[state.address.run];
  const queryTexts = layer.text ? run[layer.text] : null;
  const keyTexts = layer.cross ? run.sources : queryTexts;
  const offset = layer.cross ? 0 : layer.rules.query_offset[0];
  const canWords = Boolean(queryTexts && keyTexts);
  if (!canWords) state.words = false;
  const unitsOf = (/** @type {string[] | null} */ texts, /** @type {number} */ length) =>
    state.words && texts ? words(texts) : tokens(length);
  const queries = unitsOf(queryTexts && queryTexts.slice(offset, offset + n), n);
  const keys = unitsOf(keyTexts, m);
  return {
    ...source,
    actual: head,
    actualOther: subtracted,
    ...shownUnder(head, subtracted, what, state.shows),
    parts,
    offset,
    keyTexts,
    pads: new Set(layer.cross || layer.text !== "tokens" ? [] : run.pads),
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
