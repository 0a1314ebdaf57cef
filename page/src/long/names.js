// The names of tokens at the map and in its lists.

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
