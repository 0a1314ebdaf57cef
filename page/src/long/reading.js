// The text: tokens shaded by what they did for the answer, or by a query's weights.

import { MASKED } from "../attention.js";
import { css, inkOn, signed, weighed } from "../colour.js";
import { h } from "../dom.js";
import { listOf, spelled } from "../numbers.js";
import { gapsOf } from "./names.js";

const SHADES = 60; // few, so that most tokens keep theirs from one query to the next
/** @type {WeakMap<HTMLElement, string[]>} a token's background and ink */
const coloured = new WeakMap();
const MOST = 1200; // tokens that are shown at once
const whole = [0, MOST];
let inView = whole; // the first of the tokens in view, and their end: places among those on show
let shadeMore = () => {}; // the tokens that have come into view
addEventListener("beforeprint", () => ((inView = whole), shadeMore()));

/** @typedef {{start: number, chosen: number | null, seen: number, over: number | null}} Reading      start: of the part on show; chosen: when it was drawn; seen: the token in view; over: the token under the pointer */

/** @returns {Reading} */
export const newReading = () => ({ start: 0, chosen: null, seen: 0, over: null });

/**
 * The part of the text around a token, with buttons for the parts before and after.
 * @param {string[]} texts @param {Reading} reading @param {(token: number) => void} pick
 * @param {() => void} again      draw the text again
 * @param {(token: number | null) => void} point      the pointer is over a token, or has left the text
 * @param {Say} t
 * @param {number} generated      how many of the last tokens the model put there
 * @param {Set<number>} pads      the tokens that are padding
 * @param {[string, number, number][]} turns      of a chat: who speaks, the first token and the end; all others are the template's
 * @param {string} template      what a click on a name does: it shows these or hides them
 */
