// The room where the reader types and the model that the page holds runs: next words, every head, and what is changed.

import { afterwards, h, renew } from "../dom.js";
import { unchanged } from "../model/attention.js";
import { likeliest, sharesOf } from "../model/forward.js";
import { openModel } from "../model/stored.js";
import { spelled } from "../numbers.js";
import { changeControls } from "./controls.js";
import { headPictures } from "./heads.js";
import { liveMap } from "./map.js";
import { nextWords } from "./next.js";
import { fromAddress, has, isUnchanged, toAddress, toggled } from "./state.js";

const PAUSE = 150; // milliseconds between words that are written on

/** @param {Page} page @returns {(shell: Shell) => HTMLElement} */
export function liveRoom(page) {
  const { live, facts, chosen } = page.header;
  const state = {
    text: facts.text,
    change: unchanged(),
    chosen: /** @type {[number, number]} */ ([chosen.layer, chosen.head]),
    word: 0, // that x strikes out
    writing: false,
    ...fromAddress(),
  };
  /** @type {Awaited<ReturnType<typeof openModel>> | null} */
  let model = null;
  let before = { ids: "", shares: new Float32Array() }; // probabilities where nothing is changed
  let draw = () => {};
  setTimeout(async () => {
    model = await openModel(page);
    draw();
  }, 50); // once the page is there
  addEventListener("hashchange", () => {
    Object.assign(state, fromAddress());
    draw();
  });
  const idsOf = (/** @type {string} */ text) => model?.encode(text).slice(0, live.positions) ?? [];

  return (shell) => {
    const { t } = shell;
    const drawSoon = afterwards(() => draw());
    const change = (/** @type {Partial<Change>} */ more) => {
      Object.assign(state.change, more);
      toAddress(state.text, state.change);
      drawSoon();
    };
    const type = (/** @type {string} */ text) => {
      state.text = text;
      change({});
    };
    const turn = (/** @type {[number, number]} */ place) => change({ off: toggled(state.change.off, place) });
    const cut = (/** @type {number} */ query, /** @type {number} */ key) =>
      change({ cuts: toggled(state.change.cuts, [...state.chosen, query, key]) });
    const strike = (/** @type {number} */ place) => {
      state.word = place;
      change({ hidden: toggled(state.change.hidden, place) });
    };
    const choose = (/** @type {[number, number]} */ place) => {
      state.chosen = place;
      drawSoon();
    };

    /** Puts the likeliest word after the text, and goes on while that is wanted. */
    function onward() {
      const ids = idsOf(state.text);
      const next = model && ids.length && likeliest(model.run(ids, state.change).logits, 1)[0].id;
      if (!model || !next || ids.length === live.positions)
        state.writing = false; // token 0 ends a rhyme
      else type(state.text + model.text(next));
      if (state.writing) setTimeout(() => state.writing && box.isConnected && onward(), PAUSE);
    }

    /** A button with its key. @param {string} key @param {string} words @param {() => void} act */
    function button(key, words, act) {
      shell.key(key, act);
      return h("button", { onclick: act, "aria-keyshortcuts": key }, words, " ", h("kbd", key));
    }

    const oninput = () => {
      state.writing = false;
      type(box.value);
    };
    const box = h("input", { id: "try-text", type: "text", autocomplete: "off", spellcheck: "false", oninput });
    const [tokens, ribbon] = [h("p.try-line.try-tokens"), h("div", { role: "status" })];
    const next = nextWords((word) => type(state.text + word));
    const pictures = headPictures(t, live.layers, live.heads, choose, turn);
    const map = liveMap(t, cut, shell.say);
    const controls = changeControls(shell, () => state.change, change);
    const off = button("h", t("try off"), () => turn(state.chosen));
    const back = button("r", t("as it was"), () => change(unchanged()));
    const write = button("w", t("try write"), () => {
      state.writing = !state.writing;
      if (state.writing) onward();
      drawSoon();
    });
    const placeOf = (/** @type {Event} */ { target }) =>
      Number(/** @type {Element} */ (target).getAttribute("data-place") ?? -1);
    tokens.addEventListener("click", (event) => placeOf(event) >= 0 && strike(placeOf(event)));
    tokens.addEventListener("focusin", (event) => (state.word = placeOf(event)));
    shell.key("t", () => box.focus());
    shell.key("x", () => strike(state.word));
    shell.key("c", () => map.cutHere());

    draw = () => {
      const { text, change: now, chosen } = state;
      if (box.value !== text) box.value = text;
      controls.update();
      back.disabled = isUnchanged(now);
      ribbon.replaceChildren(isUnchanged(now) ? "" : h("p.ribbon", t("try changed")));
      write.setAttribute("aria-pressed", String(state.writing));
      off.setAttribute("aria-pressed", String(has(now.off, chosen)));
      element.setAttribute("aria-busy", String(!model));
      const ids = idsOf(text);
      if (!model || !ids.length) return;
      const names = ids.map(model.text);
      const { attention, logits } = model.run(ids, now);
      if (before.ids !== ids.join()) before = { ids: ids.join(), shares: sharesOf(model.run(ids, unchanged()).logits) };
      next.show(logits, isUnchanged(now) ? null : before.shares, model.text);
      const word = (/** @type {string} */ name, /** @type {number} */ place) =>
        h("button.try-token", { "aria-pressed": String(has(now.hidden, place)), "data-place": place }, spelled(name));
      renew(tokens, names.map(word));
      pictures.show(attention, ids.length, chosen, now.off);
      const isCut = (/** @type {number} */ i, /** @type {number} */ j) => has(now.cuts, [...chosen, i, j]);
      map.show({ ...attention[chosen[0]][chosen[1]], n: ids.length, names, isCut });
      element.setAttribute("data-at", location.hash); // what these numbers belong to
    };

    const element = h(
      "section.try",
      { "aria-labelledby": "try-title", "aria-busy": "true" },
      h("h2", { id: "try-title" }, t("try title")),
      h("label", { for: "try-text" }, t("try text"), " ", h("kbd", "t")),
      h("div.try-line", box, button("g", t("try next"), onward), write),
      tokens,
      h("p.note", t("try how")),
      ribbon,
      h("div.try-line", { role: "group", "aria-label": t("try changes") }, controls.elements, back),
      h(
        "div.try-shown",
        h("div", h("h3.aside", t("next")), next.element),
        h("div", h("h3.aside", t("try heads")), pictures.element, off),
        map.element,
      ),
    );
    drawSoon();
    return element;
  };
}
