// Why one token and not another follows the text: the text shaded by signed effects, and the edges and heads that did
// most; each is a button that opens its place in the steps below.

import { h } from "./dom.js";
import { asRun, isAsRun } from "./head.js";
import { fmt, isolated, short, spelled } from "./numbers.js";

/** @typedef {{layer: number, head: number, query?: number, key?: number, weight: number, estimate: number, truth: number, rank: number}} Effect */

/** The section of causes; none where the page holds none. @param {import("./story.js").Story} s @returns {import("./section.js").Section[]} */
export function causes(s) {
  const { t, state, page } = s;
  const { why, layers, tokens } = page.header;
  if (!why) return [];
  const spoken = (/** @type {string} */ text) => isolated(spelled(text));
  const last = tokens.length - 1;
  /** @type {Record<string, string>} */
  const texts = {
    token: spoken(why.token.text),
    against: spoken(why.against.text),
    query: `${last} ${spoken(tokens[last])}`,
  };
  /** @type {Record<string, string>} */
  const words = {};
  for (const [key, text] of Object.entries(why.words[s.shell.language()]))
    words[key] = text.replace(/\{(\w+)\}/g, (/** @type {string} */ _, /** @type {string} */ at) => texts[at]);
  const largest = (/** @type {number[]} */ list) => Math.max(...list.map(Math.abs)) || 1;
  const signed = (/** @type {number} */ x) => (x > 0 ? "+" : x < 0 ? "−" : "") + short(Math.abs(x));
  /** Blue where it helped the token, orange where it helped the other; by the square root. @param {number} x @param {number} [most] */
  const tint = (x, most = 1) => ({
    style: {
      background: `color-mix(in srgb, var(--${x < 0 ? "query" : "key"}) ${45 * Math.sqrt(Math.abs(x) / most)}%, var(--paper))`,
    },
  });
  /** @type {[HTMLElement, Record<string, any>][]} */
  const buttons = [];
  const name = (/** @type {number} */ i) => h("bdi", `${i} ${spelled(tokens[i], 14)}`);
  /** A button for an edge or a head: it opens the weights of that head, at that query and key. @param {Effect} effect */
  const opener = ({ layer, head, query, key }) => {
    /** @type {Record<string, any>} */
    const place = { edited: Boolean(page.header.edited), head };
    place.layer = layers.findIndex((/** @type {any} */ each) => each.number === layer);
    if (key !== undefined) Object.assign(place, { query, key });
    const open = () => {
      s.commit({ key: -1, ...place, ...(isAsRun(state.what) ? {} : { what: asRun() }) });
      /** @type {HTMLElement | null} */ (document.querySelector(".map [data-step=weights]"))?.click(); // the bar may be a new one
    };
    const label = `${layer}.${head}`;
    const edge = query !== undefined && key !== undefined && [h("small", label), " ", name(query), " ← ", name(key)];
    const button = h("button", { onclick: open }, edge || label);
    buttons.push([button, place]);
    return button;
  };
  /** @param {string} title @param {Effect[]} list @param {(keyof Effect)[]} columns */
  const table = (title, list, columns) => {
    const most = largest(list.map(({ truth }) => truth));
    const row = (/** @type {Effect} */ effect) =>
      h(
        "tr",
        h("th", { scope: "row" }, opener(effect)),
        columns.map((column) => {
          const x = /** @type {number} */ (effect[column]);
          if (column === "truth") return h("td", tint(x, most), signed(x));
          const weight = x < 0.001 ? fmt(x, 1) : x.toFixed(3);
          return h("td", column === "estimate" ? signed(x) : column === "weight" ? weight : x);
        }),
      );
    const ends = list[0]?.key === undefined ? "" : `, ${words.ends}`;
    const heads = [`${t("layer")}.${t("head")}${ends}`, ...columns.map((column) => words[column])];
    return h(
      "div.block",
      h("h3", title),
      h(
        "div.pan",
        h(
          "table",
          h(
            "thead",
            h(
              "tr",
              heads.map((head) => h("th", { scope: "col" }, head)),
            ),
          ),
          h("tbody", list.map(row)),
        ),
      ),
    );
  };
  const most = largest(why.by_token);
  const shaded = why.by_token.map((/** @type {number} */ x, /** @type {number} */ i) =>
    h("li", tint(x, most), name(i), h("span.figures", signed(x))),
  );
  const update = () => {
    for (const [button, place] of buttons)
      button.setAttribute(
        "aria-pressed",
        String(Object.entries(place).every(([key, to]) => state[/** @type {keyof typeof state} */ (key)] === to)),
      );
  };
  const element = h(
    "section",
    { id: "step-why", class: "step causes", "aria-labelledby": "step-why-title" },
    h("h2", { id: "step-why-title", tabindex: "-1" }, words.title),
    h("p.says", words.lead),
    h(
      "div.block",
      h("h3", words.tokens),
      h("ol.tokens", shaded),
      h("p.aside", h("span", tint(-1), words.helped), " ", h("span", tint(1), words.hurt), ` ${words.sum}`),
    ),
    h("p.aside", words.open),
    h(
      "div.hold",
      table(words.edges, why.edges, ["estimate", "truth", "weight"]),
      h(
        "div",
        table(words.heads, why.heads, ["estimate", "truth"]),
        table(words.alone, why.weights_alone, ["weight", "truth", "rank"]),
      ),
    ),
    h("p.aside", `${words.exact} ${words.agreement}`),
  );
  update();
  const still = () => {};
  return [{ id: "why", symbol: t("why"), element, draw: still, stale: () => false, outdate: still, update }];
}
