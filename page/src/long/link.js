// Keeps what is shown in the page's address, so that a link leads back to it.

import { SHOWS } from "./effects.js";
import { PICTURES } from "./grid.js";

/** @type {ReturnType<typeof setTimeout> | undefined} */
let later;

/** Soon: many moves of the pointer are one change of the address, and none waits for it. @param {any} state */
export function linkSoon(state) {
  clearTimeout(later);
  later = setTimeout(() => toLink(state), 150);
}

/** @param {any} state */
export function toLink(state) {
  if (state.quiet) return;
  const { address, query, key, view, aside, statistic, shows } = state;
  const place = [
    `at=${address.run}.${address.layer}.${address.head}`,
    `cell=${query}.${key}`,
    `by=${statistic}`,
    `show=${Number(aside)}.${shows}`,
  ];
  if (view) place.push(`view=${[view.y, view.x, view.step].map((x) => Number(x.toPrecision(6))).join("_")}`);
  const link = `#${place.join("&")}`;
  try {
    if (link !== location.hash) history.replaceState(null, "", link);
  } catch {
    // a frame without an address has no links
  }
}

/** @param {any} state @param {any[]} runs */
export function fromLink(state, runs) {
  const parts = new URLSearchParams(location.hash.slice(1));
  const numbers = (/** @type {string} */ name, /** @type {string} */ by) =>
    (parts.get(name) ?? "").split(by).map(Number);
  const [run, layer, head] = numbers("at", ".");
  if (runs[run]?.layers[layer]?.heads[head] === undefined) return;
  state.address = { run, layer, head };
  const [query, key] = numbers("cell", ".");
  const layerShown = runs[run].layers[layer];
  if (query >= 0 && query < layerShown.queries && key >= 0 && key < layerShown.keys)
    Object.assign(state, { query, key, pinned: true });
  const [y, x, step] = numbers("view", "_");
  if (y >= 0 && x >= 0 && step > 0) state.view = { y, x, step };
  const [aside, shows] = (parts.get("show") ?? "").split(".");
  if (layerShown.statistics.effect && SHOWS.includes(shows)) state.shows = shows;
  state.aside = aside === "1";
  if (Object.hasOwn({ ...layerShown.statistics, [PICTURES]: 0 }, parts.get("by") ?? ""))
    state.statistic = parts.get("by");
}
