// What made an answer: the heads that carry it, run again. A head that is pointed at, or chosen, draws its edges in the
// text; all numbers are in tables below, folded.

import { columnHead, h, table, tableRow, write } from "./dom.js";
import { drawArcs } from "./long/text.js";
import { looksOf } from "./long/grid.js";
import { bare, filled, fmt, isolated, percent, short, spelled, withSign } from "./numbers.js";

/** @typedef {{layer: number, head: number, query?: number, key?: number, weight: number, effect: number, truth: number, share: number, edge?: any}} Effect */

const signed = (/** @type {number} */ x) => withSign(x, short);
const largest = (/** @type {number[]} */ list) => Math.max(...list.map(Math.abs)) || 1;
const FACTS = ["share", "effect"]; // of a part; null where it was not run
const factOf =
  (/** @type {any} */ why, /** @type {any} */ { hidden, effect }) =>
  (/** @type {string} */ name) =>
    name === "share" ? hidden !== null && thenOf(why, hidden) : effect !== null && signed(effect);

/** How likely the answer is where its number changes by that, as the terminal says it; of two, how many times as likely. @param {any} why @param {number} change */
export function thenOf({ value, many, compared }, change) {
  const y = Math.min(value + change, 700);
  const times = Math.exp(y);
  const fixed = [2, 1, 0].map((places) => times.toFixed(places)).find((text) => text.length < 10);
  if (compared) return `${times < 0.095 ? fmt(times, 2) : (fixed ?? times.toExponential(3).replace("+", ""))}×`;
  return percent(Math.exp(-Math.log1p(Math.exp(-y)) / many));
}

/** Its text, and what stands in place of the text's first token. @param {any} part */
const nameOf = ({ text, replaced }) => h("bdi", bare(text, 60), replaced && ` → ${spelled(replaced)}`);

/** Blue where it spoke for the token, orange where against it; by the square root. @param {number} x @param {number} most */
function tint(x, most) {
  const part = 45 * Math.sqrt(Math.abs(x) / most);
  return { background: `color-mix(in srgb, var(--${x > 0 ? "query" : "key"}) ${part}%, var(--paper))` };
}

/** The sentences, with the names of the tokens in them; nothing where the page holds no causes. @param {Page} page @param {Shell} shell @returns {Record<string, string>} */
export function wordsOf({ header: { why, tokens } }, shell) {
  const spoken = (/** @type {string} */ text) => isolated(bare(text));
  if (!why) return {};
  const texts = {
    token: spoken(why.token.text),
    answer: isolated(bare(why.answer, 200)),
    against: spoken(why.against.text),
    rival: spoken(why.rival ?? why.against.text),
    first: `0 ${spoken(tokens[0])}`,
  };
  const words = Object.entries(/** @type {Record<string, string>} */ (why.words[shell.language()]));
  return Object.fromEntries(words.map(([key, text]) => [key, filled(text, { head: "{head}", ...texts })]));
}

/**
 * The tables, the second one folded.
 * @param {Page} page @param {Shell} shell @param {Place} place @param {Answer} answer
 */
export function causesRoom(page, shell, place, answer) {
  const { why, tokens, runs } = page.header;
  const words = wordsOf(page, shell);
  const { layers } = runs[0];
  const query = tokens.length - 1;
  /** @param {number} layer      its place @param {number} head @param {Partial<Chosen>} [edge] */
  const choose = (layer, head, edge) => {
    const inText = Number(edge?.query) <= query && edge; // the answer's further tokens have no rows here
    place.choose("", { run: 0, layer, head, query, key: -1, ...inText });
  };
  answer.arcs = (layer, head) => {
    const cut = (/** @type {number} */ key) => (choose(layer, head), place.live?.cut(key, query));
    drawArcs(answer.text, query, looksOf(page)?.heads[layer][head] ?? [], place.live && cut);
  };
  const { carried, folded } = tablesOf(page, words, layers, choose, answer);
  Object.assign(answer, { drawn: () => answer.show(), legend: words.shading });
  answer.point = (token) => {
    const part = why.parts.findLast((/** @type {any} */ each) => each.tokens.includes(token));
    if (!part) return answer.show();
    const facts = FACTS.map((name) => [words[name], factOf(why, part)(name)]).filter(([, fact]) => fact);
    write(answer.caption, `${nameOf(part).textContent}: ${facts.map((each) => each.join(" ")).join(" · ")}`);
  };
  folded.append(h("p.aside", words.lead));
  return [carried, folded];
}

/**
 * The heads that carry it; and folded, the parts of the text, the edges, and what the numbers are.
 * @param {Page} page @param {Record<string, string>} words @param {Layer[]} layers @param {(layer: number, head: number, edge?: Partial<Chosen>) => void} choose
 * @param {Answer} answer
 */
function tablesOf({ header: { why } }, words, layers, choose, answer) {
  const name = (/** @type {number} */ i) => h("bdi", spelled(why.tokens[i], 14));
  const ends = (/** @type {Effect} */ edge) => [name(Number(edge.query)), " ← ", name(Number(edge.key))];
  /** A row about a head or an edge, which a click chooses. @param {Effect} effect @param {Child[]} cells */
  const rowOf = ({ layer: number, head, query, key }, cells) => {
    const layer = layers.findIndex((each) => each.name === String(number));
    const onclick = () => choose(layer, head, key === undefined ? {} : { query, key });
    const row = tableRow(h("button", { onclick, onfocus: () => answer.show(layer, head) }, `${number}.${head}`), cells);
    row.addEventListener("pointerenter", () => answer.show(layer, head));
    row.addEventListener("pointerleave", () => answer.show());
    return row;
  };
  /** @param {string} title @param {Effect[]} list @param {(effect: Effect) => Child[]} cells @param {string[]} columns */
  const block = (title, list, columns, cells) => {
    const most = largest(list.map(({ truth }) => truth));
    const last = (/** @type {Effect} */ { truth }) => h("td", { style: tint(-truth, most) }, thenOf(why, truth));
    const rows = list.map((effect) => rowOf(effect, [...cells(effect), last(effect)]));
    return h("section.block", h("h2", title), h("div.pan", table("table", columns.map(columnHead), rows)));
  };
  const weight = (/** @type {number} */ x) => (x < 0.001 ? fmt(x, 1) : x.toFixed(3));
  const { head, ends: edge, weight: a, effect, share: then, off, without } = words;
  const looks = (/** @type {Effect} */ one) => [h("td", ends(one)), weight(one.weight)];
  const carried = block(words.carried, why.heads, [head, edge, a, without, off], ({ edge: one }) =>
    one ? [...looks(one), thenOf(why, one.truth)] : ["", "", ""],
  );
  carried.classList.add("carried");
  const edges = block(words.edges, why.edges, [head, edge, a, without], looks);
  const parts = why.parts.map((/** @type {any} */ part) => tableRow(nameOf(part), FACTS.map(factOf(why, part))));
  const columns = [words.part, then, effect].map(columnHead);
  const folded = h(
    "details.fold",
    h("summary", words.numbers),
    h("div.hold", h("section.block", h("h2", words.parts), h("div.pan", table("table", columns, parts))), edges),
    h("p.aside", words.exact, " ", words.gap, " ", words.kept),
  );
  return { carried, folded };
}
