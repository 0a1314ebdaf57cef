// Formulas as MathML, from the strings that every report prints: S' = S/√d_k, A = softmax(M), U = H·W^O + b^O …

import { math } from "./dom.js";

/** Which role a symbol plays: its colour, here as in the figures; S, C, B, M and A are weights. @type {Record<string, string>} */
const ROLES = { Q: "query", K: "key", V: "value", O: "value", H: "value" };
for (const symbol of "SCBMA") ROLES[symbol] = "weights";
const DIMS = new Set(["d_k", "d_v", "d_model", "n", "m", "h"]);
const PIECES = /√|[A-Za-z]+(?:[_^][A-Za-z0-9]+|')?ᵀ?|\d+(?:\.\d+)?(?:e-?\d+)?|[\u2e80-\uffdc]+|\S/gu;

export function formula(/** @type {string} */ text) {
  const [whole, main, clause] = text.match(/^((?:\([^)]*\)|[^,，(])*)([,，].*)?$/) ?? [text, text];
  const pieces = (main ?? whole).match(PIECES) ?? [];
  const said = clause ? math("mtext", clause.replace("-∞", "−∞")) : null;
  return math("math", { display: "block" }, ...row(pieces, { index: 0 }), said);
}

function row(/** @type {string[]} */ pieces, /** @type {{index: number}} */ place) {
  /** @type {Element[]} */
  const made = [];
  while (place.index < pieces.length) {
    const piece = pieces[place.index];
    if (piece === "/" && made.length) {
      place.index++;
      made.push(math("mfrac", /** @type {Element} */ (made.pop()), atom(pieces, place)));
    } else made.push(atom(pieces, place));
  }
  return made;
}

/** @param {string[]} pieces @param {{index: number}} place @returns {Element} */
function atom(pieces, place) {
  const piece = pieces[place.index++];
  if (piece === "√") return math("msqrt", place.index < pieces.length ? atom(pieces, place) : math("mi", ""));
  if (/^\d/.test(piece)) return math("mn", piece);
  if (/^[\u2e80-\uffdc]/u.test(piece)) return math("mtext", piece);
  if (/^[A-Za-z]/.test(piece)) return named(piece);
  return math("mo", piece === "'" ? {} : { stretchy: "false" }, piece === "-" ? "−" : piece);
}

/** @param {string} piece @returns {Element} */
function named(piece) {
  const turned = piece.endsWith("ᵀ");
  const [, letter, mark, small] = /** @type {RegExpMatchArray} */ (
    piece.replace("ᵀ", "").match(/^([A-Za-z]+)(?:([_^'])(\w*))?$/)
  );
  if (letter.length > 1)
    return /^(softmax|tanh|concat)$/.test(letter) ? math("mi", letter) : math("mtext", `\u00a0${letter}`);
  const whole = mark === "_" ? `${letter}_${small}` : letter;
  const dim = DIMS.has(whole) ? whole : null;
  const role = mark === "^" ? ROLES[small] : ROLES[letter];
  const attributes = { class: dim ? "dim" : role ? `role-${role}` : null };
  const base = math("mi", letter);
  if (turned) return math("msup", attributes, base, math("mi", "T"));
  if (mark === "'") return math("msup", attributes, base, math("mo", "′"));
  if (mark) return math(mark === "_" ? "msub" : "msup", attributes, base, math("mi", small));
  return math("mrow", attributes, base);
}
