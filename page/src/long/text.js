// The text: its tokens, shaded by what they did for the answer or by a query's weights, and arcs over it.

import { css, inkOn, signed, weighed } from "../colour.js";
import { add, h, scrollWithin, svg, walking } from "../dom.js";
import { kept, listOf, spelled } from "../numbers.js";
import { follow, jump } from "./look.js";
import { rowOf } from "./source.js";

/** @typedef {[key: number, weight: number]} Arc      weight 0: it is cut */

const MOST = 1200; // tokens that are shown at once

export const newReading = () => ({
  start: 0, // of the part on show
  chosen: /** @type {number | null} */ (null), // the token when it was drawn
  seen: 0, // the token in view
  over: /** @type {number | null} */ (null), // the token under the pointer
});

export function drawText(/** @type {Look} */ look) {
  const { keyTexts, head, state, answer, page, parts, shell, place } = look;
  const { query, key } = place.chosen;
  const { text } = parts;
  const [{ reading }, { why }, { live }] = [state, page.header, place];
  text.replaceChildren();
  if (!keyTexts || !head.exact) return;
  const chosen = head.layer.cross ? key : query + look.offset; // a token of the text
  if (reading.chosen !== chosen) {
    const seen = reading.chosen === null ? (why?.parts[0]?.tokens[0] ?? chosen) : chosen; // at first the strongest cause
    Object.assign(reading, { chosen, seen, start: seen - 300 }); // a quarter of the part stands before it
  }
  const start = Math.max(0, Math.min(reading.start, keyTexts.length - MOST));
  const stop = Math.min(keyTexts.length, start + MOST);
  const turn = (/** @type {string} */ name, /** @type {number} */ to, /** @type {boolean} */ there) => {
    const onclick = () => {
      reading.start = to;
      drawText(look);
      shadeText(look);
    };
    return there && h("button", { onclick }, shell.t(name));
  };
  const box = passage(look, keyTexts, start, stop);
  const range = keyTexts.length > MOST && h("small", `${start}–${stop - 1} / ${keyTexts.length}`);
  const turns = [turn("earlier", start - MOST, start > 0), range, turn("later", stop, stop < keyTexts.length)];
  const lens = shell.t(head.layer.cross ? "lens cross" : "lens");
  add(text, [h("div", h("div.turns", turns), box), h("div.picks", h("span.note", answer.legend || lens))]);
  text.classList.toggle("short", keyTexts.length <= 60);
  if (live) box.ondblclick = () => (getSelection()?.empty(), live.strike());
  if (why) box.append(h("span.reply", " → ", h("bdi", spelled(why.answer, 400))));
  if (why?.sink) box.dataset.sink = "";
  live?.mark();
  const moved = () => {
    scrollWithin(box, box.querySelector(`[data-token="${reading.seen}"]`)); // lines move with its width
    places.set(box, new Map());
    answer.drawn();
    live?.edges(look);
  };
  new ResizeObserver(moved).observe(box);
}

/** A part of the text, whose tokens the pointer and the keys choose. @param {Look} look @param {string[]} texts @param {number} start @param {number} stop */
function passage(look, texts, start, stop) {
  const { pads, page, shell, answer } = look;
  const { facts, why } = page.header;
  /** @type {[string, number, number][]} of a chat: who speaks, the first token and the end; all others are the template's */
  const turns = why?.turns ?? [];
  const answered = texts.length - (facts?.generated ?? 0); // the model put the rest there
  const kindOf = (/** @type {number} */ at) => {
    if (pads.has(at)) return "span.token.padding";
    if (at >= answered) return "span.token.generated";
    const said = !turns.length || at === texts.length - 1 || turns.some(([, a, b]) => at >= a && at < b);
    return said ? "span.token" : "span.token.template";
  };
  const gap = gapsOf(texts);
  const spans = listOf(stop - start, (index) => {
    const at = start + index;
    const begun = turns.find(([, first]) => first === at);
    const onclick = () => box.classList.toggle("whole"); // shows the template's tokens or hides them
    const title = pads.has(at) && shell.t("padding");
    const token = h(kindOf(at), { "data-token": at, role: "button", tabindex: -1, title }, shown(texts[at]));
    return [
      gap(at) && index > 0 && " ",
      begun && h("button.turn", { onclick, title: answer.template }, begun[0]),
      token,
    ];
  });
  const act = (/** @type {any} */ { target }, does = choose) =>
    target.dataset.token && does(look, Number(target.dataset.token));
  const box = h(
    "div.passage",
    {
      dir: "auto",
      role: "group",
      "aria-label": shell.t("the text"),
      onclick: act,
      onpointerover: (/** @type {PointerEvent} */ event) => event.pointerType !== "touch" && act(event, pointAt),
      onpointerleave: () => pointAt(look, null),
      onkeydown: (/** @type {KeyboardEvent} */ event) => {
        walk(event);
        if (event.key !== "Enter" && event.key !== " ") return;
        act(event);
        event.preventDefault();
        event.stopPropagation();
      },
    },
    spans,
  );
  return box;
}

