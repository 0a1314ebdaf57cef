// Colours of numbers, and canvases that show them. Every colour is a custom property of base.css, so a theme is changed in
// one place.

import { MASKED } from "./attention.js";
import { h } from "./dom.js";
import { kept } from "./numbers.js";

const probe = h("i", { hidden: true });
/** @type {Map<string, any>} */
const known = new Map(); // colours by name, and what is painted with them

/** To be called when the theme changes. */
export const forgetColours = () => known.clear();

/** The red, green and blue of a custom property as it stands now, in this theme. @param {string} name */
export const rgb = (name) =>
  kept(known, name, () => {
    document.body.append(probe);
    probe.style.setProperty("forced-color-adjust", "none");
    probe.style.color = `var(--${name})`;
    return (getComputedStyle(probe).color.match(/[\d.]+/g) ?? []).slice(0, 3).map(Number);
  });

/** @param {number[]} a @param {number[]} b @param {number} t */
const mix = (a, b, t) => [0, 1, 2].map((c) => a[c] + (b[c] - a[c]) * t);

function along(/** @type {number[][]} */ stops, /** @type {number} */ t) {
  if (Number.isNaN(t)) return rgb("warn");
  const place = Math.min(Math.max(t, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  return mix(stops[low], stops[low + 1], place - low);
}

/** @param {string[]} names      of colours, from low to high @param {number} low @param {number} high @param {(x: number) => number} shade */
function scaleOf(names, low, high, shade) {
  const stops = names.map(rgb);
  const at = (/** @type {number} */ t) => along(stops, t);
  return { low, high, shade, along: at, colour: (/** @type {number} */ x) => at(shade(x)) };
}

/** Colours of weights, 0 to 1; by the square root, since on a linear scale few large weights hide all others. */
export const weighed = (most = 1) =>
  scaleOf(["weights-0", "weights-1", "weights-2", "weights-3"], 0, most, (x) =>
    Math.sqrt(Math.max(x / (most || 1), 0)),
  );

/**
 * Colours of signed numbers: paper at 0, the role's colour above, its opposite below; the same on both sides.
 * @param {string} role @param {number} most @param {boolean} [root]      by the square root
 */
export function signed(role, most, root) {
  const size = most || 1;
  const part = (/** @type {number} */ x) => (root ? Math.sqrt(x / size) : x / size);
  const shade = (/** @type {number} */ x) => 0.5 + (x < 0 ? -part(-x) : part(x)) / 2;
  return scaleOf([`${role}-minus`, "paper", role], -size, size, shade);
}

export const css = (/** @type {number[]} */ c) => `rgb(${Math.round(c[0])} ${Math.round(c[1])} ${Math.round(c[2])})`;

/** Does dark or light ink read better on this colour? @param {number[]} c */
export function inkOn(c) {
  const [r, g, b] = c.map((x) => ((x / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "dark" : "light";
}

/** @param {HTMLCanvasElement} canvas */
export const penOf = (canvas) => /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));

/** An element's size on the page. @param {HTMLElement | SVGElement} element @param {number} wide @param {number} high */
export function sized({ style }, wide, high) {
  style.width = `${wide}px`;
  style.height = `${high}px`;
}

/** The pen of an empty canvas of a size in pixels of the page; its memory is new only where its size is. @param {HTMLCanvasElement} canvas @param {number} wide @param {number} high @param {boolean} [styled]      the style sheet says its size */
export function penOn(canvas, wide, high, styled) {
  if (!styled) sized(canvas, wide, high);
  const dense = Math.min(3, Math.max(1, devicePixelRatio));
  resize(canvas, Math.ceil(wide * dense), Math.ceil(high * dense));
  const pen = penOf(canvas);
  pen.setTransform(dense, 0, 0, dense, 0, 0);
  pen.clearRect(0, 0, wide, high);
  pen.font = "11px system-ui, sans-serif";
  return pen;
}

/** @param {HTMLCanvasElement} canvas @param {number} wide @param {number} high */
function resize(canvas, wide, high) {
  if (canvas.width !== wide) canvas.width = wide;
  if (canvas.height !== high) canvas.height = high;
}

/** A colour as a pixel of an image. @param {number[]} c */
export const pixelOf = ([r, g, b]) => (255 << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r);

/** The latest pixels, which are written again where the next image has the same size. */
let image = new ImageData(1, 1);

/** Fills a canvas with the pixels that `paint` writes, which is all of them; 0 is transparent. @param {number} wide @param {number} high @param {(pixels: Uint32Array) => void} paint @param {HTMLCanvasElement} [sheet] */
export function fill(wide, high, paint, sheet = document.createElement("canvas")) {
  if (image.width !== wide || image.height !== high) image = new ImageData(wide, high);
  paint(new Uint32Array(image.data.buffer));
  resize(sheet, wide, high);
  penOf(sheet).putImageData(image, 0, 0);
  return sheet;
}

/** The pixels of values, with the 256 colours of a scale, since the map has as many in every frame; yellow where they are not finite. @param {Uint32Array} pixels @param {ArrayLike<number>} values @param {Shade} shade @param {number} masked      the pixel of masked ones @param {number} [mark]      the value that stands for masked */
export function colour(pixels, values, { along, shade }, masked, mark = MASKED) {
  const table = Uint32Array.from({ length: 257 }, (_, index) =>
    pixelOf(index > 255 ? rgb("warn") : along(index / 255)),
  );
  for (let index = 0; index < pixels.length; index++) {
    const x = values[index];
    pixels[index] = masked;
    if (x === mark) continue;
    const place = shade(x) * 255;
    pixels[index] = table[!Number.isFinite(x) ? 256 : place > 255 ? 255 : place > 0 ? (place + 0.5) | 0 : 0];
  }
}

/** Fills each column of a canvas with a colour. @param {HTMLCanvasElement} canvas @param {(x: number) => number[]} colourAt */
export function drawColours(canvas, colourAt) {
  const pen = penOf(canvas);
  for (let x = 0; x < canvas.width; x++) {
    pen.fillStyle = css(colourAt(x));
    pen.fillRect(x, 0, 1, canvas.height);
  }
}

/** Diagonal lines for masked cells, which are not the same as weight 0. @param {CanvasRenderingContext2D} pen @returns {CanvasPattern} */
export function hatching(pen) {
  const tile = kept(known, "hatched", () => {
    const [line, ground] = ["hatch", "hatch-ground"].map((name) => pixelOf(rgb(name)));
    return fill(6, 6, (pixels) =>
      pixels.forEach((_, at) => (pixels[at] = (at + ((at / 6) | 0)) % 6 === 5 ? line : ground)),
    );
  });
  return /** @type {CanvasPattern} */ (pen.createPattern(tile, "repeat"));
}
