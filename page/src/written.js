// Sums of products and softmaxes, written out with their numbers.

import { h } from "./dom.js";
import { fmt } from "./numbers.js";

/** @typedef {ReturnType<typeof import("./head.js").computing>} Numbered      a head whose numbers the page has */

const MOST = 6;

/** A symbol with indices, in its role's colour. @param {string} letter @param {Child} index @param {string} role */
export const sym = (letter, index, role) =>
  h("span", { class: `sym role-${role}` }, h("var", letter), index === "" ? null : h("sub", index));

/** W^Q with Q as a superscript, alone or in a sentence. @param {string} text @returns {Child} */
export const lettered = (text) =>
  text.split(/\^([−\d.]+|\w)/).map((part, place) => (place % 2 ? h("sup", part) : part));

/** @param {number} x @param {string} [role] @param {number} [digits] */
export const num = (x, role, digits) => h("span", { class: role ? `num role-${role}` : "num" }, fmt(x, digits));

/**
 * Σ a·b with its numbers: all terms in order where they are few, else the largest, and the sum of the others.
 * @param {object} given @param {Child} given.name @param {Child} given.symbols
 * @param {[number, number][]} given.terms @param {[string, string]} given.roles
 * @param {number} [given.plus]      a bias
 * @param {number} given.total @param {(count: number, sum: string) => string} given.more
 */
export function sumOfProducts({ name, symbols, terms, roles, plus, total, more }) {
  let shown = terms;
  let rest = 0;
  if (terms.length > MOST) {
    const order = [...terms.keys()].sort(
      (a, b) => Math.abs(terms[b][0] * terms[b][1]) - Math.abs(terms[a][0] * terms[a][1]) || a - b,
    );
    shown = order.slice(0, MOST - 1).map((place) => terms[place]);
    rest = order.slice(MOST - 1).reduce((sum, place) => sum + terms[place][0] * terms[place][1], 0);
  }
  /** @type {Child[]} */
  const parts = shown.map(([a, b], place) => {
    const [sign, first] = place === 0 ? ["", a] : a < 0 ? [" − ", -a] : [" + ", a];
    return [sign, h("span.term", num(first, roles[0]), "·", b < 0 ? ["(", num(b, roles[1]), ")"] : num(b, roles[1]))];
  });
  if (terms.length > MOST) parts.push(" + ", h("span.more", more(terms.length - MOST + 1, fmt(rest))));
  if (plus !== undefined) parts.push(plus < 0 ? " − " : " + ", num(Math.abs(plus), "plain"));
  return [name, " = ", symbols, " = ", parts.length ? parts : "0", " = ", h("b", fmt(total, 5))];
}

/** Whether scores are divided by √d_k. @param {Numbered} head */
export const isRoot = ({ rules, dk }) => Math.abs(rules.scale * Math.sqrt(dk) - 1) < 1e-6;

/** What a rule makes of a score, with its numbers. @param {Numbered} head @param {string} rule      scaled, capped, biased or masked: divided by the temperature @param {number} i @param {number} j @returns {Child} */
export function changed(head, rule, i, j) {
  const { rules, dk, scores, scaled, capped, biased } = head;
  const cap = fmt(rules.softcap ?? 0);
  if (rule === "scaled") return [num(scores(i, j)), isRoot(head) ? ` / √${dk}` : [" · ", fmt(rules.scale, 5)]];
  if (rule === "capped") return [`${cap}·tanh(`, num(scaled(i, j)), ` / ${cap})`];
  if (rule === "masked") return [num(biased(i, j)), " / ", fmt(rules.temperature)];
  const more = biased(i, j) - capped(i, j);
  return [num(capped(i, j)), more < 0 ? " − " : " + ", num(Math.abs(more))];
}

/** a = e^m / Σ e^m with its numbers. @param {Story} s @param {number} i @param {number} j */
export function softmaxOf({ head, indices, t }, i, j) {
  const name = sym("a", indices(i, j), "weights");
  if (!head.visible(i, j)) return [name, " = 0: ", t("masked cell")];
  const seen = [];
  for (let key = 0; key < head.m; key++) if (head.visible(i, key)) seen.push(key);
  const power = (/** @type {number} */ x) => h("span.term", "e", h("sup", fmt(x)));
  const { sink, over } = head.rules;
  const below =
    seen.length <= MOST && over === "rows" && sink === -Infinity
      ? ["(", seen.map((key, place) => [place ? " + " : "", power(head.masked(i, key))]), ")"]
      : power(head.logsumexp(i, j));
  const parts = [name, " = ", power(head.masked(i, j)), " / ", below, " = ", h("b", fmt(head.weights(i, j), 5))];
  if (over !== "rows") return parts;
  const rank = seen.filter((key) => head.weights(i, key) > head.weights(i, j)).length + 1;
  const sum = seen.reduce((total, key) => total + head.weights(i, key), 0);
  const rest = sink === -Infinity ? "" : t("to the sink", { share: fmt(Math.exp(sink - head.logsumexp(i)), 4) });
  return [parts, h("br"), h("span.aside", t("rank", { rank, of: seen.length, sum: fmt(sum, 6) }), rest)];
}
