// The units of rows and columns: tokens, or whole words. A word's weight on a word is the sum over its keys and the mean
// over its queries.

import { spelled } from "../numbers.js";

/** @typedef {{count: number, edges: Int32Array | null}} Units      edges[u]…edges[u+1] are the tokens of unit u; null: each token is one */

/** @param {number} length @returns {Units} */
export const tokens = (length) => ({ count: length, edges: null });

const LETTER = /^[\p{L}\p{N}\p{M}'’]/u;
const APART = /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}]/u; // written without spaces: each token stands alone

/**
 * @param {string[]} texts
 * @returns {Units}
 */
export function words(texts) {
  const spaced = texts.some((text) => /^[ ▁Ġ]/.test(text));
  const starts = [];
  for (const [place, text] of texts.entries()) {
    const goes = spaced
      ? LETTER.test(text) && place > 0 && LETTER.test(texts[place - 1].slice(-1)) && !APART.test(text)
      : text.startsWith("##");
    if (!goes) starts.push(place);
  }
  return { count: starts.length, edges: Int32Array.from([...starts, texts.length]) };
}

/** The first token of unit `at`. @param {Units} u @param {number} at */
export const tokenAt = (u, at) => (u.edges ? u.edges[Math.min(at, u.count)] : at);

/** The unit of a token. @param {Units} u @param {number} token */
export function unitOf(u, token) {
  if (!u.edges) return token;
  let [low, high] = [0, u.count - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (u.edges[middle] <= token) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** The text of a unit, without the space before it. @param {Units} u @param {(token: number) => string} name @param {number} at */
export function unitName(u, name, at) {
  let text = "";
  for (let token = tokenAt(u, at); token < tokenAt(u, at + 1); token++) text += name(token).replace(/^##/, "");
  return text.replace(/^[ ▁Ġ]+(?=.)/s, "");
}

/** The same in few characters, as it stands beside the map. @param {Units} u @param {(token: number) => string} name @param {number} at @param {number} most */
export const unitLabel = (u, name, at, most) => spelled(unitName(u, name, at), most);

/**
 * The same in quotes after its place; only the place where there is no text.
 * @param {Units} u @param {(token: number) => string} name @param {number} at @param {number} most
 */
export function placed(u, name, at, most) {
  const label = unitLabel(u, name, at, most);
  return label === String(at) ? label : `${at} “${label}”`;
}

/** Tells before which tokens a space must be written, where the tokens themselves have none (word pieces, ids). @param {string[]} texts @returns {(at: number) => boolean} */
export function gapsOf(texts) {
  const glued = texts.length > 1 && !texts.some((text) => /^[ \n▁Ġ]/.test(text));
  return (at) => glued && at > 0 && !texts[at].startsWith("##") && /^[\p{L}\p{N}]/u.test(texts[at]);
}

/**
 * Finds some words in the text: the tokens in which they begin.
 * @param {string[]} texts
 * @param {string} wanted
 */
export function search(texts, wanted) {
  const plain = (/** @type {string} */ text) => text.toLowerCase().replace(/[\s▁Ġ]+/g, " ");
  const sought = plain(wanted.trim());
  if (!sought) return [];
  const gap = gapsOf(texts);
  const starts = [];
  let whole = "";
  for (const [at, text] of texts.entries()) {
    if (gap(at)) whole += " ";
    starts.push(whole.length);
    whole += plain(text.replace(/^##/, ""));
  }
  starts.push(whole.length);
  /** @type {number[]} */
  const found = [];
  let token = 0;
  for (let at = whole.indexOf(sought); at >= 0; at = whole.indexOf(sought, at + 1)) {
    while (starts[token + 1] <= at) token++;
    if (found.at(-1) !== token) found.push(token);
  }
  return found;
}
