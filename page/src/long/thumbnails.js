// A small picture of each head, computed or stored, painted one after the other while the page stays responsive.

import { MASKED } from "../attention.js";
import { rgb, weighed } from "../colour.js";
import { breathe, h } from "../dom.js";
import { fill } from "./coloured.js";
import { firstPixel, headAt, openHead, pixel, rowOf } from "./source.js";

/** @typedef {import("./source.js").Address} Address */
/** @typedef {import("./source.js").Head} Head */

const SIDE = 64;
const SLICE = 8; // milliseconds

/** @param {import("../container.js").Page} page */
export function thumbnails(page) {
  /** @type {Map<string, HTMLCanvasElement>} */
  const canvases = new Map();
  /** @type {Address[]} */
  const waiting = [];
  let [ready, painting] = [false, false];
  /** @type {Head | null} the head that is shown under a supposition */
  let supposed = null;
  const repaint = (/** @type {Head} */ head) => {
    const canvas = canvases.get(Object.values(head.address).join(" "));
    if (canvas && ready) paint(canvas, head).catch(() => null);
  };
  async function work() {
    if (!ready || painting) return;
    painting = true;
    for (let next = waiting.shift(); next; next = waiting.shift()) {
      const canvas = canvases.get(Object.values(next).join(" "));
      const head = await openHead(page, next).catch(() => null);
      if (head && canvas) await paint(canvas, supposed && sameKey(supposed, head) ? supposed : head).catch(() => null);
      await breathe();
    }
    painting = false;
  }
  return {
    /** @param {Address} address */
    of(address) {
      const key = Object.values(address).join(" ");
      const canvas = canvases.get(key) ?? /** @type {HTMLCanvasElement} */ (h("canvas", { width: 1, height: 1 }));
      if (!canvases.has(key)) waiting.push(address);
      canvases.set(key, canvas);
      work();
      return canvas;
    },
    /** @param {Head} head      the chosen one, under a supposition or as it ran */
    shownAs(head) {
      const before = supposed;
      supposed = head.supposition ? head : null;
      if (before && !sameKey(before, head)) headAt(page, before.address).then(repaint, () => null);
      if (supposed || before) repaint(head);
    },
    /** The map is drawn, so there is time for the others. */
    start() {
      ready = true;
      work();
    },
  };
}

/** @param {Head} a @param {Head} b */
const sameKey = (a, b) => String(Object.values(a.address)) === String(Object.values(b.address));

/** @param {HTMLCanvasElement} canvas @param {Head} head */
async function paint(canvas, head) {
  const { rows, cols, values } = head.small.most ? stored(head) : await sampled(head);
  const { whole } = head.layer.reach;
  const shade = weighed(whole[head.address.head]);
  const paper = rgb("hatch-ground");
  fill(canvas, cols, rows, (at) => (values[at] === MASKED ? paper : shade.at(values[at])));
}

/** @param {Head} head */
function stored({ small: { most: p }, first, m }) {
  const [rows, cols] = p.pixels;
  const own = Math.floor((first * cols) / m);
  const values = Float32Array.from({ length: rows * cols }, (_, at) => {
    const [row, col] = [Math.floor(at / cols), at % cols];
    const { value } = pixel(p, row, col);
    return col === own ? Math.max(value, firstPixel(p, row).value) : value;
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
        const at = row * cols + Math.floor((j * cols) / m);
        if (!(line[j] <= values[at])) values[at] = line[j];
      }
  }
  return { rows, cols, values };
}
