// The tour: eight stops from the tokens to the next word. Each brings the page's own figure into view, says what happens
// there with the numbers of the chosen query and key, and offers the one change that teaches it.

import { parts, toStop } from "./address.js";
import { add, byId, h } from "./dom.js";
import { headOf } from "./head.js";
import { unchanged } from "./model/attention.js";
import { bare, fmt, largestAt, listOf, percent } from "./numbers.js";
import { openStep } from "./section.js";
import { explained } from "./terms.js";
import { lettered } from "./written.js";

const STOPS = ["text", "qkv", "scores", "scaled", "masked", "weights", "heads", "output"];
const TIP = "#tip:not([hidden])"; // whose Escape it is first
const OTHERS = "input, select, .figure, .map-of, .heads, .picture"; // which use the arrows themselves
/** @type {Record<string, number>} */
const MOVES = { ["ArrowLeft"]: -1, ["ArrowRight"]: 1, ["Escape"]: -Infinity };

/** The present run's numbers, as the sentences of the stops name them. @param {Page} page @param {Place} place */
function numbersOf(page, { chosen }) {
  const { tokens, layers, facts, arrays } = page.header;
  const layer = layers[chosen.layer];
  const head = headOf(page, layer, 0, chosen.head);
  const { n, m, dk, dv } = head;
  const i = chosen.query < 0 ? n - 1 : chosen.query;
  const row = listOf(m, (j) => head.weights(i, j));
  const j = chosen.key < 0 ? largestAt(row) : chosen.key;
  const seen = listOf(m, (key) => key).filter((key) => head.visible(i, key));
  const name = (/** @type {number} */ token) => bare(tokens[token] ?? "", 14);
  const begin = (/** @type {Cell} */ x, /** @type {number} */ of) => `[${fmt(x(of, 0), 2)}, ${fmt(x(of, 1), 2)}, …]`;
  const terms = listOf(dk, (c) => [head.q(i, c), head.k(j, c)]);
  terms.sort((a, b) => Math.abs(b[0] * b[1]) - Math.abs(a[0] * a[1]));
  const factor = (/** @type {number} */ x) => (x < 0 ? `(${fmt(x)})` : fmt(x));
  const raw = seen.map((key) => Math.exp(head.scores(i, key) - head.scores(i, j)));
  const most = [...row.keys()].filter((key) => row[key] >= 0.005).sort((a, b) => row[b] - row[a]);
  const [next, share] = facts.next?.[0] ?? ["", 0];
  const cells = listOf(n * m, (cell) => head.visible(Math.floor(cell / m), cell % m));
  return {
    ...{ i, j, n, m, layer: layer.number, head: chosen.head, ["d_k"]: dk, ["d_v"]: dv, cells: n * m },
    ...{ query: name(i), key: name(j), before: name(i - 1), other: (chosen.head + 1) % layer.heads },
    ...{ heads: layer.heads, layers: layers.length, ["d_model"]: arrays[layer.arrays.x]?.shape.at(-1) ?? "d_model" },
    tokens: listOf(Math.min(n, 12), name).join(", ") + (n > 12 ? ", …" : ""),
    ...{ q: begin(head.q, i), k: begin(head.k, j), o: begin(head.output, i) },
    products: terms
      .slice(0, 2)
      .map((pair) => pair.map(factor).join(" · "))
      .join(" + "),
    ...{ score: fmt(head.scores(i, j)), scaled: fmt(head.scaled(i, j)), logit: fmt(head.masked(i, j)) },
    ...{ seen: seen.length, rank: raw.filter((x) => x > 1).length + 1, hidden: cells.filter((sees) => !sees).length },
    ...{
      sum: fmt(Math.exp(head.logsumexp(i, j))),
      weight: percent(row[j]),
      unscaled: percent(1 / raw.reduce((a, b) => a + b, 0)),
    },
    mix: most
      .slice(0, 3)
      .map((key) => `${percent(row[key])} ${name(key)}`)
      .join(" + "),
    next: `“${bare(next, 14)}” (${percent(share)})`,
    struck: row.map((x, key) => (key === i ? -1 : x)), // which key other than the query itself has most
    name,
    weightOf: (/** @type {number[]} */ [query, key]) => percent(head.weights(query, key)),
  };
}

/** @typedef {ReturnType<typeof numbersOf>} Said */

/** What a stop offers: another place, or a change of the run, which only a page with its model makes. @param {string} stop @param {Chosen} chosen @param {Said} now @returns {Partial<Chosen> | Partial<Change> | null} */
function offerOf(stop, { layer, head }, { i, j, n, heads, other, struck }) {
  if (stop === "qkv") return heads > 1 ? { head: other, key: -1 } : null;
  if (stop === "scores") return i ? { query: i - 1, key: -1 } : null;
  if (stop === "text") return n > 1 ? { hidden: [largestAt(struck)] } : null;
  if (stop === "scaled") return { scale: "none" };
  if (stop === "masked") return { causal: false };
  if (stop === "weights") return { over: "columns" };
  return stop === "heads" ? { cuts: [[layer, head, i, j]] } : { off: [[layer, head]] };
}

/** The strongest head that looks at another token and not the first, and has its steps here. @param {Page} page @returns {Partial<Chosen>} */
function teaching({ header: { why, layers } }) {
  const placeOf = (/** @type {any} */ head) =>
    layers.findIndex((/** @type {any} */ { number }) => number === head.layer);
  const looks = (/** @type {any} */ head) =>
    head.edge?.key > 0 && head.edge.key !== head.edge.query && head.truth < 0 && layers[placeOf(head)]?.arrays.q;
  const best = why?.heads.find(looks);
  return best ? { layer: placeOf(best), head: best.head, key: -1 } : {};
}

