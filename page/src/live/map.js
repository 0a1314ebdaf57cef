// The weights of the live run: every head as a small picture, and the chosen head's map, whose squares are edges to cut.

import { fill, penOn, pixelOf } from "../canvas.js";
import { rgb, weighed } from "../colour.js";
import { ARROWS, h } from "../dom.js";
import { spelled } from "../numbers.js";

/** Draws weights, one pixel each. @param {HTMLCanvasElement} canvas @param {Attention} attention @param {number} n */
export function picture(canvas, { weights, seen }, n) {
  const [shade, hatch] = [weighed(1), pixelOf(rgb("hatch-ground"))];
  fill(
    n,
    n,
    (pixels) => {
      for (let at = 0; at < n * n; at++) pixels[at] = seen[at] ? pixelOf(shade.colour(weights[at])) : hatch;
    },
    canvas,
  );
}

/**
 * The map: a click, or c where the cursor is, cuts an edge or puts it back.
 * @param {Say} t @param {(query: number, key: number) => void} cut @param {(words: string) => void} say
 */
export function liveMap(t, cut, say) {
  const canvas = h("canvas");
  const box = h("div.live-map", { tabindex: 0, role: "application", "aria-label": t("try map") }, canvas);
  const read = h("p.note");
  /** @type {(Attention & {n: number, names: string[], isCut: Test}) | null} */
  let shown = null;
  let cursor = [0, 0];
  let side = 12;

  function draw() {
    if (!shown) return;
    const { weights, seen, n, names, isCut } = shown;
    side = Math.max(3, Math.min(28, Math.floor(Math.min(box.clientWidth || 336, 336) / n)));
    cursor = cursor.map((place) => Math.min(place, n - 1));
    const small = h("canvas");
    picture(small, shown, n);
    const pen = penOn(canvas, n * side, n * side);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, 0, 0, n * side, n * side);
    pen.strokeStyle = pen.fillStyle = getComputedStyle(box).color;
    const [i, j] = cursor;
    pen.strokeRect(j * side + 0.5, i * side + 0.5, side - 1, side - 1);
    for (let at = 0; at < n * n; at++)
      if (isCut(Math.floor(at / n), at % n))
        pen.fillText("×", (at % n) * side + side / 2 - 3, (Math.floor(at / n) + 0.7) * side);
    const state = isCut(i, j) ? t("try cut") : seen[i * n + j] ? weights[i * n + j].toFixed(4) : t("masked cell");
    read.textContent = `${spelled(names[i])} → ${spelled(names[j])}: ${state}`;
  }

  /** @param {number} i @param {number} j */
  function move(i, j) {
    const n = shown?.n ?? 1;
    cursor = [i, j].map((place) => Math.min(Math.max(place, 0), n - 1));
    draw();
    say(read.textContent ?? "");
  }
  const at = (/** @type {PointerEvent} */ { offsetX, offsetY }) =>
    move(Math.floor(offsetY / side), Math.floor(offsetX / side));
  const cutHere = () => cut(cursor[0], cursor[1]);
  canvas.addEventListener("pointermove", at);
  canvas.addEventListener("click", (event) => (at(/** @type {PointerEvent} */ (event)), cutHere()));
  box.addEventListener("keydown", (event) => {
    const by = ARROWS[event.key];
    if (!by) return;
    move(cursor[0] + by[0], cursor[1] + by[1]);
    event.preventDefault();
  });
  return {
    element: h("div", box, read),
    cutHere,
    /** @param {NonNullable<typeof shown>} now */
    show(now) {
      if (now.n !== shown?.n) cursor = [now.n - 1, 0];
      shown = now;
      draw();
    },
  };
}
