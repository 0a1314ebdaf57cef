// The box to type in, and what is changed of the attention; each has a key.

import { isUnchanged } from "../address.js";
import { h } from "../dom.js";
import { bare } from "../numbers.js";
import { unchanged } from "../model/attention.js";
import { changeControls } from "./controls.js";

const PAUSE = 150; // milliseconds between words that are written on

/** @param {Page} page @param {Place} place @param {Live} live @param {Shell} shell */
export function liveBar({ header }, place, live, shell) {
  const { t, key } = shell;
  const { state } = live;
  /** A button with its key; it stays where its words change. @param {string} sign @param {() => void} act @param {string} [said] */
  function button(sign, act, said) {
    const words = h("span", said);
    key(sign, act);
    return { words, element: h("button", { onclick: act, "aria-keyshortcuts": sign }, words, " ", h("kbd", sign)) };
  }
  const oninput = () => {
    state.writing = false;
    live.type(box.value);
  };
  const named = { "aria-label": t("try text"), title: "t" };
  const box = h("input", { id: "try-text", ...named, autocomplete: "off", spellcheck: "false", oninput });
  /** Puts the likeliest word after the text, and goes on while that is wanted. @param {boolean} on */
  const goOn = (on) => {
    const word = live.next();
    state.writing = on && Boolean(word);
    if (word) live.type(state.text + word);
    if (state.writing) setTimeout(() => state.writing && goOn(true), PAUSE);
  };
  const next = button("g", () => goOn(false), t("try next"));
  const write = button("w", () => (state.writing ? (state.writing = false) : goOn(true)), t("try write"));
  const [strike, cut, off] = [button("x", live.strike), button("c", () => live.cut()), button("h", live.turn)];
  const back = button("r", () => live.change(unchanged()), t("as it was"));
  const controls = changeControls(shell, () => state.change, live.change);
  const said = h("p.ribbon", { role: "status" });
  key("t", () => box.focus());

  live.update = () => {
    const { layer, head, query, key: other } = place.chosen;
    const { change, text } = state;
    const name = (/** @type {number} */ token) => bare(header.tokens[token] ?? "", 12);
    if (box.value !== text) box.value = text;
    controls.update();
    back.element.disabled = isUnchanged(change);
    write.element.setAttribute("aria-pressed", String(state.writing));
    strike.words.textContent = t("try hide", { token: name(query) });
    cut.words.textContent = t("try cut", { layer, head, query: name(query), key: name(Math.max(other, 0)) });
    off.words.textContent = t("try off", { layer, head });
    const replaced =
      change.hidden.includes(0) &&
      t("try replaced", { token: name(0), other: header.live.vocabulary[header.live.neutral] });
    said.textContent = [isUnchanged(change) ? "" : t("try changed"), replaced].filter(Boolean).join(" ");
    said.hidden = !said.textContent;
    element.setAttribute("aria-busy", String(!live.isReady()));
    element.setAttribute("data-at", location.hash); // what these numbers belong to
    live.mark();
  };
  place.follow("live", live.update);
  const element = h(
    "div.try",
    { role: "group", "aria-label": t("try title"), "aria-busy": "true" },
    h(
      "div.try-line",
      ...[box, next.element, write.element],
      h(
        "details.display",
        h("summary", t("try changes")),
        h("p.note", t("try how")),
        h("div.try-line", strike.element, cut.element, off.element, controls.elements, back.element),
      ),
    ),
    said,
  );
  return element;
}
