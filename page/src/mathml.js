// Formulas as MathML, from the strings that every report prints: S' = S/√d_k, A = softmax(M), U = H·W^O + b^O …

import { math } from "./dom.js";

/** Which role a symbol plays: its colour, here as in the figures; S, C, B, M and A are weights. @type {Record<string, string>} */
const ROLES = { Q: "query", K: "key", V: "value", O: "value", H: "value" };
for (const symbol of "SCBMA") ROLES[symbol] = "weights";
const DIMS = new Set(["d_k", "d_v", "d_model", "n", "m", "h"]);
const PIECES = /√|[A-Za-z]+(?:[_^][A-Za-z0-9]+|')?ᵀ?|\d+(?:\.\d+)?(?:e-?\d+)?|[\u2e80-\uffdc]+|\S/gu;

export function formula(/** @type {string} */ text) {
  const [whole, main, clause] = text.match(/^((?:\([^)]*\)|[^,，(])*)([,，].*)?$/) ?? [text, text];
  /** @type {string[]} */
  const pieces = (main ?? whole).match(PIECES) ?? [];
  /** @type {Element[]} */
  const made = [];
  while (pieces.length) {
    const over = pieces[0] === "/" ? made.pop() : null;
    if (over) pieces.shift();
    made.push(over ? math("mfrac", over, atom(pieces)) : atom(pieces));
  }
  return math("math", { display: "block" }, ...made, clause && math("mtext", clause.replace("-∞", "−∞")));
}

/** What comes first, which is taken away. @param {string[]} pieces @returns {Element} */
function atom(pieces) {
  const piece = pieces.shift() ?? "";
  if (piece === "√") return math("msqrt", atom(pieces));
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
  if (!turned && !mark) return math("mrow", attributes, base);
  const at = turned ? math("mi", "T") : mark === "'" ? math("mo", "′") : math("mi", small);
  return math(mark === "_" && !turned ? "msub" : "msup", attributes, base, at);
}
