// A small picture of each head, computed or stored, painted one after the other while the page stays responsive. Those of
// a layer share a canvas, since each canvas on a page takes the browser time in every frame.

import { MASKED } from "../attention.js";
import { colour, fill, penOf, pixelOf, rgb, weighed } from "../colour.js";
import { breathe, h, later, pacer } from "../dom.js";
import { kept } from "../numbers.js";
import { paintPicture } from "./map.js";
import { openHead, rowOf } from "./source.js";
import { surveyOf } from "./tiles.js";

const SIDE = 64;
const MARGIN = 3; // around a picture of SIDE: long.css has the same
const sheet = h("canvas");

export function thumbnails(/** @type {Page} */ page) {
  /** @type {Map<string, HTMLCanvasElement>} by run and layer */
  const strips = new Map();
  /** @type {Set<string>} */
  const waiting = new Set();
  let [ready, painting] = [false, false];
  async function work() {
    if (!ready || painting) return;
    painting = true;
    for (const place of waiting) {
      waiting.delete(place);
      const strip = /** @type {HTMLCanvasElement} */ (strips.get(place));
      const [run, layer] = place.split(" ").map(Number);
      for (const head of page.header.runs[run].layers[layer].heads.keys()) {
        if (waiting.has(place)) break; // of another run by now
        const opened = await openHead(page, { run, layer, head }).catch(() => null);
        if (opened) await paint(strip, opened).catch(() => null);
        await breathe();
      }
      strip.dataset.missing = String(Number(waiting.has(place)));
    }
    painting = false;
  }
  const wait = (/** @type {string} */ place) => {
    waiting.add(place);
    work();
  };
  return {
    /** A layer's pictures, side by side. @param {number} run @param {number} layer @param {number} heads */
    of(run, layer, heads) {
      return kept(strips, `${run} ${layer}`, () => {
        const style = { "grid-area": `${layer + 1} / 2 / auto / span ${heads}`, "aspect-ratio": heads };
        later(() => wait(`${run} ${layer}`));
        return h("canvas", { width: 1, height: 1, "data-missing": 1, style });
      });
    },
    /** The numbers of the run are others: all are painted again. */
    again: () => [...strips.keys()].forEach(wait),
    /** The map is drawn, so there is time for the others. */
    start() {
      ready = true;
      work();
    },
  };
}

async function paint(/** @type {HTMLCanvasElement} */ strip, /** @type {Head} */ head) {
  const { layer, address, small, n, m } = head;
  const ground = pixelOf(rgb("hatch-ground"));
  const values = small ? null : await sampled(head);
  const shade = weighed(layer.reach?.[address.head] ?? (await surveyOf(head)).whole);
  const [rows, cols] = small ? [small.rows, small.cols] : [Math.min(n, SIDE), Math.min(m, SIDE)];
  const pixels = (/** @type {Uint32Array} */ out) =>
    small ? paintPicture(head, small, shade, ground, out) : colour(out, /** @type {any} */ (values), shade, ground);
  fill(cols, rows, pixels, sheet);
  const cell = (SIDE + 2 * MARGIN) / SIDE; // beside a picture of 1
  const whole = (/** @type {number} */ size) => size * Math.ceil(SIDE / size); // each as large as the others
  if (strip.width === 1)
    Object.assign(strip, {
      width: Math.round(whole(cols) * cell * layer.heads.length),
      height: Math.round(whole(rows) * cell),
    });
  const [wide, high] = [strip.width / cell / layer.heads.length, strip.height / cell];
  const pen = penOf(strip);
  pen.imageSmoothingEnabled = false;
  const [left, top] = [wide * (address.head * cell + MARGIN / SIDE), (high * MARGIN) / SIDE];
  pen.drawImage(sheet, Math.round(left), Math.round(top), Math.round(wide), Math.round(high));
}

/** The weights of at most 64 queries; of keys that share a pixel the largest. @param {Head} head */
async function sampled(head) {
  const { n, m } = head;
  const [rows, cols] = [Math.min(n, SIDE), Math.min(m, SIDE)];
  const values = new Float32Array(rows * cols).fill(MASKED);
  const pause = pacer();
  for (let row = 0; row < rows; row++) {
    await pause();
    const line = await rowOf(head, Math.floor(((row + 0.5) * n) / rows));
    line?.forEach((x, j) => {
      const index = row * cols + Math.floor((j * cols) / m);
      if (!(x <= values[index])) values[index] = x;
    });
  }
  return values;
}
