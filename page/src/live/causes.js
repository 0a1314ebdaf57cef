// What made the answer of a run in this page: each word hidden, each head off in the row that answers, and the strongest edge of the heads that did
// most cut, in runs of their own. It has the form of the record's causes.

import { breathe } from "../dom.js";
import { largestAt } from "../numbers.js";
import { likeliest, sharesOf } from "../model/forward.js";

const [CARRIED, OTHERS] = [8, 4]; // heads that are listed, words that the answer may be compared with

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
 * @param {{run: (ids: number[], change: Change) => {logits: Float32Array, layers: LayerRun[]}, text: (id: number) => string, neutral: number}} model
 * @param {number[]} ids @param {Change} change @param {Asked} asked
 * @param {any} record      the page's own causes: their sentences
 * @param {(asked: Asked) => void} ask @param {() => boolean} still      whether this is still what is shown
 */
export async function causesOf({ run, text, neutral }, ids, change, asked, record, ask, still) {
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
  for (const tokens of wordsIn(names)) {
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
  const of = (/** @type {number} */ id) => ({ id, text: text(id), probability: shares[id], logit: logits[id] });
  const others = best.filter((id) => id !== token).slice(0, OTHERS);
  const { words } = record.numbers[against === null ? 0 : 1] ?? record;
  const alone = record.numbers[1]?.words ?? words;
  const said = (/** @type {Language} */ each) => ({ ...words[each], gap: alone[each].gap, so: "", lead: "", kept: "" });
  return {
    ...{ heads: carried, grid, edges: carried.map(({ edge }) => edge), tokens: names, turns: [], sink: record.sink },
    ...{ token: of(token), against: of(against ?? others[0]), answer: text(token) },
    parts: parts.sort((a, b) => Math.abs(b.hidden) - Math.abs(a.hidden)),
    by_token: names.map((_, i) => {
      const part = parts.find(({ tokens }) => tokens.includes(i));
      return -part.hidden / part.tokens.length;
    }),
    numbers: [null, ...others].map((id) => ({ name: id === null ? "" : text(id), id })),
    chosen: 1 + others.indexOf(against ?? -1),
    ask: (/** @type {number | null} */ id) => ask({ token, against: id }),
    words: { ["en"]: said("en"), ["zh"]: said("zh") },
  };
}
