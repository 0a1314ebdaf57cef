// What the runs of a page support, in the terminal's sentences: the parts that are needed, two of which either is enough,
// the head that carries it. The rules are those of explaining/why_words.py.

import { bare, filled } from "../numbers.js";
import { thenOf } from "../causes.js";

const [HALF, NEEDED, TENTH, ENOUGH] = [0.5, 4, 0.1, 0.9];

/** @typedef {{text: string, tokens: number[], hidden: number, replaced: string}} PartRun */

const shareOf = (/** @type {number} */ y) => 1 / (1 + Math.exp(-y));

/**
 * @param {Record<string, string>} said      the sentences of one language
 * @param {any} why      what made the answer: parts, the strongest first, and heads
 * @param {{parts: PartRun[], hidden: number} | null} pair      of parts that stand in for each other
 * @param {number[][]} anywhere      what the logarithm of a token's probability in a neutral text changes by without each head
 */
export function conclusionOf(said, why, pair, anywhere) {
  const { value, compared, parts, heads } = why;
  const say = (/** @type {string} */ key, /** @type {Record<string, string>} */ facts = {}) =>
    filled(said[key], {
      answer: `“${bare(why.answer, 200)}”`,
      other: `“${bare(why.against.text, 40)}”`,
      before: amount(0),
      ...facts,
    });
  const amount = (/** @type {number} */ change) => thenOf(why, change).replace("×", "");
  const left = (/** @type {PartRun} */ { hidden }) =>
    compared ? Math.exp(hidden) : shareOf(value + hidden) / shareOf(value);
  /** Does it take a tenth of the answer's probability or more? */
  const decides = (/** @type {number} */ change) => compared || shareOf(value + change) <= ENOUGH * shareOf(value);
  const inText = [...parts].sort((a, b) => a.tokens[0] - b.tokens[0]);
  const named = (/** @type {PartRun} */ part, plain = false) => {
    const name = bare(part.text, 120);
    const alike = inText.filter(({ text }) => text.toLowerCase() === part.text.toLowerCase());
    if (alike.length > 1)
      return say("repeated", { part: name, place: String(alike.indexOf(part) + 1), count: String(alike.length) });
    return say(part.replaced && !plain ? "replaced part" : "quoted", { part: name });
  };
  const needs = () => {
    const needed = parts.filter((/** @type {PartRun} */ part) => left(part) < HALF);
    const kind = (/** @type {string} */ key) => key + (compared ? " of two" : "");
    if (needed.length) {
      const names = needed.slice(0, NEEDED).map((/** @type {PartRun} */ part) => named(part));
      if (needed[NEEDED]) names.push(say("others", { count: String(needed.length - NEEDED) }));
      const last = names.pop();
      const all = names.length ? say("and", { first: names.join(said.list), last }) : last;
      return say(kind(names.length ? "needs each" : "needs one"), { parts: all });
    }
    const most = parts.reduce((/** @type {PartRun} */ a, /** @type {PartRun} */ b) => (b.hidden < a.hidden ? b : a));
    if (most.hidden >= 0) return say("none");
    const facts = { part: named(most, true), neutral: most.replaced };
    return say(kind("little"), {
      without: say(most.replaced ? "in place" : "without it", facts),
      after: amount(most.hidden),
    });
  };
  const carries = () => {
    const takes = (/** @type {number} */ change) => [-change, compared ? 0 : shareOf(value) - shareOf(value + change)];
    const least = takes(Math.min(0, ...parts.map((/** @type {PartRun} */ { hidden }) => hidden)));
    const order = [...heads].sort((a, b) => a.truth - b.truth);
    const isNeeded = (/** @type {any} */ { layer, head, truth }) => 2 * anywhere[layer][head] <= truth && truth < 0;
    const best = order.find(
      (each) =>
        each.truth < 0 &&
        !isNeeded(each) &&
        takes(each.truth).every((x, i) => x >= TENTH * least[i]) &&
        decides(each.truth),
    );
    const { layer, head } = best ?? order[0];
    return say(best ? "carries" : isNeeded(order[0]) ? "any text" : "no head", { head: `${layer}.${head}` });
  };
  const both =
    pair &&
    say(compared ? "either of two" : "either", {
      first: named(pair.parts[0]),
      second: named(pair.parts[1]),
      after: amount(pair.hidden),
    });
  if (!parts.length) return carries();
  return [say("so", { said: needs() }), both, carries()].filter(Boolean).join(" ");
}
