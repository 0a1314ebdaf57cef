// The text beside the map: tokens shaded by what they receive, by what a query looks at, or by who looks at a key.

import { css, inkOn, weighed } from "../colour.js";
import { h } from "../dom.js";
import { spelled } from "../numbers.js";
import { alongKeys } from "./lines.js";

const MOST = 1200; // tokens that are shown at once

/** @typedef {{by: "received" | "query" | "key", picks: "query" | "key", start: number, word: string, said: string}} Reading */

/** @returns {Reading} */
export const newReading = () => ({ by: "received", picks: "query", start: 0, word: "", said: "" });

/**
 * The part of the text around a token, with a way to the parts before and after.
 * @param {string[]} texts
 * @param {Reading} reading
 * @param {(token: number) => void} pick
 * @param {() => void} again      draw the text again
 * @param {(key: string, values?: any) => string} t
 */
export function passage(texts, reading, pick, again, t) {
  const start = Math.max(0, Math.min(reading.start, texts.length - MOST));
  const stop = Math.min(texts.length, start + MOST);
  const turn = (/** @type {string} */ name, /** @type {number} */ to, /** @type {boolean} */ there) =>
    there && h("button", { onclick: () => ((reading.start = to), again()) }, t(name));
  const glued = texts.length > 1 && !texts.some((text) => /^[ \n▁Ġ]/.test(text)); // ids, or word pieces: spaces are not in the tokens
  const spans = [];
  for (let at = start; at < stop; at++) {
    if (glued && at > start && !texts[at].startsWith("##") && /^[\p{L}\p{N}]/u.test(texts[at])) spans.push(" ");
    spans.push(h("span.token", { "data-token": at }, shown(texts[at].replace(/^##/, ""))));
  }
  const box = h(
    "div.passage",
    { dir: "auto", onclick: (/** @type {Event} */ event) => {
      const token = /** @type {HTMLElement} */ (event.target).dataset.token;
      if (token !== undefined) pick(Number(token));
    } },
    spans,
  );
  return h("div", h("div.turns", turn("earlier", start - MOST, start > 0), texts.length > MOST && h("small", `${start}–${stop - 1} / ${texts.length}`), turn("later", stop, stop < texts.length)), box);
}

/** A token as it stands in a text: with its spaces and line ends, what is invisible spelled out, cut when endless. @param {string} text */
function shown(text) {
  if (text === "\n") return "⏎\n";
  const space = text.startsWith(" ") ? " " : "";
  return space + (spelled(text.slice(space.length), 60) || "");
}

/** Colour the tokens on show by what the reader chose. @param {import("./shown.js").Look} look */
export function shadeText(look) {
  const { parts, head, offset, state, aside, received, row, column } = look;
  const { by } = state.reading;
  const cross = head.layer.cross;
  const values = by === "received" ? received : by === "query" ? row : column && !cross && alongKeys(column, offset, head.m);
  shade(parts.text, values || null, { query: cross ? -1 : state.query + offset, key: state.key, aside: aside ? head.first : -1 });
}

/**
 * @param {HTMLElement} box
 * @param {ArrayLike<number> | null} values
 * @param {{query: number, key: number, aside: number}} marks      tokens; aside is left white
 */
function shade(box, values, marks) {
  let most = 0;
  if (values) for (let at = 0; at < values.length; at++) if (at !== marks.aside) most = Math.max(most, values[at]);
  const scale = weighed(most || 1);
  for (const span of /** @type {NodeListOf<HTMLElement>} */ (box.querySelectorAll(".token"))) {
    const token = Number(span.dataset.token);
    const value = values && token !== marks.aside ? values[token] : 0;
    const colour = scale.at(value);
    span.style.background = value > 0 ? css(colour) : "";
    span.style.color = value > 0 ? (inkOn(colour) === "dark" ? "#000" : "#fff") : "";
    span.classList.toggle("is-query", token === marks.query);
    span.classList.toggle("is-key", token === marks.key);
  }
}
