// The tour: eight stops from the tokens to the next word. Each brings the page's own figure into view, says what happens
// there with the numbers of the chosen query and key, and offers the one change that teaches it.

import { parts, toStop } from "./address.js";
import { add, byId, h } from "./dom.js";
import { headOf } from "./head.js";
import { unchanged } from "./model/attention.js";
import { bare, fmt, largest, largestAt, listOf, percent } from "./numbers.js";
import { openStep } from "./section.js";
import { explained } from "./terms.js";
import { lettered } from "./written.js";

/** The stops, each with what it offers: another place, or a change of the run, which only a page with its model makes. @type {[string, (now: Said) => Partial<Chosen> | Partial<Change> | false][]} */
const STOPS = [
  ["text", ({ n, struck }) => n > 1 && { hidden: [struck] }],
  ["qkv", ({ heads, other }) => heads > 1 && { head: other, key: -1 }],
  ["scores", ({ i }) => i > 0 && { query: i - 1, key: -1 }],
  ["scaled", () => ({ scale: "none" })],
  ["masked", () => ({ causal: false })],
  ["weights", () => ({ over: "columns" })],
  ["heads", ({ at, i, j }) => ({ cuts: [[...at, i, j]] })],
  ["output", ({ at }) => ({ off: [at] })],
];
/** By key, or by button: where from here. @type {Record<string, number>} */
const MOVES = { ["ArrowLeft"]: -1, ["ArrowRight"]: 1, ["Escape"]: -Infinity };

/** @typedef {ReturnType<typeof numbersOf>} Said */

/** @param {number[]} places @param {(place: number) => string} each */
const sum = (places, each) => places.map(each).join(" + ");

/** The present run's numbers, as the sentences of the stops name them. @param {Page} page @param {Chosen} chosen */
function numbersOf(page, chosen) {
  const { tokens, layers, facts, arrays } = page.header;
  const layer = layers[chosen.layer];
  const { n, m, dk, dv, ...head } = headOf(page, layer, 0, chosen.head);
  const i = chosen.query < 0 ? n - 1 : chosen.query;
  const row = listOf(m, (j) => head.weights(i, j));
  const j = chosen.key < 0 ? largestAt(row) : chosen.key;
  const seen = listOf(m, (key) => key).filter((key) => head.visible(i, key));
  const name = (/** @type {number} */ token) => bare(tokens[token] ?? "", 14);
  const begin = (/** @type {Cell} */ x, /** @type {number} */ of) => `[${fmt(x(of, 0), 2)}, ${fmt(x(of, 1), 2)}, …]`;
  const factor = (/** @type {number} */ x) => (x < 0 ? `(${fmt(x)})` : fmt(x));
  const products = listOf(dk, (c) => Math.abs(head.q(i, c) * head.k(j, c)));
  const raw = seen.map((key) => Math.exp(head.scores(i, key) - head.scores(i, j)));
  const [next, share] = facts.next?.[0] ?? ["", 0];
  const struck = largestAt(row.map((x, key) => (key === i ? -1 : x))); // other than the query itself
  return {
    ...{ i, j, n, m, struck, at: /** @type {[number, number]} */ ([chosen.layer, chosen.head]), layer: layer.number },
    ...{ head: chosen.head, other: (chosen.head + 1) % layer.heads, heads: layer.heads, layers: layers.length },
    ...{ ["d_k"]: dk, ["d_v"]: dv, ["d_model"]: arrays[layer.arrays.x]?.shape.at(-1) ?? "d_model", name },
    ...{ query: name(i), key: name(j), before: name(i - 1), cells: n * m, seen: seen.length },
    ...{ q: begin(head.q, i), k: begin(head.k, j), o: begin(head.output, i) },
    ...{ score: fmt(head.scores(i, j)), scaled: fmt(head.scaled(i, j)), logit: fmt(head.masked(i, j)) },
    ...{ sum: fmt(Math.exp(head.logsumexp(i, j))), weight: percent(row[j]) },
    tokens: listOf(Math.min(n, 12), name).join(", ") + (n > 12 ? ", …" : ""),
    products: sum(largest(products, 2), (c) => `${factor(head.q(i, c))} · ${factor(head.k(j, c))}`),
    rank: raw.filter((x) => x > 1).length + 1,
    unscaled: percent(1 / raw.reduce((a, b) => a + b, 0)),
    hidden: listOf(n * m, (cell) => head.visible(Math.floor(cell / m), cell % m)).filter((sees) => !sees).length,
    mix: sum(largest(row, 3, 0.005), (key) => `${percent(row[key])} ${name(key)}`),
    next: `“${bare(next, 14)}” (${percent(share)})`,
    weightOf: (/** @type {number[]} */ [query, key]) => percent(head.weights(query, key)),
  };
}

