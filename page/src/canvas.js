// Canvases: their pens, and images of pixels.

import { MASKED } from "./attention.js";
import { css, rgb } from "./colour.js";

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
  const tile = document.createElement("canvas");
  resize(tile, 6, 6);
  const ink = penOf(tile);
  ink.fillStyle = css(rgb("hatch-ground"));
  ink.fillRect(0, 0, 6, 6);
  ink.strokeStyle = css(rgb("hatch"));
  ink.beginPath();
  for (const index of [-6, 0, 6]) {
    ink.moveTo(index, 6);
    ink.lineTo(index + 6, 0);
  }
  ink.stroke();
  return /** @type {CanvasPattern} */ (pen.createPattern(tile, "repeat"));
}
