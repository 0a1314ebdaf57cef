// Why an answer follows the text: the text shaded by signed effects, its parts, and the edges and heads that did most;
// each edge and head is a button that opens its place in the steps below.

import { columnHead, h, table, tableRow } from "./dom.js";
import { asRun, isAsRun } from "./head.js";
import { filled, fmt, isolated, short, spelled, withSign } from "./numbers.js";
import { openStep } from "./stepmap.js";

/** @typedef {{layer: number, head: number, query?: number, key?: number, weight: number, effect: number, truth: number}} Effect */

const signed = (/** @type {number} */ x) => withSign(x, short);
const largest = (/** @type {number[]} */ list) => Math.max(...list.map(Math.abs)) || 1;

/** Blue where it helped the token, orange where it helped the other; by the square root. @param {number} x @param {number} [most] */
function tint(x, most = 1) {
  const share = 45 * Math.sqrt(Math.abs(x) / most);
  return { style: { background: `color-mix(in srgb, var(--${x < 0 ? "query" : "key"}) ${share}%, var(--paper))` } };
}

/** The section of causes; none where the page holds none. @param {Story} s @returns {Section[]} */
export function causes(s) {
  const { t, state, page } = s;
  const { why, tokens } = page.header;
  if (!why) return [];
  const words = wordsOf(s);
  /** @type {[HTMLElement, Partial<State>][]} */
  const buttons = [];
  const name = (/** @type {number} */ i) => h("bdi", `${i} ${spelled(tokens[i], 14)}`);
  /** A button for an edge or a head. @param {Effect} effect */
  const opener = ({ layer, head, query, key }) => {
    const place = placeOf(s, layer, head, query, key);
    const label = `${layer}.${head}`;
    const edge = query !== undefined && key !== undefined && [h("small", label), " ", name(query), " ← ", name(key)];
    const button = h("button", { onclick: () => openPlace(s, place) }, edge || label);
    buttons.push([button, place]);
    return button;
  };
  /** @param {string} title @param {Effect[]} list @param {(keyof Effect)[]} columns */
  const block = (title, list, columns) => {
    const ends = list[0]?.key === undefined ? "" : `, ${words.ends}`;
    const heads = [`${t("layer")}.${t("head")}${ends}`, ...columns.map((column) => words[column])].map(columnHead);
    const rows = list.map((effect) => tableRow(opener(effect), cellsOf(effect, list, columns)));
    return h("div.block", h("h3", title), h("div.pan", table("table", heads, rows)));
  };
  const most = largest(why.by_token);
  const shaded = why.by_token.map((/** @type {number} */ x, /** @type {number} */ i) =>
    h("li", tint(-x, most), name(i), h("span.figures", signed(x))),
  );
  const update = () => {
    for (const [button, place] of buttons) {
      const chosen = Object.entries(place).every(([key, to]) => state[/** @type {keyof State} */ (key)] === to);
      button.setAttribute("aria-pressed", String(chosen));
    }
  };
  const legend = h("p.aside", h("span", tint(-1), words.helped), " ", h("span", tint(1), words.hurt), ` ${words.sum}`);
  const edges = block(words.edges, why.edges, ["effect", "truth", "weight"]);
  const heads = block(words.heads, why.heads, ["effect", "truth"]);
  const parts = partsOf(why.parts, words);
  const element = h(
    "section",
    { id: "step-why", class: "step causes", "aria-labelledby": "step-why-title" },
    h("h2", { id: "step-why-title", tabindex: "-1" }, words.title),
    h("p.says", words.lead),
    h("div.block", h("h3", words.tokens), h("ol.tokens", shaded), legend),
    h("p.aside", words.open),
    h("div.hold", parts, h("div", edges, heads)),
    h("p.aside", words.exact, " ", words.gap, " ", words.sink),
  );
  update();
  const still = () => {};
  return [{ id: "why", symbol: t("why"), element, draw: still, stale: () => false, outdate: still, update }];
}

/** The sentences, with the names of the tokens in them. @param {Story} s @returns {Record<string, string>} */
function wordsOf({ page: { header }, shell }) {
  const { why, tokens } = header;
  const spoken = (/** @type {string} */ text) => isolated(spelled(text));
  const texts = { token: spoken(why.token.text), against: spoken(why.against.text), first: `0 ${spoken(tokens[0])}` };
  const words = Object.entries(/** @type {Record<string, string>} */ (why.words[shell.language()]));
  return Object.fromEntries(words.map(([key, text]) => [key, filled(text, texts)]));
}

/** The parts of the text: what each did, and what a run without it gave. @param {any[]} parts @param {Record<string, string>} words */
function partsOf(parts, words) {
  const heads = [words.part, words.effect, words.hidden, words.share].map(columnHead);
  const rows = parts.map(({ text, effect, hidden, share }) =>
    tableRow(
      h("bdi", spelled(text)),
      [effect, hidden, share].map((x, i) => x !== null && (i < 2 ? signed(x) : `${short(100 * x)}%`)),
    ),
  );
  return h("div.block", h("h3", words.parts), h("div.pan", table("table", heads, rows)));
}

/** The numbers of an effect in a table of several. @param {Effect} effect @param {Effect[]} list @param {(keyof Effect)[]} columns */
const cellsOf = (effect, list, columns) =>
  columns.map((column) => {
    const x = Number(effect[column]);
    if (column === "truth") return h("td", tint(x, largest(list.map(({ truth }) => truth))), signed(x));
    const weight = x < 0.001 ? fmt(x, 1) : x.toFixed(3);
    return column === "effect" ? signed(x) : weight;
  });

/** Where the weights of a head or an edge are shown. @param {Story} s @param {number} number      of the layer @param {number} head @param {number} [query] @param {number} [key] @returns {Partial<State>} */
function placeOf({ page: { header } }, number, head, query, key) {
  const layer = header.layers.findIndex((/** @type {any} */ each) => each.number === number);
  return { edited: Boolean(header.edited), head, layer, ...(key === undefined ? {} : { query, key }) };
}

/** @param {Story} s @param {Partial<State>} place */
function openPlace(s, place) {
  s.commit({ key: -1, ...place, ...(isAsRun(s.state.what) ? {} : { what: asRun() }) });
  openStep("weights");
}
