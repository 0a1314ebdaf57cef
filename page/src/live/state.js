// What the reader typed and changed, and how the page's address says it, so that a link leads back to it.

import { unchanged } from "../model/attention.js";

const NAME = "try";

/** Is the run as the model is trained to be run? @param {Change} change */
export const isUnchanged = (change) => JSON.stringify(change) === JSON.stringify(unchanged());

/** @param {string} text @param {Change} change */
export function toAddress(text, change) {
  const [usual, parts] = [unchanged(), new URLSearchParams({ [NAME]: text })];
  for (const [name, value] of Object.entries(change))
    if (JSON.stringify(value) !== JSON.stringify(usual[/** @type {keyof Change} */ (name)]))
      parts.set(name, Array.isArray(value) ? value.map((each) => [each].flat().join(".")).join("_") : String(value));
  try {
    history.replaceState(null, "", `#${parts}`);
  } catch {
    // a frame without an address has no links
  }
}

/** The text and the change of an address, or null where it says none. @returns {{text: string, change: Change} | null} */
export function fromAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const [text, change] = [parts.get(NAME), unchanged()];
  if (text === null) return null;
  const places = (/** @type {string} */ name, /** @type {number} */ count) =>
    (parts.get(name)?.match(/[^_]+/g) ?? [])
      .map((place) => place.split(".").map(Number))
      .filter((place) => place.length === count && place.every((each) => each >= 0));
  change.hidden = places("hidden", 1).flat();
  change.cuts = /** @type {Change["cuts"]} */ (places("cuts", 4));
  change.off = /** @type {Change["off"]} */ (places("off", 2));
  const [scale, over] = [parts.get("scale"), parts.get("over")];
  if (scale === "none" || scale === "d_k") change.scale = scale;
  if (over === "columns" || over === "all") change.over = over;
  change.causal = parts.get("causal") !== "false";
  const warm = Number(parts.get("temperature") ?? 1);
  if (warm > 0 && warm < 1000) change.temperature = warm;
  return { text, change };
}

/** A list without a place that it has, or with one that it has not. @template T @param {T[]} list @param {T} place */
export function toggled(list, place) {
  const without = list.filter((each) => String(each) !== String(place));
  return without.length < list.length ? without : [...list, place];
}

/** Is a place in a list? @param {any[]} list @param {any} place */
export const has = (list, place) => list.some((each) => String(each) === String(place));
