// What made the answer of a run in this page: each word hidden, each head off in the row that answers, and the strongest edge of the heads that did
// most cut, in runs of their own. It has the form of the record's causes.

import { breathe } from "../dom.js";
import { largestAt } from "../numbers.js";
import { likeliest, sharesOf } from "../model/forward.js";
import { conclusionOf } from "./conclusion.js";

const [CARRIED, OTHERS, PAIR] = [8, 4, 0.25]; // heads that are listed, words that the answer may be compared with, what two parts change of what all do

/** @typedef {{token: number | null, against: number | null}} Asked      numbers of tokens; null: the likeliest, and any other */

/** The logit of a token's probability, or its lead over another. @param {Float32Array} logits @param {number} token @param {number | null} against */
function valueOf(logits, token, against) {
  if (against !== null) return logits[token] - logits[against];
  const most = logits.reduce((a, b) => Math.max(a, b));
  const others = logits.reduce((sum, x, id) => (id === token ? sum : sum + Math.exp(x - most)), 0);
  return logits[token] - most - Math.log(others);
}

/** The tokens of each word. @param {string[]} names */
function wordsIn(names) {
  /** @type {number[][]} */
  const words = [];
  names.forEach((name, token) =>
    token && /^\S/.test(name) ? words[words.length - 1].push(token) : words.push([token]),
  );
  return words;
}

/**
 * Two parts that say the same and stand in for each other: without both much more changes than by each alone.
 * @param {any[]} parts @param {(tokens: number[]) => Promise<number>} hide      what hiding these changes @param {number} n
 */
async function pairIn(parts, hide, n) {
  const isLike = (/** @type {any} */ a, /** @type {any} */ b) => a.text.toLowerCase() === b.text.toLowerCase();
  const alike = parts.flatMap((a, at) => parts.slice(at + 1).flatMap((b) => (isLike(a, b) ? [[a, b]] : [])));
  if (!alike.length) return null;
  const least = PAIR * Math.abs(await hide([...Array(n - 1).keys()]));
  const found = [];
  for (const pair of alike.slice(0, OTHERS)) {
    pair.sort((a, b) => a.tokens[0] - b.tokens[0]);
    const hidden = await hide(pair.flatMap(({ tokens }) => tokens));
    const alone = pair.reduce((sum, part) => sum + Math.abs(part.hidden), 0);
    if (Math.abs(hidden) > Math.max(2 * alone, least)) found.push({ parts: pair, hidden });
  }
  return found.sort((a, b) => Math.abs(b.hidden) - Math.abs(a.hidden))[0] ?? null;
}

/**
 * @param {{run: (ids: number[], change: Change) => {logits: Float32Array, layers: LayerRun[]}, text: (id: number) => string, neutral: number, said: Record<Language, Record<string, string>>, anywhere: number[][]}} model
 * @param {number[]} ids @param {Change} change @param {Asked} asked
 * @param {any} record      the page's own causes: their sentences
 * @param {(asked: Asked) => void} ask @param {() => boolean} still      whether this is still what is shown
 */
export async function causesOf({ run, text, neutral, said, anywhere }, ids, change, asked, record, ask, still) {
  const [{ logits, layers }, names, n] = [run(ids, change), ids.map(text), ids.length];
  const best = likeliest(logits, OTHERS + 2).map(({ id }) => id);
  const [token, { against }] = [asked.token ?? best[0], asked];
  const shares = sharesOf(logits);
  const base = valueOf(logits, token, against);
  /** What a change more makes of the answer. @param {Partial<Change>} more */
  const rerun = async (more) => {
    await breathe();
    const now = still() ? run(ids, { ...change, ...more }).logits : logits;
    return { truth: valueOf(now, token, against) - base, share: sharesOf(now)[token] };
  };
  /** @type {any[]} */
  const parts = [];
  for (const tokens of wordsIn(names.slice(0, -1))) {
    // the last token answers
    const { truth, share } = await rerun({ hidden: [...change.hidden, ...tokens] });
    const said = tokens.map((i) => names[i]).join("");
    const replaced = tokens[0] ? "" : text(neutral);
    parts.push({ text: said.trim(), tokens, hidden: truth, share, effect: null, replaced });
  }
  /** @type {any[]} */
  const heads = [];
  for (const [layer, { heads: all }] of layers.entries())
    for (const head of all.keys())
      heads.push({ layer, head, ...(await rerun({ off: [...change.off, [layer, head, n - 1]] })) });
  const grid = layers.map((_, at) => heads.filter(({ layer }) => layer === at).map(({ truth }) => -truth));
  const carried = heads.sort((a, b) => Math.abs(b.truth) - Math.abs(a.truth)).slice(0, CARRIED);
  for (const each of carried) {
    const row = layers[each.layer].heads[each.head].weights.subarray((n - 1) * n);
    const [key, query] = [largestAt(/** @type {any} */ (row)), n - 1];
    const { layer, head } = each;
    const after = await rerun({ cuts: [...change.cuts, [layer, head, query, key]] });
    each.edge = { layer, head, query, key, weight: row[key], ...after };
  }
  const pair = await pairIn(parts, async (tokens) => (await rerun({ hidden: [...change.hidden, ...tokens] })).truth, n);
  const others = best.filter((id) => id !== token).slice(0, OTHERS);
  const { words } = record.numbers[against === null ? 0 : 1] ?? record;
  const alone = record.numbers[1]?.words ?? words;
  parts.sort((a, b) => Math.abs(b.hidden) - Math.abs(a.hidden));
  const of = (/** @type {number} */ id) => ({ id, text: text(id), probability: shares[id], logit: logits[id] });
  const found = {
    ...{ value: base, many: 1, compared: against !== null, ran: true, answer: text(token) },
    ...{ parts, heads: carried, token: of(token), against: of(against ?? others[0]) },
  };
  const spoken = (/** @type {Language} */ each) => ({
    ...{ ...words[each], gap: alone[each].gap, lead: "", kept: "" },
    so: conclusionOf(said[each], found, pair, anywhere),
  });
  return {
    ...found,
    ...{ grid, edges: carried.map(({ edge }) => edge), tokens: names, turns: [], sink: record.sink },
    by_token: names.map((_, i) => {
      const part = parts.find(({ tokens }) => tokens.includes(i));
      return part ? -part.hidden / part.tokens.length : 0;
    }),
    numbers: [null, ...others].map((id) => ({ name: id === null ? "" : text(id), id })),
    chosen: 1 + others.indexOf(against ?? -1),
    ask: (/** @type {number | null} */ id) => ask({ token, against: id }),
    words: { ["en"]: spoken("en"), ["zh"]: spoken("zh") },
  };
}
