// The units of rows and columns: tokens, or whole words. A word's weight on a word is the sum over its keys and the mean
// over its queries.

import { spelled } from "../numbers.js";

/** @param {number} length @returns {Units} */
export const tokens = (length) => ({ count: length, edges: null });

const LETTER = /^[\p{L}\p{N}\p{M}'’]/u;
const APART = /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}]/u; // written without spaces: each token stands alone

/** @param {string[]} texts @returns {Units} */
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

/** The first token of a unit. @param {Units} u @param {number} unit */
export const tokenAt = (u, unit) => (u.edges ? u.edges[Math.min(unit, u.count)] : unit);

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

/** The text of a unit, without the space before it. @param {Units} u @param {(token: number) => string} name @param {number} unit */
export function unitName(u, name, unit) {
  let text = "";
  for (let token = tokenAt(u, unit); token < tokenAt(u, unit + 1); token++) text += name(token).replace(/^##/, "");
  return text.replace(/^[ ▁Ġ]+(?! |$)/, "");
}

/** The same in few characters, as it stands beside the map. @param {Units} u @param {(token: number) => string} name @param {number} unit @param {number} most */
export const unitLabel = (u, name, unit, most) => spelled(unitName(u, name, unit), most);

/**
 * The same in quotes after its place; only the place where there is no text.
 * @param {Units} u @param {(token: number) => string} name @param {number} unit @param {number} most
 */
export function placed(u, name, unit, most) {
  const label = unitLabel(u, name, unit, most);
  return label === String(unit) ? label : `${unit} “${label}”`;
}

/** Tells before which tokens a space must be written, where the tokens themselves have none (word pieces, ids). @param {string[]} texts @returns {(at: number) => boolean} */
export function gapsOf(texts) {
  const glued = texts.length > 1 && !texts.some((text) => /^[ \n▁Ġ]/.test(text));
  return (index) => glued && index > 0 && !texts[index].startsWith("##") && /^[\p{L}\p{N}]/u.test(texts[index]);
}

/** Finds some words in the text: the tokens in which they begin. @param {string[]} texts @param {string} wanted */
export function search(texts, wanted) {
  const plain = (/** @type {string} */ text) => text.toLowerCase().replace(/[\s▁Ġ]+/g, " ");
  const sought = plain(wanted.trim());
  if (!sought) return [];
  const gap = gapsOf(texts);
  const starts = [];
  let whole = "";
  for (const [index, text] of texts.entries()) {
    if (gap(index)) whole += " ";
    starts.push(whole.length);
    whole += plain(text.replace(/^##/, ""));
  }
  starts.push(whole.length);
  /** @type {number[]} */
  const places = [];
  let token = 0;
  for (let unit = whole.indexOf(sought); unit >= 0; unit = whole.indexOf(sought, unit + 1)) {
    while (starts[token + 1] <= unit) token++;
    if (places.at(-1) !== token) places.push(token);
  }
  return places;
}
