// The names of tokens at the map and in its lists, and a search for words in the text.

import { spelled } from "../numbers.js";

/** A token in few characters, without the space before it. @param {(token: number) => string} name @param {number} token @param {number} most */
export const labelOf = (name, token, most) => spelled(bare(name(token)), most);

/** @param {string} text */
const bare = (text) => text.replace(/^##/, "").replace(/^[ ▁Ġ]+(?! |$)/, "");

/**
 * The same in quotes after its place; only the place where there is no text.
 * @param {(token: number) => string} name @param {number} token @param {number} most
 */
export function placed(name, token, most) {
  const label = labelOf(name, token, most);
  return label === String(token) ? label : `${token} “${label}”`;
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