export function passage(texts, reading, pick, again, point, t, generated, pads, turns, template) {
  const start = Math.max(0, Math.min(reading.start, texts.length - MOST));
  const stop = Math.min(texts.length, start + MOST);
  const turn = (/** @type {string} */ name, /** @type {number} */ to, /** @type {boolean} */ there) =>
    there && h("button", { onclick: () => ((reading.start = to), again()) }, t(name));
  const gap = gapsOf(texts);
  const spans = [];
  for (let index = start; index < stop; index++) {
    if (gap(index) && index > start) spans.push(" ");
    const begun = turns.find(([, first]) => first === index);
    const onclick = () => box.classList.toggle("whole");
    if (begun) spans.push(h("button.turn", { onclick, title: template }, begun[0]));
    const said = !turns.length || index === texts.length - 1 || turns.some(([, a, b]) => index >= a && index < b);
    spans.push(
      h(
        pads.has(index)
          ? "span.token.padding"
          : index >= texts.length - generated
            ? "span.token.generated"
            : said
              ? "span.token"
              : "span.token.template",
        { "data-token": index, role: "button", tabindex: -1, ...(pads.has(index) && { title: t("padding") }) },
        shown(texts[index].replace(/^##/, "")),
      ),
    );
  }
  /** @param {EventTarget | null} target @param {(token: number) => void} [does] */
  const act = (target, does = pick) => {
    const { token } = /** @type {HTMLElement} */ (target).dataset;
    if (token) does(Number(token));
  };
  const box = h(
    "div.passage",
    {
      dir: "auto",
      role: "group",
      "aria-label": t("the text"),
      onclick: (/** @type {Event} */ event) => act(event.target),
      onpointerover: (/** @type {PointerEvent} */ { target, pointerType }) =>
        pointerType !== "touch" && act(target, point),
      onpointerleave: () => point(null),
      onkeydown: (/** @type {KeyboardEvent} */ event) => {
        if (event.key === "Enter" || event.key === " ") act(event.target);
        else if (!walk(event)) return;
        event.preventDefault();
        event.stopPropagation();
      },
    },
    spans,
  );
  const look = () => ((inView = viewOf(box)), shadeMore());
  box.addEventListener("scroll", look);
  new ResizeObserver(look).observe(box);
  return h(
    "div",
    h(
      "div.turns",
      turn("earlier", start - MOST, start > 0),
      texts.length > MOST && h("small", `${start}–${stop - 1} / ${texts.length}`),
      turn("later", stop, stop < texts.length),
    ),
    box,
  );
}

/** The tokens in view, and a few before and after. @param {HTMLElement} box */
function viewOf(box) {
  const tokens = box.querySelectorAll(".token");
  const { top, height } = box.getBoundingClientRect();
  return [top - height / 4, top + 1.25 * height].map((y) => {
    let [low, high] = [0, tokens.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (tokens[middle].getBoundingClientRect().bottom < y) low = middle + 1;
      else high = middle;
    }
    return low;
  });
}

/** Arrows go from token to token while one of them has the focus. @param {KeyboardEvent} event */
function walk({ key, target }) {
  const side = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[key];
  if (!side) return false;
  let to = /** @type {any} */ (target)[side];
  while (to && !to.offsetParent) to = to[side]; // what is folded, and the picture of the edges
  if (!to) return true;
  /** @type {any} */ (target).tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
  return true;
}

/** A token as it stands in a text: with its spaces and line ends, what is invisible spelled out, cut when endless. @param {string} text */
function shown(text) {
  if (text === "\n") return "⏎\n";
  const space = text.startsWith(" ") && text.trim() ? " " : "";
  return space + spelled(text.slice(space.length), 60);
}

/** Colour the tokens on show by what they did for the answer, where that is known, else by the weights of the chosen query, or of one that is pointed at. @param {Look} look @param {{token: number, row: Float32Array} | null} [over] */
export function shadeText(look, over = null) {
  const { parts, head, offset, state, row } = look;
  const { why } = look.page.header;
  const caused = why && !over;
  const cross = head.layer.cross;
  shade(parts.text, caused ? why.by_token : (over?.row ?? row), {
    query: cross ? -1 : (over?.token ?? state.query + offset),
    key: over ? -1 : state.key,
    shows: caused ? "contributions" : head.shows,
  });
}

/**
 * @param {HTMLElement} box
 * @param {ArrayLike<number> | null | false} values      of each token
 * @param {{query: number, key: number, shows: string}} marks      tokens
 */
function shade(box, values, marks) {
  const sizes = values ? Array.from(values, (x) => (x === MASKED ? 0 : Math.abs(x))) : [];
  const most = sizes.reduce((most, size) => Math.max(most, size), 0);
  const plain = marks.shows === "weights";
  const scale = plain ? weighed(most) : signed(marks.shows, most, "sqrt");
  const written = listOf(SHADES + 1, (index) => {
    const colour = scale.along(index / SHADES);
    return [css(colour), inkOn(colour) === "dark" ? "#000" : "#fff"];
  });
  written.push([css(scale.along(NaN)), "#000"], ["", ""]); // not finite; no weight
  const spans = /** @type {NodeListOf<HTMLElement>} */ (box.querySelectorAll(".token"));
  const first = Number(spans[0]?.dataset.token);
  const spanOf = (/** @type {number} */ token) => spans[token - first];
  for (const [name, token] of /** @type {[string, number][]} */ ([
    ["is-query", marks.query],
    ["is-key", marks.key],
  ])) {
    const before = box.querySelector(`.${name}`);
    if (before !== spanOf(token)) before?.classList.remove(name);
    spanOf(token)?.classList.add(name);
  }
  if (!box.querySelector('.token[tabindex="0"]') && spans.length) (spanOf(marks.query) ?? spans[0]).tabIndex = 0;
  shadeMore = () => {
    for (let index = inView[0]; index < Math.min(inView[1], spans.length); index++)
      colourToken(spans[index], first + index);
  };
  shadeMore();

  /** @param {HTMLElement} span @param {number} token */
  function colourToken(span, token) {
    const value = values ? values[token] : 0;
    const place = Math.round(scale.shade(value) * SHADES);
    const shade =
      value === MASKED || (plain ? value <= 0 : value === 0)
        ? SHADES + 2
        : Number.isNaN(place)
          ? SHADES + 1
          : Math.min(SHADES, place);
    const [background, ink] = written[shade];
    const [before, inkBefore] = coloured.get(span) ?? [];
    if (before === background) return;
    coloured.set(span, written[shade]);
    span.style.backgroundColor = background;
    if (inkBefore !== ink) span.style.color = ink;
  }
}