/** What the stop says, and what it offers. @param {Place} place @param {Say} t @param {string} id @param {Said} now @param {Said | null} before      without the stop's change, once that is made @param {(offer: any) => void} act */
function wordsOf({ chosen, live }, t, id, now, before, act) {
  const offer = offerOf(id, chosen, now);
  const edge = id === "masked" && now.n > 1 ? [0, 1] : [now.i, before?.j ?? now.j]; // the last row sees all keys as it is
  const names = { query: now.name(edge[0]), key: now.name(edge[1]), struck: now.name(largestAt(now.struck)) };
  const onclick = () => act(offer);
  const button = (/** @type {string} */ words) => [" ", h("button", { id: "tour-try", onclick }, words)];
  const said = explained(t(`says ${id}`, before ?? now), t);
  if (before) {
    const weight =
      id !== "output" && t("tour weight", { ...names, weight: before.weightOf(edge), weightNow: now.weightOf(edge) });
    return {
      said,
      then: [weight, " ", t("tour then", { next: before.next, nextNow: now.next }), button(t("as it was"))],
    };
  }
  const can = offer && (live?.change || id === "qkv" || id === "scores");
  return { said, then: can && [t("tour try"), button(t(`offer ${id}`, { ...now, ...names }))] };
}

/** Scrolls to a stop's figure. @param {number} stop @param {ScrollBehavior} [behavior] */
function bring(stop, behavior) {
  for (const each of document.querySelectorAll(".toured")) each.classList.remove("toured");
  const figure = stop < 0 ? null : stop ? byId(`step-${STOPS[stop]}`) : document.querySelector(".answered");
  figure?.classList.add("toured");
  (figure?.querySelector("figure") ?? figure)?.scrollIntoView({ behavior });
}

/** @param {Page} page @param {Place} place */
export function openTour(page, place) {
  const { chosen, live } = place;
  /** @type {Shell} */
  let shell;
  let stop = -1; // −1: no tour
  /** @type {Said | null} */
  let before = null;
  const [title, says, then, moves] = [h("h2", { id: "tour", tabindex: -1 }), h("p"), h("p"), h("div.moves")];
  const card = h("section.tour", { hidden: true, "aria-labelledby": "tour" }, title, says, then, moves);

  const show = () => {
    if (stop < 0 || !page.header.layers[chosen.layer].arrays.q) return;
    const [{ t }, id, now] = [shell, STOPS[stop], numbersOf(page, place)];
    const words = wordsOf(place, t, id, now, before, (offer) => {
      if ("head" in offer || "query" in offer) return place.choose("", offer);
      before = before ? null : now;
      live?.change?.({ ...unchanged(), ...(before && offer) });
    });
    const focused = then.contains(document.activeElement);
    for (const each of [title, says, then]) each.replaceChildren();
    add(title, lettered(t("tour of", { stop: stop + 1, count: STOPS.length, name: t(`stop ${id}`) })));
    add(says, words.said);
    add(then, words.then);
    if (focused) byId("tour-try")?.focus({ preventScroll: true });
  };

  const go = (/** @type {number} */ to) => {
    if (to >= STOPS.length) return;
    if (before) live?.change?.(unchanged());
    [stop, before] = [Math.max(-1, to), null];
    card.hidden = stop < 0;
    document.body.classList.toggle("touring", stop >= 0);
    if (stop > 0) openStep(STOPS[stop]);
    bring(stop);
    toStop(stop < 0 ? null : stop + 1);
    show();
    (stop < 0 ? start : title).focus({ preventScroll: true });
  };
  const move = (/** @type {number} */ by) => (stop + by === -1 ? undefined : go(stop + by));

  const start = h("button", { onclick: () => (place.choose("", teaching(page)), go(0)) });

  /** Goes to the stop that the address names. */
  const follow = () => {
    const to = Number(parts().get("tour") ?? 0) - 1;
    if (to < 0 || to === stop) return;
    if (document.querySelector(".map [data-step]")) go(to);
    else requestAnimationFrame(follow); // the steps are being unpacked
  };
  addEventListener("hashchange", follow);
  const onkeydown = (/** @type {KeyboardEvent} */ event) => {
    const by = MOVES[event.key];
    if (stop < 0 || !by || /** @type {Element} */ (event.target).closest(OTHERS)) return;
    if (by === -Infinity && document.querySelector(TIP)) return;
    event.preventDefault();
    event.stopPropagation();
    move(by);
  };
  document.addEventListener("keydown", onkeydown, { capture: true });
  return {
    start,
    /** Draws it anew, in a page of another run or language. @param {Shell} now */
    draw(now) {
      shell = now;
      const { t } = shell;
      start.textContent = t("tour");
      moves.replaceChildren(
        ...[`← ${t("tour back")}`, `${t("tour on")} →`, t("tour end")].map((words, place) =>
          h("button", { onclick: () => move([-1, 1, -Infinity][place]), title: t("tour keys") }, words),
        ),
      );
      if (card.parentNode !== shell.main) shell.main.append(card);
      place.follow("tour", show);
      show();
      if (stop < 0) follow();
      else bring(stop, "instant");
    },
  };
}