/** Scrolls to a stop's figure. @param {number} stop @param {ScrollBehavior} [behavior] */
function bring(stop, behavior) {
  for (const each of document.querySelectorAll(".toured")) each.classList.remove("toured");
  const figure = stop < 0 ? null : stop ? byId(`step-${STOPS[stop][0]}`) : document.querySelector(".answered");
  figure?.classList.add("toured");
  (figure?.querySelector("figure") ?? figure)?.scrollIntoView({ behavior });
}

/** What a stop offers, or what its change has done. @param {string} id @param {any} offer @param {Said} now @param {Said | null} before @param {Say} t @param {(words: string) => Child} button */
function thenOf(id, offer, now, before, t, button) {
  const edge = id === "masked" && now.n > 1 ? [0, 1] : [now.i, before?.j ?? now.j]; // the last row sees all keys as it is
  const names = { query: now.name(edge[0]), key: now.name(edge[1]), struck: now.name(now.struck) };
  if (!before) return offer && [t("tour try"), button(t(`offer ${id}`, { ...now, ...names }))];
  const weights = { ...names, weight: before.weightOf(edge), weightNow: now.weightOf(edge) };
  const then = t("tour then", { next: before.next, nextNow: now.next });
  return [id !== "output" && t("tour weight", weights), " ", then, button(t("as it was"))];
}

/** @param {Page} page @param {Place} place */
export function openTour(page, place) {
  const { chosen, live } = place;
  /** @type {Shell} */
  let shell;
  let stop = -1; // −1: no tour
  /** @type {Said | null} */
  let before = null; // without the stop's change, once that is made
  const onkeydown = (/** @type {KeyboardEvent} */ event) => {
    if (!MOVES[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    move(MOVES[event.key]);
  };
  const [title, says, then, moves] = [h("h2", { id: "tour", tabindex: -1 }), h("p"), h("p"), h("div.moves")];
  const named = { hidden: true, "aria-labelledby": "tour", onkeydown };
  const card = h("section.tour", named, title, says, then, moves);

  const show = () => {
    const [{ t }, { arrays }] = [shell, page.header.layers[chosen.layer]];
    if (stop < 0 || !["q", "k", "v"].every((name) => page.array(arrays[name]))) return; // until they are unpacked
    const [[id, offerOf], now] = [STOPS[stop], numbersOf(page, chosen)];
    const offer = offerOf(now);
    const ofPlace = id === "qkv" || id === "scores";
    const onclick = () => {
      if (ofPlace) return place.choose("", /** @type {Partial<Chosen>} */ (offer));
      before = before ? null : now;
      live?.change?.({ ...unchanged(), ...(before && /** @type {Partial<Change>} */ (offer)) });
    };
    const button = (/** @type {string} */ words) => [" ", h("button", { id: "tour-try", onclick }, words)];
    const focused = then.contains(document.activeElement);
    for (const each of [title, says, then]) each.replaceChildren();
    add(title, lettered(t("tour of", { stop: stop + 1, count: STOPS.length, name: t(`stop ${id}`) })));
    add(says, explained(t(`says ${id}`, before ?? now), t));
    add(then, thenOf(id, (live?.change || ofPlace) && offer, now, before, t, button));
    if (focused) byId("tour-try")?.focus({ preventScroll: true });
  };

  const go = (/** @type {number} */ to) => {
    if (to >= STOPS.length) return;
    if (before) live?.change?.(unchanged());
    [stop, before] = [Math.max(-1, to), null];
    card.hidden = stop < 0;
    document.body.classList.toggle("touring", stop >= 0);
    if (stop > 0) openStep(STOPS[stop][0]);
    bring(stop);
    toStop(stop < 0 ? null : stop + 1);
    show();
    (stop < 0 ? start : title).focus({ preventScroll: true });
  };
  const move = (/** @type {number} */ by) => (stop + by === -1 ? undefined : go(stop + by));
  const start = h("button", { onclick: () => go(0) });

  /** Goes to the stop that the address names. */
  const follow = () => {
    const to = Number(parts().get("tour") ?? 0) - 1;
    if (to < 0 || to === stop) return;
    if (document.querySelector(".map [data-step]")) go(to);
    else requestAnimationFrame(follow); // the steps are being unpacked
  };
  addEventListener("hashchange", follow);
  return {
    start,
    /** Draws it anew, in a page of another run or language. @param {Shell} now */
    draw(now) {
      shell = now;
      const { t } = shell;
      start.textContent = t("tour");
      const words = [`← ${t("tour back")}`, `${t("tour on")} →`, t("tour end")];
      const buttons = Object.values(MOVES).map((by, at) =>
        h("button", { onclick: () => move(by), title: t("tour keys") }, words[at]),
      );
      moves.replaceChildren(...buttons);
      if (card.parentNode !== shell.main) shell.main.append(card);
      place.follow("tour", show);
      show();
      if (stop < 0) follow();
      else bring(stop, "instant");
    },
  };
}
