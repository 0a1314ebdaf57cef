// The controls above the map.

import { byId, h, select, tickbox } from "../dom.js";
import { hasEffects, SHOWS } from "./effects.js";
import { toLink } from "./link.js";
import { nearer } from "./mapbox.js";
import { areAlike } from "./source.js";

/** @param {string} label @param {string} id @param {string[][]} options @param {string} value @param {(value: string) => void} then */
export const choice = (label, id, options, value, then) => h("label", `${label} `, select(id, options, value, then));

/** The controls of one head: zoom, colours, tokens or words, and the head that is subtracted. @param {Look} look */
export function controls(look) {
  const { state, head } = look;
  const { t } = look.shell;
  const names = (/** @type {string[]} */ ...options) => options.map((name) => [name, t(name)]);
  const press = (/** @type {string} */ name, /** @type {string} */ sign, /** @type {() => void} */ onclick) =>
    h("button", { title: t(name), "aria-label": t(name), onclick }, sign);
  const near = (/** @type {string} */ name, /** @type {string} */ sign, /** @type {number} */ factor) =>
    press(name, sign, () => nearer(look, factor));
  const turn = (/** @type {string} */ name, /** @type {string} */ sign, /** @type {number} */ by) =>
    press(name, sign, () => look.pick({ ...state.address, head: state.address.head + by }));
  const zooms = h("span.zooms", near("nearer", "+", 0.5), near("farther", "−", 2), near("whole", "⤢", 0));
  const effects = SHOWS.map((name) => [name, t(`shows ${name}`)]);
  return h(
    "div.picks.controls",
    head.layer.heads.length > 1 && h("span.zooms", turn("head before", "‹", -1), turn("head after", "›", 1)),
    zooms,
    hasEffects(head.layer, state.address.head) &&
      choice(t("shows"), "shows", effects, state.shows, (shows) => set(look, { shows })),
    choice(t("scale"), "scale", names("sqrt", "linear", "log"), state.scale, (scale) => set(look, { scale })),
    display(look, names("most", "mean")),
  );
}

/** The controls that unfold. @param {Look} look @param {string[][]} rules */
function display(look, rules) {
  const { state, inView, fixed, canWords } = look;
  const { t } = look.shell;
  const check = (/** @type {"aside" | "words"} */ name, /** @type {string} */ label) => {
    const box = tickbox(name, (on) => set(look, { [name]: on }), state[name]);
    return h("label", box, ` ${label}`);
  };
  const ends = [
    ["", t("up to here")],
    ["1", t("up to view")],
    ["fixed", t("up to one")],
  ];
  const end = (/** @type {string} */ value) => set(look, { inView: value === "1", fixed: value === "fixed" });
  const details = h(
    "details.display",
    { open: state.display, ontoggle: () => (state.display = details.open) },
    h("summary", t("display")),
    h(
      "div.picks",
      choice(t("pixel"), "rule", rules, state.rule, (rule) => set(look, { rule })),
      choice(t("up to"), "inView", ends, fixed ? "fixed" : inView ? "1" : "", end),
      check("aside", t("first aside")),
      canWords && check("words", t("as words")),
      comparison(look),
      linkButton(look),
      state.words && h("small", t("words rule")),
    ),
  );
  return details;
}

/** Draws the head again; the control that was used keeps the focus. @param {Look} look @param {Record<string, any>} changes */
function set(look, changes) {
  const id = document.activeElement?.id;
  Object.assign(look.state, changes);
  look.again().then(() => id && byId(id)?.focus());
}

/** The heads that can be subtracted. @param {Look} look */
function comparison(look) {
  const { page, head, state } = look;
  const { t } = look.shell;
  const { runs } = page.header;
  const options = [["", t("no other")]];
  for (const [r, run] of runs.entries())
    for (const [l, layer] of run.layers.entries())
      for (const [index, name] of layer.heads.entries()) {
        const label = (runs.length > 1 ? `${run.name || r} · ` : "") + (layer.name ? `${layer.name}.` : "") + name;
        if (areAlike(page, head, layer, index)) options.push([`${r} ${l} ${index}`, label]);
      }
  const address = state.other ? Object.values(state.other).join(" ") : "";
  return choice(t("compare"), "other", options, address, (value) => {
    const [run, layer, index] = value.split(" ").map(Number);
    set(look, { other: value ? { run, layer, head: index } : null });
  });
}

/** @param {Look} look */
function linkButton({ state, shell }) {
  const copy = async () => {
    toLink(state);
    const done = () => void (button.textContent = shell.t("copied"));
    await navigator.clipboard?.writeText(location.href).then(done, () => {});
  };
  const button = h("button", { onclick: copy }, shell.t("link"));
  return button;
}
