// The box to type in, and what is changed of the attention; each has a key.

import { h, select, slider, write } from "../dom.js";
import { bare, fmt } from "../numbers.js";
import { isUnchanged } from "../address.js";
import { unchanged } from "../model/attention.js";

const PAUSE = 150; // milliseconds between words that are written on

/** A button with its key; `say` changes its words, and it stays. @param {Shell["key"]} key @param {string} sign @param {() => void} act @param {string} [said] */
export function button(key, sign, act, said) {
  const words = h("span", said);
  key(sign, act);
  const element = h("button", { onclick: act, "aria-keyshortcuts": sign }, words, " ", h("kbd", sign));
  return { element, say: (/** @type {string} */ text) => write(words, text) };
}

/** @param {Page} page @param {Place} place @param {Live} live @param {Shell} shell */
export function liveBar({ header }, place, live, shell) {
  const { t, key } = shell;
  const { state } = live;
  const oninput = () => {
    state.writing = false;
    live.type(box.value);
  };
  const typed = { "aria-label": t("try text"), title: "t", autocomplete: "off", spellcheck: "false" };
  const box = h("input", { id: "try-text", ...typed, oninput });
  /** Puts the likeliest word after the text, and goes on while that is wanted. @param {boolean} on */
  const goOn = (on) => {
    const word = live.next();
    state.writing = on && Boolean(word);
    if (word) live.type(state.text + word);
    if (state.writing) setTimeout(() => state.writing && goOn(true), PAUSE);
  };
  const next = button(key, "g", () => goOn(false), t("try next"));
  const writing = button(key, "w", () => (state.writing ? (state.writing = false) : goOn(true)), t("try write"));
  const [strike, cut, off] = Object.entries({ x: live.strike, c: () => live.cut(), h: live.turn }).map(([sign, act]) =>
    button(key, sign, act),
  );
  const back = button(key, "r", () => live.change(unchanged()), t("as it was"));
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
    writing.element.setAttribute("aria-pressed", String(state.writing));
    strike.say(t("try hide", { token: name(query) }));
    cut.say(t("try cut", { layer, head, query: name(query), key: name(Math.max(other, 0)) }));
    off.say(t("try off", { layer, head }));
    const { vocabulary, neutral, positions } = header.live;
    const replaced = change.hidden.includes(0) && t("try replaced", { token: name(0), other: vocabulary[neutral] });
    const full = header.tokens.length >= positions && t("try full", { count: positions });
    const notes = [state.failed && t("try failed"), !isUnchanged(change) && t("try changed"), replaced, full];
    write(said, notes.filter(Boolean).join(" "));
    said.hidden = !said.textContent;
    element.setAttribute("aria-busy", String(!live.isReady() && !state.failed));
    element.setAttribute("data-at", location.hash); // what these numbers belong to
    live.mark();
  };
  place.follow("live", live.update);
  const changes = h("div.try-line", strike.element, cut.element, off.element, controls.elements, back.element);
  const folded = h("details.display", h("summary", t("try changes")), h("p.note", t("try how")), changes);
  const named = { role: "group", "aria-label": t("try title"), "aria-busy": "true" };
  const element = h("div.try", named, h("div.try-line", box, next.element, writing.element, folded), said);
  return element;
}

const WARMEST = 3; // 2³

/** What is changed for all heads: scale, mask, softmax. @param {Shell} shell @param {() => Change} now @param {(more: Partial<Change>) => void} change */
function changeControls({ t, key }, now, change) {
  const scales = { sqrt: "1/√dₖ", d_k: "1/dₖ", none: t("try unscaled") };
  const overs = Object.fromEntries(["rows", "columns", "all"].map((each) => [each, t(`try over ${each}`)]));
  const warm = h("output");
  const warmTo = (/** @type {number} */ power) => change({ temperature: 2 ** power });
  const warmth = slider("try-temperature", -WARMEST, WARMEST, warmTo, { step: 0.05 });
  const turn = () => change({ causal: !now().causal });
  const causal = h("input", { type: "checkbox", id: "try-causal", onchange: turn });
  key("m", turn);
  /** @param {"scale" | "over"} name @param {Record<string, string>} options @param {string} letter */
  function choice(name, options, letter) {
    const set = (/** @type {string} */ value) => change({ [name]: value });
    const names = Object.keys(options);
    key(letter, () => set(names[(names.indexOf(now()[name]) + 1) % names.length]));
    return select(`try-${name}`, Object.entries(options), "", set);
  }
  const [scale, over] = [choice("scale", scales, "s"), choice("over", overs, "o")];
  const warmer = (/** @type {number} */ by) =>
    warmTo(Math.min(WARMEST, Math.max(-WARMEST, Math.log2(now().temperature) + by)));
  key("<", () => warmer(-0.25));
  key(">", () => warmer(0.25));
  const label = (/** @type {string} */ words, /** @type {string} */ sign, /** @type {Child[]} */ ...input) =>
    h("label", words, " ", input, h("kbd", sign));
  return {
    elements: [
      label(t("try scale"), "s", scale),
      label(t("try causal"), "m", causal),
      label(t("try over"), "o", over),
      label(t("temperature"), "< >", warmth, warm),
    ],
    update() {
      const { temperature, ...what } = now();
      [scale.value, over.value, causal.checked] = [what.scale, what.over, what.causal];
      warmth.value = String(Math.log2(temperature));
      write(warm, fmt(temperature, 3));
    },
  };
}
