// Numbers and tokens as people read them.

/**
 * A number with so many significant digits, whole numbers in full, with a true minus sign; never 0 unless it is 0.
 * @param {number} x
 * @param {number} [digits] significant ones
 */
export function fmt(x, digits = 4) {
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  if (size && (size < 1e-4 || size >= 1e6)) return signs(x.toExponential(Math.min(2, digits - 1)));
  return signs(String(size < 10 ** digits ? Number(x.toPrecision(digits)) : Math.round(x)));
}

const signs = (/** @type {string} */ text) => text.replace("-", "−").replace("e−", "e-").replace("e+", "e");

/**
 * A number and how far it may be off: `0.204473 ± 9e-6`. Digits go down to the bound; the bound grows by what is rounded
 * away, so that the true value lies inside what is printed.
 * @param {number} x @param {number} off
 */
export function within(x, off) {
  if (!(off > 0) || !Number.isFinite(x + off)) return fmt(x);
  const lead = (/** @type {number} */ y) => Math.floor(Math.log10(Math.abs(y)));
  const digits = x ? Math.max(1, lead(x) - lead(off) + 1) : 1;
  const fixed = () => (Math.abs(x) < 1e-4 ? x.toExponential(digits - 1) : x.toFixed(Math.max(0, digits - 1 - lead(x))));
  const shown = x ? fixed() : "0";
  const wide = (off + Math.abs(Number(shown) - x)) * (1 + 1e-12);
  const unit = 10 ** lead(wide);
  return `${signs(shown)} ± ${fmt(Math.ceil(wide / unit) * unit, 1)}`;
}

/**
 * Three digits, or two where the third may be wrong; where the second may be, too, with how far it may be off.
 * @param {number} x @param {number} off
 */
export function safe(x, off) {
  const digits = [3, 2].find((n) => !(off > 10 ** (Math.floor(Math.log10(Math.abs(x))) + 1 - n) / 2));
  return digits ? fmt(x, digits) : within(x, off);
}

/** A number for a cell: at most five characters or so. @param {number} x @param {boolean} [narrow]      four */
export function short(x, narrow) {
  const size = Math.abs(x);
  if (!size || !Number.isFinite(x)) return fmt(x);
  if (size >= 1e5) return signs(x.toExponential(0));
  if (size >= 0.995)
    return signs(x.toFixed(Math.max(0, (size < 9.995 ? 2 : size < 99.95 ? 1 : 0) - Number(narrow ?? 0))));
  const text = size < 0.0995 ? String(Number(x.toPrecision(1))) : x.toFixed(narrow && x < 0 ? 1 : 2);
  return signs(text.length > 5 ? x.toExponential(0) : text);
}

/**
 * A share as a percentage: two decimals; more, or an exponent, where two would not show two digits. The rule of percent in
 * digits.py, so that a page and the terminal print the same.
 * @param {number} share
 */
export function percent(share) {
  const x = 100 * share;
  if (!x || !Number.isFinite(x)) return `${fmt(x)}%`;
  const places = [2, 3, 4].find((n) => Number(x.toFixed(n)) * 10 ** n > 9.5);
  if (places) return `${x.toFixed(places)}%`;
  const two = x.toExponential(1);
  return `${two.length > 6 ? x.toExponential(0) : two}%`;
}

/** A number with its sign, + where it is positive. @param {number} x @param {(size: number) => string} format */
export const withSign = (x, format) => (x > 0 ? "+" : x < 0 ? "−" : "") + format(Math.abs(x));

/** A text with values in place of its {names}. @param {string} text @param {Record<string, string>} values */
export const filled = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);

// what cannot be seen, and what stands for something else here
const ODD = /[\p{C}\p{Z}\p{DI}\u2800␣⏎⇥␍]|(?<= )×(?=\d)|^∅$/gu;
const BACKSLASHES = /\\+(?=\0|[xuU][\da-f])/g; // before what is escaped, or seems so
/** @type {Record<string, string>} */
const MARKS = { "\n": "⏎", "\t": "⇥", "\r": "␍", " ": " " };

/**
 * A token as text that stays in its place, cut: outer and repeated spaces marked, those before a digit not counted,
 * newlines as ⏎, what is invisible escaped, ∅ for no text. The rule of spelled in spelling.py, so that a page and the terminal print the same.
 * @param {string} token
 * @param {number} [most] characters
 */
export function spelled(token, most = 24) {
  const seen = token.slice(0, 400).replace(ODD, (c) => MARKS[c] ?? escaped(/** @type {number} */ (c.codePointAt(0))));
  const counted = seen.replace(BACKSLASHES, "$&$&").replace(/ {4,}(?![ \d])/g, (run) => "␣×" + run.length);
  const marked = counted.replace(/^ +| +$|  +/g, (run) => "␣".repeat(run.length)).replaceAll("\0", "\\");
  const shown = [...marked];
  return (shown[most] ? `${shown.slice(0, most - 1).join("")}…` : marked) || "∅";
}

/** A token as the name of a row or a column: without its outer spaces, unless it is nothing else. @param {string} token @param {number} [most] */
export const bare = (token, most) => spelled(token.replace(/^ +| +$/g, "") || token, most);

/** With a NUL in place of the backslash. @param {number} code */
const escaped = (code) => {
  const width = code < 0x100 ? 2 : code < 0x10000 ? 4 : 8;
  return `\0${"xuU"[width >> 2]}${code.toString(16).padStart(width, "0")}`;
};

/** What a map has of a key; it is made where there is nothing yet. @template K, V @param {{get(key: K): V | undefined, set(key: K, value: V): any}} map @param {K} key @param {() => V} make @returns {V} */
export function kept(map, key, make) {
  const known = map.get(key) ?? make();
  map.set(key, known);
  return known;
}

/** [each(0), …, each(size − 1)]. @template T @param {number} size @param {(at: number) => T} each */
export const listOf = (size, each) => Array.from({ length: size }, (_, index) => each(index));

/**
 * Where the largest numbers stand, the first of equals first; NaN is left out.
 * @param {ArrayLike<number>} values @param {number} count @param {number} [least]      only larger ones count
 */
export function largest(values, count, least = -Infinity) {
  /** @type {number[]} */
  const best = [];
  for (let index = 0; index < values.length; index++) {
    const x = values[index];
    if (!(x > least) || (best.length === count && x <= values[best[count - 1]])) continue;
    const place = best.findIndex((other) => values[other] < x);
    best.splice(place < 0 ? best.length : place, 0, index);
    best.length = Math.min(best.length, count);
  }
  return best;
}

/** Where the largest of these numbers stands. @param {number[]} list */
export const largestAt = (list) => list.reduce((most, x, index) => (x > list[most] ? index : most), 0);

const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]/;

/** A token inside a sentence: isolated where it is written from right to left, so that it does not turn its neighbours. @param {string} text */
export const isolated = (text) => (RIGHT_TO_LEFT.test(text) ? `\u2068${text}\u2069` : text);