/** Tells before which tokens a space must be written, where the tokens themselves have none (word pieces, ids). @param {string[]} texts @returns {(at: number) => boolean} */
function gapsOf(texts) {
  const glued = texts.length > 1 && !texts.some((text) => /^[ \n▁Ġ]/.test(text));
  return (index) => glued && index > 0 && !texts[index].startsWith("##") && /^[\p{L}\p{N}]/u.test(texts[index]);
}

/** A token as it stands in a text: with its spaces and line ends, what is invisible spelled out, cut when endless. @param {string} token */
function shown(token) {
  const text = token.replace(/^##/, "");
  if (text === "\n") return "⏎\n";
  const space = text.startsWith(" ") && text.trim() ? " " : "";
  return space + spelled(text.slice(space.length), 60);
}

/** From token to token. */
const walk = walking((from, down, right) => {
  const side = down + right < 0 ? "previousElementSibling" : "nextElementSibling";
  let to = from[side];
  while (to && !(to.offsetParent && to.dataset.token)) to = to[side]; // folded tokens, and what is none
  return to;
});

/** The text as the token under the pointer attends to it; null: as the chosen one does. @param {Look} look @param {number | null} token */
async function pointAt(look, token) {
  const { head, offset, state, page, answer, chosen } = look;
  const { reading } = state;
  if (reading.over === token) return;
  reading.over = token;
  if (page.header.why) return answer.point(token);
  const query = token === null || head.layer.cross ? -1 : token - offset;
  if (query < 0 || query >= head.n) {
    shadeText(look);
    return follow(look, chosen.query);
  }
  const row = await rowOf(head, query).catch(() => null);
  if (reading.over !== token || !row) return;
  shadeText(look, { token: /** @type {number} */ (token), row });
  follow(look, query);
}

/** A token of the text becomes the query or the key. @param {Look} look @param {number} token */
function choose(look, token) {
  const { head, offset, chosen } = look;
  const query = token - offset;
  if (!head.layer.cross && query >= 0 && query < head.n) jump(look, query, chosen.key);
  else jump(look, chosen.query, token);
}

/** Colour the tokens on show by what they did for the answer, where that is known, else by the weights of the chosen query, or of one that is pointed at. @param {Look} look @param {{token: number, row: Float32Array} | null} [over] */
export function shadeText(look, over = null) {
  const { parts, head, offset, chosen, row, page } = look;
  const { why } = page.header;
  const caused = why && !over;
  /** @type {ArrayLike<number>} */
  const values = (caused ? why.by_token : (over?.row ?? row)) ?? [];
  const most = Array.from(values).reduce((a, b) => Math.max(a, caused ? Math.abs(b) : b), 0);
  const scale = caused ? signed("contributions", most, true) : weighed(most);
  const spans = /** @type {NodeListOf<HTMLElement>} */ (parts.text.querySelectorAll(".token"));
  const first = Number(spans[0]?.dataset.token);
  const query = head.layer.cross ? -1 : (over?.token ?? chosen.query + offset);
  const key = over ? -1 : chosen.key;
  if (!parts.text.querySelector('.token[tabindex="0"]') && spans.length)
    (spans[query - first] ?? spans[0]).tabIndex = 0;
  spans.forEach((span, index) => {
    const value = values[first + index] ?? 0;
    const none = caused ? value === 0 : value <= 0; // masked ones are
    const colour = scale.colour(value);
    span.classList.toggle("is-query", first + index === query);
    span.classList.toggle("is-key", first + index === key);
    span.style.backgroundColor = none ? "" : css(colour);
    span.style.color = none ? "" : inkOn(colour) === "dark" ? "#000" : "#fff";
  });
}

/** @type {WeakMap<Element, Map<number, number[] | undefined>>} where the middle of a token's top is, in its text */
const places = new WeakMap();

/** Arcs over the text, from a query to what it attends to. @param {HTMLElement} text @param {number} query @param {Arc[]} looks @param {((key: number) => void) | null} [act]      what a click on an arc does */
export function drawArcs(text, query, looks, act = null) {
  const box = text.querySelector(".passage");
  if (!box) return;
  const known = kept(places, box, () => new Map());
  const topOf = (/** @type {number} */ token) => {
    if (known.has(token)) return known.get(token);
    const corner = box.getBoundingClientRect();
    const place = box.querySelector(`[data-token="${token}"]`)?.getClientRects()[0];
    known.set(token, place && [place.left + place.width / 2 - corner.left, place.top - corner.top + box.scrollTop]);
    return known.get(token);
  };
  const to = topOf(query);
  const arcs = looks.map(([key, weight]) => {
    const from = topOf(key);
    if (!from || !to) return null;
    const [x, y] = key === query ? [from[0] - 12, from[1]] : from;
    const lift = 8 + Math.min(16, Math.abs(to[0] - x) / 12);
    const d = `M${to[0]} ${to[1]}C${to[0]} ${to[1] - lift} ${x} ${y - lift} ${x} ${y}`;
    const look = { "stroke-width": (1 + 4 * weight).toFixed(1), opacity: Math.sqrt(weight).toFixed(2) };
    return [
      weight ? svg("path", { d, ...look }) : svg("path.cut", { d }),
      act && svg("path.wide", { d, onclick: () => act(key) }),
    ];
  });
  box.querySelector("svg")?.remove();
  box.prepend(svg("svg.edges", { "aria-hidden": "true" }, arcs));
}
