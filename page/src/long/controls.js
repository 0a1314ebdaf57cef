// The controls above the map.

import { byId, h, tickbox } from "../dom.js";
import { hasEffects } from "./effects.js";
import { toLink } from "./link.js";
import { nearer } from "./mapbox.js";
import { areAlike } from "./source.js";

/** @typedef {import("./shown.js").Look} Look */

/** @param {string} label @param {string} id @param {[string, string][]} options @param {string} value @param {(value: string) => void} then */
export function choice(label, id, options, value, then) {
  const made = h(
    "select",
    { id, onchange: () => then(/** @type {HTMLSelectElement} */ (made).value) },
    options.map(([name, text]) => h("option", { value: name, selected: name === value }, text)),
  );
  return h("label", `${label} `, made);
}

/** The controls of one head: zoom, colours, tokens or words, and the head that is subtracted. @param {Look} look */
export function controls(look) {
  const {
    state,
    inView,
    canWords,
    shell: { t },
  } = look;
  const names = (/** @type {string[]} */ ...options) =>
    options.map((name) => /** @type {[string, string]} */ ([name, t(name)]));
  const press = (/** @type {string} */ name, /** @type {string} */ sign, /** @type {() => void} */ onclick) =>
    h("button", { title: t(name), "aria-label": t(name), onclick }, sign);
  const near = (/** @type {string} */ name, /** @type {string} */ sign, /** @type {number} */ factor) =>
    press(name, sign, () => nearer(look, factor));
  const check = (/** @type {"aside" | "words"} */ name, /** @type {string} */ label) =>
    h(
      "label",
      tickbox(name, (on) => set(look, { [name]: on }), state[name]),
      ` ${label}`,
    );
  const turn = (/** @type {string} */ name, /** @type {string} */ sign, /** @type {number} */ by) =>
    press(name, sign, () => look.pick({ ...state.at, head: state.at.head + by }));
  const more = h(
    "details.display",
    {
      open: state.display,
      ontoggle: (/** @type {Event} */ { target }) => (state.display = /** @type {HTMLDetailsElement} */ (target).open),
    },
    h("summary", t("display")),
    h(
      "div.picks",
      choice(t("pixel"), "rule", names("most", "mean"), state.rule, (rule) => set(look, { rule })),
      choice(
        t("up to"),
        "inView",
        [
          ["", t("up to here")],
          ["1", t("up to view")],
          ["fixed", t("up to one")],
        ],
        look.fixed ? "fixed" : inView ? "1" : "",
        (value) => set(look, { inView: value === "1", fixed: value === "fixed" }),
      ),
      check("aside", t("first aside")),
      canWords && check("words", t("as words")),
      comparison(look),
      linkButton(look),
      state.words && h("small", t("words rule")),
    ),
  );
  return h(
    "div.picks.controls",
    look.head.layer.heads.length > 1 && h("span.zooms", turn("head before", "‹", -1), turn("head after", "›", 1)),
    h("span.zooms", near("nearer", "+", 0.5), near("farther", "−", 2), near("whole", "⤢", 0)),
    hasEffects(look.head.layer, state.at.head) &&
      choice(
        t("shows"),
        "shows",
        ["weights", "contributions", "cuts"].map((name) => [name, t(`shows ${name}`)]),
        state.shows,
        (shows) => set(look, { shows }),
      ),
    choice(t("scale"), "scale", names("sqrt", "linear", "log"), state.scale, (scale) => set(look, { scale })),
    more,
  );
}

/** Draws the head again; the control that was used keeps the focus. @param {Look} look @param {Record<string, any>} changes */
function set(look, changes) {
  const id = document.activeElement?.id;
  Object.assign(look.state, changes);
  look.again().then(() => id && byId(id)?.focus());
}

/** The heads that can be subtracted. @param {Look} look */
function comparison(look) {
  const {
    page,
    head,
    state,
    shell: { t },
  } = look;
  const { runs } = page.header;
  const others = [];
  for (const [r, run] of runs.entries())
    for (const [l, layer] of run.layers.entries())
      for (const [at, name] of layer.heads.entries())
        if (areAlike(page, head, layer, at))
          others.push([
            `${r} ${l} ${at}`,
            `${runs.length > 1 ? `${run.name || r} · ` : ""}${layer.name ? `${layer.name}.` : ""}${name}`,
          ]);
  const address = state.other ? `${state.other.run} ${state.other.layer} ${state.other.head}` : "";
  return choice(
    t("compare"),
    "other",
    /** @type {[string, string][]} */ ([["", t("no other")], ...others]),
    address,
    (value) => {
      const [run, layer, at] = value.split(" ").map(Number);
      set(look, { other: value ? { run, layer, head: at } : null });
    },
  );
}

/** @param {Look} look */
function linkButton({ state, shell: { t } }) {
  const button = h(
    "button",
    {
      onclick: async () => {
        toLink(state);
        await navigator.clipboard?.writeText(location.href).then(
          () => (button.textContent = t("copied")),
          () => {},
        );
      },
    },
    t("link"),
  );
  return button;
}
