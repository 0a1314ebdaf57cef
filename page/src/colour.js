// Colours of numbers. Every colour is a custom property of base.css, so a theme is changed in one place.

import { h } from "./dom.js";

const probe = h("i", { hidden: true });
/** @type {Map<string, number[]>} */
const known = new Map();

/** To be called when the theme changes. */
export const forgetColours = () => known.clear();

/** The red, green and blue of a custom property as it stands now, in this theme. @param {string} name */
export function rgb(name) {
  const kept = known.get(name);
  if (kept) return kept;
  document.body.append(probe);
  probe.style.setProperty("forced-color-adjust", "none");
  probe.style.color = `var(--${name})`;
  const made = (getComputedStyle(probe).color.match(/[\d.]+/g) ?? []).slice(0, 3).map(Number);
  known.set(name, made);
  return made;
}

/** @param {number[]} a @param {number[]} b @param {number} t */
const mix = (a, b, t) => [0, 1, 2].map((c) => a[c] + (b[c] - a[c]) * t);

/** @param {number[][]} stops @param {number} t */
function along(stops, t) {
  if (Number.isNaN(t)) return rgb("warn");
  const place = Math.min(Math.max(t, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  return mix(stops[low], stops[low + 1], place - low);
}

/**
 * Colours of signed numbers: paper at 0, the role's colour above, its opposite below; the same on both sides.
 * @param {string} role @param {number} most @param {Shade["kind"]} [kind] @returns {Shade}
 */
export function signed(role, most, kind = "linear") {
  const stops = [rgb(`${role}-minus`), rgb("paper"), rgb(role)];
  const size = most || 1;
  const shape = weighed(size, kind).shade;
  const shade = (/** @type {number} */ x) => 0.5 + (x < 0 ? -shape(-x) : shape(x)) / 2;
  return {
    low: -size,
    high: size,
    shade,
    colour: (x) => along(stops, shade(x)),
    along: (t) => along(stops, t),
    kind: "linear",
  };
}

/**
 * Colours of weights, 0 to 1; by the square root, since on a linear scale few large weights hide all others.
 * @param {number} [most] @param {Shade["kind"]} [kind] @returns {Shade}
 */
export function weighed(most = 1, kind = "sqrt") {
  const stops = ["weights-0", "weights-1", "weights-2", "weights-3"].map(rgb);
  const shade = (/** @type {number} */ x) =>
    kind === "sqrt" ? Math.sqrt(Math.max(x / (most || 1), 0)) : x / (most || 1);
  return { low: 0, high: most, shade, colour: (x) => along(stops, shade(x)), along: (t) => along(stops, t), kind };
}

/** @param {number[]} c */
export const css = (c) => `rgb(${Math.round(c[0])} ${Math.round(c[1])} ${Math.round(c[2])})`;

/** Does dark or light ink read better on this colour? @param {number[]} c */
export function inkOn(c) {
  const [r, g, b] = c.map((x) => ((x / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "dark" : "light";
}
