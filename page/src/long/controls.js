// The controls above the map.

import { byId, h, select } from "../dom.js";
import { hasEffects, SHOWS } from "./effects.js";
import { nearer } from "./mapbox.js";

/** @param {string} label @param {string} id @param {string[][]} options @param {string} value @param {(value: string) => void} then */
export const choice = (label, id, options, value, then) => h("label", `${label} `, select(id, options, value, then));

/** The controls of one head: zoom and colours. @param {Look} look */
export function controls(look) {
  const { state, head } = look;
  const { t } = look.shell;
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
  );
}

/** Draws the head again; the control that was used keeps the focus. @param {Look} look @param {Record<string, any>} changes */
function set(look, changes) {
  const id = document.activeElement?.id;
  Object.assign(look.state, changes);
  look.again().then(() => id && byId(id)?.focus());
}
