// The shipped model's tokenizer: byte-level pairs in lower case, as the library `tokenizers` applies tokenizer.json.

import { kept } from "../numbers.js";

const END = "<|endoftext|>";
const PIECES =
  /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

/** The character that spells each byte: itself where it is visible, else one from 256 on. */
const SPELLING = (() => {
  let more = 256;
  const visible = (/** @type {number} */ byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(visible(byte) ? byte : more++));
})();
const BYTE = new Map(SPELLING.map((character, byte) => [character, byte]));

/**
 * @param {string[]} vocabulary      the spelling of each token
 * @param {string[]} merges          pairs that become one, "left right", the most frequent first
 */
export function tokenizerOf(vocabulary, merges) {
  const [ids, ranks] = [vocabulary, merges].map((list) => new Map(list.map((text, place) => [text, place])));
  /** @type {Map<string, number[]>} */
  const known = new Map();
  const text = (/** @type {number} */ id) => textOf(vocabulary[id]);

  /** The tokens of a piece of text. @param {string} piece */
  function tokensOf(piece) {
    const parts = Array.from(new TextEncoder().encode(piece), (byte) => SPELLING[byte]);
    for (;;) {
      const rank = (/** @type {number} */ i) => ranks.get(`${parts[i]} ${parts[i + 1]}`) ?? Infinity;
      let best = 0;
      for (let i = 1; i < parts.length - 1; i++) if (rank(i) < rank(best)) best = i;
      if (parts.length < 2 || rank(best) === Infinity) break;
      parts.splice(best, 2, parts[best] + parts[best + 1]);
    }
    return parts.map((part) => /** @type {number} */ (ids.get(part)));
  }

  return {
    text,
    /** @param {string} written @returns {number[]} */
    encode: (written) =>
      written.split(END).flatMap((between, place) => {
        const lower = Array.from(between, (character) => character.toLowerCase()).join("");
        return [
          ...(place ? [0] : []),
          ...(lower.match(PIECES) ?? []).flatMap((piece) => kept(known, piece, () => tokensOf(piece))),
        ];
      }),
  };
}

/** A token's text; bytes that are no whole character in hexadecimal. @param {string} spelling */
function textOf(spelling) {
  const bytes = Array.from(spelling, (character) => BYTE.get(character) ?? 63);
  const text = new TextDecoder().decode(new Uint8Array(bytes));
  if (!text.includes("\ufffd")) return text;
  return `⟨${bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ")}⟩`;
}
