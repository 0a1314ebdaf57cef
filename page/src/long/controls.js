// The controls above the map.

import { byId, h, select } from "../dom.js";
import { hasEffects, SHOWS } from "./effects.js";
import { nearer } from "./mapbox.js";

/** @param {string} label @param {string} id @param {string[][]} options @param {string} value @param {(value: string) => void} then */
export const choice = (label, id, options, value, then) => h("label", `${label} `, select(id, options, value, then));

/** The controls of one head: zoom, and what is shown. @param {Look} look */
export function controls(look) {
  const { state, head } = look;
  const { t } = look.shell;
  const near = (/** @type {string} */ name, /** @type {string} */ sign, /** @type {number} */ factor) =>
    h("button", { title: t(name), "aria-label": t(name), onclick: () => nearer(look, factor) }, sign);
  const zooms = h("span.zooms", near("nearer", "+", 0.5), near("farther", "−", 2), near("whole", "⤢", 0));
  const effects = SHOWS.map((name) => [name, t(`shows ${name}`)]);
  const show = (/** @type {any} */ shows) => {
    state.shows = shows;
    look.again().then(() => byId("shows")?.focus());
  };
  const shown = hasEffects(head.layer, state.address.head) && choice(t("shows"), "shows", effects, state.shows, show);
  return h("div.picks.controls", zooms, shown);
}
