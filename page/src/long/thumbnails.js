// A small picture of each head, computed or stored, painted one after the other while the page stays responsive. Those of
// a layer share a canvas, since each canvas on a page takes the browser time in every frame.

import { MASKED } from "../attention.js";
import { colour, fill, penOf, pixelOf } from "../canvas.js";
import { rgb, weighed } from "../colour.js";
import { breathe, h } from "../dom.js";
import { firstPixel, openHead, pixel, rowOf } from "./source.js";
import { surveyOf } from "./survey.js";

const SIDE = 64;
const MARGIN = 3; // around a picture of SIDE: long.css has the same
const SLICE = 8; // milliseconds
const sheet = /** @type {HTMLCanvasElement} */ (h("canvas"));

/** @param {Page} page */
export function thumbnails(page) {
  /** @type {Map<string, HTMLCanvasElement>} by run and layer */
  const strips = new Map();
  const stripOf = (/** @type {Address} */ { run, layer }) => strips.get(`${run} ${layer}`);
  /** @type {Address[]} */
  const waiting = [];
  let [ready, painting] = [false, false];
  async function work() {
    if (!ready || painting) return;
    painting = true;
    for (let next = waiting.shift(); next; next = waiting.shift()) {
      const strip = /** @type {HTMLCanvasElement} */ (stripOf(next));
      const head = await openHead(page, next).catch(() => null);
      if (head) await paint(strip, head).catch(() => null);
      strip.dataset.missing = String(waiting.filter((other) => stripOf(other) === strip).length);
      await breathe();
    }
    painting = false;
  }
  return {
    /** A layer's pictures, side by side. @param {number} run @param {number} layer @param {number} heads */
    of(run, layer, heads) {
      const known = strips.get(`${run} ${layer}`);
      if (known) return known;
      const strip = /** @type {HTMLCanvasElement} */ (
        h("canvas", {
          width: 1,
          height: 1,
          "data-missing": heads,
          style: { "grid-area": `${layer + 1} / 2 / auto / span ${heads}`, "aspect-ratio": heads },
        })
      );
      strips.set(`${run} ${layer}`, strip);
      for (let head = 0; head < heads; head++) waiting.push({ run, layer, head });
      work();
      return strip;
    },
    /** The numbers of the run are others: all are painted again. */
    again() {
      waiting.length = 0;
      for (const [place, strip] of strips) {
        const [run, layer] = place.split(" ").map(Number);
        const { length } = page.header.runs[run].layers[layer].heads;
        for (let head = 0; head < length; head++) waiting.push({ run, layer, head });
        strip.dataset.missing = String(length);
      }
      work();
    },
    /** The map is drawn, so there is time for the others. */
    start() {
      ready = true;
      work();
    },
  };
}

/** @param {HTMLCanvasElement} strip @param {Head} head */
async function paint(strip, head) {
  const { rows, cols, values } = head.small ? stored(head, head.small) : await sampled(head);
  const { layer, address } = head;
  const shade = weighed(layer.reach?.[address.head] ?? (await surveyOf(head)).whole);
  fill(cols, rows, (pixels) => colour(pixels, values, shade, pixelOf(rgb("hatch-ground"))), sheet);
  const cell = (SIDE + 2 * MARGIN) / SIDE; // beside a picture of 1
  const count = layer.heads.length;
  if (strip.width === 1) {
    const whole = (/** @type {number} */ pixels) => pixels * Math.ceil(SIDE / pixels); // each as large as the others
    strip.width = Math.round(whole(cols) * cell * count);
    strip.height = Math.round(whole(rows) * cell);
  }
  const [wide, high] = [strip.width / cell / count, strip.height / cell];
  const pen = penOf(strip);
  pen.imageSmoothingEnabled = false;
  const [left, top] = [wide * (address.head * cell + MARGIN / SIDE), (high * MARGIN) / SIDE];
  pen.drawImage(sheet, Math.round(left), Math.round(top), Math.round(wide), Math.round(high));
}

/** @param {Head} head @param {Picture} p */
function stored({ first, m }, p) {
  const [rows, cols] = p.pixels;
  const firstCol = Math.floor((first * cols) / m);
  const values = Float32Array.from({ length: rows * cols }, (_, index) => {
    const [row, col] = [Math.floor(index / cols), index % cols];
    const { value } = pixel(p, row, col);
    return col === firstCol ? Math.max(value, firstPixel(p, row).value) : value;
  });
  return { rows, cols, values };
}

/** The weights of at most 64 queries; of keys that share a pixel the largest. @param {Head} head */
async function sampled(head) {
  const { n, m } = head;
  const [rows, cols] = [Math.min(n, SIDE), Math.min(m, SIDE)];
  const values = new Float32Array(rows * cols).fill(MASKED);
  let since = performance.now();
  for (let row = 0; row < rows; row++) {
    if (performance.now() - since > SLICE) {
      await breathe();
      since = performance.now();
    }
    const line = await rowOf(head, Math.floor(((row + 0.5) * n) / rows));
    if (line)
      for (let j = 0; j < m; j++) {
        const index = row * cols + Math.floor((j * cols) / m);
        if (!(line[j] <= values[index])) values[index] = line[j];
      }
  }
  return { rows, cols, values };
}
