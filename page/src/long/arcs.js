// Arcs over the text, from a query to what it attends to.

import { svg } from "../dom.js";

/** @typedef {[key: number, weight: number]} Arc      weight 0: it is cut */

/** @type {WeakMap<Element, Map<number, number[] | undefined>>} where the middle of a token's top is, in its text */
const known = new WeakMap();

/** Where tokens were is not where they are. @param {Element} box      of the text */
export const forgetPlaces = (box) => void known.set(box, new Map());

/** @param {HTMLElement} text @param {number} query @param {Arc[]} looks @param {((key: number) => void) | null} [act]      what a click on an arc does */
export function drawArcs(text, query, looks, act = null) {
  const box = text.querySelector(".passage");
  if (!box) return;
  const places = known.get(box) ?? new Map();
  known.set(box, places);
  const topOf = (/** @type {number} */ token) => {
    if (places.has(token)) return places.get(token);
    const corner = box.getBoundingClientRect();
    const place = box.querySelector(`[data-token="${token}"]`)?.getClientRects()[0];
    const top = place && [place.left + place.width / 2 - corner.left, place.top - corner.top + box.scrollTop];
    places.set(token, top);
    return top;
  };
  const to = topOf(query);
  const arcs = looks.map(([key, weight]) => {
    const from = topOf(key);
    if (!from || !to) return null;
    const [x, y] = key === query ? [from[0] - 12, from[1]] : from;
    const lift = 8 + Math.min(16, Math.abs(to[0] - x) / 12);
    const d = `M${to[0]} ${to[1]}C${to[0]} ${to[1] - lift} ${x} ${y - lift} ${x} ${y}`;
    const look = { "stroke-width": (1 + 4 * weight).toFixed(1), opacity: Math.sqrt(weight).toFixed(2) };
    return [
      weight ? svg("path", { d, ...look }) : svg("path.cut", { d }),
      act && svg("path.wide", { d, onclick: () => act(key) }),
    ];
  });
  box.querySelector("svg")?.remove();
  box.prepend(svg("svg.edges", { "aria-hidden": "true" }, arcs));
}
