// The state of the view of one head, one plain object: the map draws it; the cell, the text and the controls change it.

import { showing } from "./effects.js";

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

/** The view of a head, as the page's state says. @param {Source} source @param {Parts} parts @returns {Look} */
export function lookAt(source, parts) {
  const { page, state, head } = source;
  const { layer, n, m } = head;
  const run = page.header.runs[state.address.run];
  const queryTexts = layer.text ? run[layer.text] : null;
  const keyTexts = layer.cross ? run.sources : queryTexts;
  const offset = layer.cross ? 0 : layer.rules.query_offset[0];
  return {
    ...source,
    actual: head,
    head: showing(head, state.shows),
    parts,
    offset,
    keyTexts,
    pads: new Set(layer.cross || layer.text !== "tokens" ? [] : run.pads),
    queries: n,
    keys: m,
    wide: null,
    queryName: nameOf(queryTexts, offset),
    keyName: nameOf(keyTexts, 0),
    whole: 1,
    high: 1,
    inView: n * m > 2 ** 20,
    view: state.view ?? { y: 0, x: 0, step: 1 },
    cell: { i: state.query, j: Math.max(0, state.key), pinned: state.pinned },
    row: null,
    column: null,
    nonfinite: false,
    jumpTo: () => {},
  };
}
