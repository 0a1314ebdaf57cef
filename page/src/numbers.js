// Numbers and tokens as people read them.

/**
 * A number in few characters; a true minus sign.
 * @param {number} x
 * @param {number} [digits] significant ones
 */
export function fmt(x, digits = 4) {
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (x === 0) return "0";
  const size = Math.abs(x);
  const text = size < 1e-4 || size >= 1e6 ? x.toExponential(Math.min(2, digits - 1)) : fixed(x, digits);
  return text.replace("-", "−").replace("e−", "e-").replace("e+", "e");
}

/**
 * @param {number} x
 * @param {number} digits
 */
function fixed(x, digits) {
  const whole = Math.max(1, Math.floor(Math.log10(Math.abs(x))) + 1);
  return String(Number(x.toFixed(Math.max(0, digits - whole))) || Number(x.toPrecision(2)));
}

/**
 * A number for a cell: five characters or so.
 * @param {number} x
 * @param {boolean} [narrow]      three characters or so
 */
export function short(x, narrow) {
  if (!Number.isFinite(x)) return fmt(x);
  const size = Math.abs(x);
  if (size >= 1e5) return x.toExponential(0).replace("+", "").replace("-", "−");
  const places = size < 10 ? 2 : size < 100 ? 1 : 0;
  const text = x.toFixed(narrow && (size >= 1 || x < 0) ? Math.max(0, places - 1) : places);
  return Number(text) ? text.replace("-", "−") : "0";
}

/** @param {number} share */
export const percent = (share) => (share >= 5e-5 ? `${(share * 100).toFixed(share < 0.0995 ? 2 : 1)}%` : "<0.01%");

const HIDDEN = /[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/u;

/**
 * A token as text that stays in its place: its leading space shown, newlines as ⏎, what is invisible spelled out, cut.
 * @param {string} token
 * @param {number} [most] characters
 */
export function spelled(token, most = 24) {
  const body = token.startsWith(" ") ? `␣${token.slice(1)}` : token;
  const shown = [];
  for (const c of body.slice(0, 4 * most)) {
    if (c === "\n") shown.push("⏎");
    else if (c === "\u200d" || !HIDDEN.test(c)) shown.push(c);
    else shown.push(`\\u${/** @type {number} */ (c.codePointAt(0)).toString(16).padStart(4, "0")}`);
    if (shown.length > most) return `${shown.slice(0, most - 1).join("")}…`;
  }
  return shown.join("") || "∅";
}

/** What `each` makes of 0 … size − 1. @template T @param {number} size @param {(at: number) => T} each */
export const listOf = (size, each) => Array.from({ length: size }, (_, at) => each(at));
