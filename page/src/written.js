// Sums of products and softmaxes, written out with their numbers.

import { h } from "./dom.js";
import { fmt, largest, listOf, within } from "./numbers.js";

/** @typedef {ReturnType<typeof import("./head.js").computing> & {bound?: (i: number) => number}} Numbered      a head whose numbers the page has; bound: how far its weights may be off */

const MOST = 6;

/** A symbol with indices, in its role's colour. @param {string} letter @param {Child} index @param {string} role */
export const sym = (letter, index, role) =>
  h("span", { class: `sym role-${role}` }, h("var", letter), index === "" ? null : h("sub", index));

/** W^Q with Q as a superscript, alone or in a sentence. @param {string} text @returns {Child} */
export const lettered = (text) =>
  text.split(/\^([−\d.]+|\w)/).map((part, place) => (place % 2 ? h("sup", part) : part));

/** @param {number} x @param {string} [role] @param {number} [digits] */
export const num = (x, role, digits) => h("span", { class: role ? `num role-${role}` : "num" }, fmt(x, digits));

export const bold = (/** @type {number} */ x) => h("b", fmt(x, 5));

/**
 * Σ a·b with its numbers: all terms in order where they are few, else the largest, and the sum of the others.
 * @param {object} given @param {Child} given.name @param {Child} given.symbols
 * @param {[number, number][]} given.terms @param {[string, string]} given.roles
 * @param {number} [given.plus]      a bias
 * @param {number} given.total @param {Say} given.t
 */
export function sumOfProducts({ name, symbols, terms, roles, plus, total, t }) {
  const products = terms.map(([a, b]) => a * b);
  const places = terms.length > MOST ? largest(products.map(Math.abs), MOST - 1) : [...terms.keys()];
  const rest = products.reduce((sum, product, place) => (places.includes(place) ? sum : sum + product), 0);
  /** @type {Child[]} */
  const parts = places.map((at, place) => {
    const [a, b] = terms[at];
    const [sign, first] = place === 0 ? ["", a] : a < 0 ? [" − ", -a] : [" + ", a];
    return [sign, h("span.term", num(first, roles[0]), "·", b < 0 ? ["(", num(b, roles[1]), ")"] : num(b, roles[1]))];
  });
  if (terms.length > MOST)
    parts.push(" + ", h("span.more", t("more", { count: terms.length - MOST + 1, sum: fmt(rest) })));
  if (plus !== undefined) parts.push(plus < 0 ? " − " : " + ", num(Math.abs(plus), "plain"));
  return [name, " = ", symbols, " = ", parts.length ? parts : "0", " = ", bold(total)];
}

/** Whether scores are divided by √d_k. @param {Numbered} head */
export const isRoot = ({ rules, dk }) => Math.abs(rules.scale * Math.sqrt(dk) - 1) < 1e-6;

/** e to the power of a number. @param {Child} power */
const exp = (power) => h("span.term", "e", h("sup", power));

/** Σ e^m below a weight: the keys one by one where they are few, else their log-sum-exp. @param {Numbered} head @param {number} i @param {number} j */
function sumBelow({ m, masked, visible, logsumexp, rules: { sink, over } }, i, j) {
  const seen = listOf(m, (key) => key).filter((key) => visible(i, key));
  if (seen.length > MOST || over !== "rows" || sink !== -Infinity) return exp(fmt(logsumexp(i, j)));
  return ["(", seen.map((key, place) => [place ? " + " : "", exp(fmt(masked(i, key)))]), ")"];
}

const LETTERS = { scaled: "s′", capped: "c", biased: "b", masked: "m", weights: "a" };

/**
 * What a step makes of a score, with its numbers.
 * @param {Numbered} head @param {string} step      of LETTERS @param {number} i @param {number} j @param {Say} t @param {string} [index] @returns {Child[]}
 */
export function changed(head, step, i, j, t, index = `${i},${j}`) {
  const { rules, dk, scores, scaled, capped, biased, masked, visible, weights, bound } = head;
  const cap = fmt(rules.softcap ?? 0);
  const more = biased(i, j) - capped(i, j);
  /** @param {number} x @param {Child[]} made */
  const line = (x, ...made) => [
    ...[
      sym(LETTERS[/** @type {keyof typeof LETTERS} */ (step)], index, "weights"),
      " = ",
      made,
      made.length ? " = " : "",
    ],
    bound && step === "weights" ? h("b", within(x, x * bound(i))) : bold(x),
  ];
  if (step === "scaled")
    return line(scaled(i, j), num(scores(i, j)), isRoot(head) ? ` / √${dk}` : [" · ", fmt(rules.scale, 5)]);
  if (step === "capped") return line(capped(i, j), `${cap}·tanh(`, num(scaled(i, j)), ` / ${cap})`);
  if (step === "biased") return line(biased(i, j), num(capped(i, j)), more < 0 ? " − " : " + ", num(Math.abs(more)));
  if (!visible(i, j)) return [...line(step === "masked" ? -Infinity : 0), ` (${t("masked cell")})`];
  if (step === "weights") return line(weights(i, j), exp(fmt(masked(i, j))), " / ", sumBelow(head, i, j));
  const warm = rules.temperature !== 1;
  return line(masked(i, j), ...(warm ? [num(biased(i, j)), " / ", fmt(rules.temperature)] : []));
}

/** A weight's rank in its row, and what the row sums to. @param {Numbered} head @param {number} i @param {number} j @param {Say} t */
export function rankOf({ m, rules: { sink, over }, visible, weights, logsumexp }, i, j, t) {
  if (!visible(i, j) || over !== "rows") return null;
  const row = listOf(m, (key) => key)
    .filter((key) => visible(i, key))
    .map((key) => weights(i, key));
  const rank = row.filter((weight) => weight > weights(i, j)).length + 1;
  const sum = fmt(
    row.reduce((total, weight) => total + weight, 0),
    6,
  );
  const rest = sink === -Infinity ? "" : t("to the sink", { share: fmt(Math.exp(sink - logsumexp(i))) });
  return [h("br"), h("span.aside", t("rank", { rank, of: row.length, sum }), rest)];
}
