// What is shown, in the page's address, so that a link leads back to it: the place on the map, the text that the page's
// own model runs and what is changed, the step.

import { unchanged } from "./model/attention.js";

/** The parts of the address now. */
export const parts = () => new URLSearchParams(location.hash.slice(1));

/** @type {Record<string, string | null>} */
let waiting = {};
/** @type {ReturnType<typeof setTimeout> | undefined} */
let later;
addEventListener("hashchange", () => (waiting = {})); // the reader went elsewhere

/** Writes parts of the address soon and leaves the others; null takes one away. Many moves of the pointer are one change. @param {Record<string, string | null>} more */
function write(more) {
  Object.assign(waiting, more);
  clearTimeout(later);
  later = setTimeout(() => {
    const now = parts();
    for (const [name, value] of Object.entries(waiting)) {
      if (value === null) now.delete(name);
      else now.set(name, value);
    }
    waiting = {};
    const link = `#${now}`.replace(/=(?=&|$)/g, "");
    try {
      if (link !== location.hash) history.replaceState(null, "", link);
    } catch {
      // a frame without an address has no links
    }
  }, 150);
}

/** The place on the map. @param {Look} look */
export function toLink({ state, chosen: { run, layer, head, query, key } }) {
  if (state.quiet) return;
  const { view } = state;
  write({
    ["at"]: `${run}.${layer}.${head}`,
    ["cell"]: `${query}.${key}`,
    ["view"]: view && [view.y, view.x, view.step].map((x) => Number(x.toPrecision(6))).join("_"),
  });
}

/** @param {string} name @param {string} by */
const numbers = (name, by) => (parts().get(name) ?? "").split(by).map(Number);

/** The query and the key that the address names. */
export const cellHere = () => numbers("cell", ".");

/** @param {Look["state"]} state @param {Chosen} chosen @param {Header["runs"]} runs */
export function fromLink(state, chosen, runs) {
  const [run, layer, head] = numbers("at", ".");
  const shown = runs[run]?.layers[layer];
  if (shown?.heads[head] === undefined) return;
  Object.assign(chosen, { run, layer, head });
  const [query, key] = cellHere();
  if (query >= 0 && query < shown.queries && key >= 0 && key < shown.keys) {
    Object.assign(chosen, { query, key });
    state.pinned = true;
  }
  const [y, x, step] = numbers("view", "_");
  if (y >= 0 && x >= 0 && step > 0) state.view = { y, x, step };
}

/** Is the run as the model is trained to be run? @param {Change} change */
export const isUnchanged = (change) => JSON.stringify(change) === JSON.stringify(unchanged());

/** @param {string | null} text      null: that of the page @param {Change} change */
export function toAddress(text, change) {
  const usual = /** @type {Record<string, any>} */ (unchanged());
  const said = Object.entries(change).map(([name, value]) => {
    const places = [value].flat().map((each) => [each].flat().join("."));
    return [name, JSON.stringify(value) === JSON.stringify(usual[name]) ? null : places.join("_")];
  });
  write({ ["try"]: text, ...Object.fromEntries(said) });
}

/** The text and the change that the address says, else those of the page. @param {string} text @returns {{text: string, change: Change}} */
export function fromAddress(text) {
  const [now, change] = [parts(), unchanged()];
  const places = (/** @type {string} */ name, /** @type {number} */ count) =>
    (now.get(name)?.match(/[^_]+/g) ?? [])
      .map((place) => place.split(".").map(Number))
      .filter((place) => place.length === count && place.every((each) => each >= 0));
  change.hidden = places("hidden", 1).flat();
  change.cuts = /** @type {Change["cuts"]} */ (places("cuts", 4));
  change.off = /** @type {Change["off"]} */ (places("off", 2));
  const [scale, over] = [now.get("scale"), now.get("over")];
  if (scale === "none" || scale === "d_k") change.scale = scale;
  if (over === "columns" || over === "all") change.over = over;
  change.causal = now.get("causal") !== "false";
  const warm = Number(now.get("temperature") ?? 1);
  if (warm > 0 && warm < 1000) change.temperature = warm;
  return { text: now.get("try") ?? text, change };
}

/** The step that the address names. */
export const stepHere = () => [...parts().keys()].find((name) => name.startsWith("step-"))?.replace("step-", "");

export function toStep(/** @type {string} */ step) {
  const others = [...parts().keys(), ...Object.keys(waiting)].filter((name) => name.startsWith("step-"));
  write({ ...Object.fromEntries(others.map((name) => [name, null])), [`step-${step}`]: "" });
}

/** The stop of the tour, or null. @param {number | null} stop */
export const toStop = (stop) => write({ ["tour"]: stop === null ? null : String(stop) });
