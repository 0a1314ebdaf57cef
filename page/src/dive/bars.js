// A query's weights as bars, with the run's own as outlines where something is supposed.

import { css, rgb } from "../colour.js";

const HIGH = 72;

/**
 * @param {HTMLCanvasElement} canvas
 * @param {ArrayLike<number>} weights
 * @param {ArrayLike<number> | null} ghost
 * @param {number} chosen
 */
export function drawBars(canvas, weights, ghost, chosen) {
  const dense = window.devicePixelRatio || 1;
  const wide = Math.max(60, canvas.clientWidth || 600);
  if (canvas.width !== Math.round(wide * dense)) {
    canvas.width = Math.round(wide * dense);
    canvas.height = HIGH * dense;
  }
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  pen.setTransform(dense, 0, 0, dense, 0, 0);
  pen.clearRect(0, 0, wide, HIGH);
  const each = Math.max(1, Math.ceil(weights.length / (2 * wide))); // keys that share a bar: the largest of them
  const pooled = (/** @type {ArrayLike<number>} */ all) => {
    const found = new Float64Array(Math.ceil(all.length / each));
    for (let j = 0; j < all.length; j++) {
      const at = Math.floor(j / each);
      if (all[j] > found[at] && all[j] < Infinity) found[at] = all[j];
    }
    return found;
  };
  const [bars, ghosts] = [pooled(weights), ghost && pooled(ghost)];
  const size = Math.min(48, wide / bars.length);
  let most = 0;
  for (const some of ghosts ? [bars, ghosts] : [bars]) for (const a of some) most = Math.max(most, a);
  const high = (/** @type {number} */ a) => (most ? Math.max(a > 0 ? 1 : 0, (a / most) * (HIGH - 2)) : 0);
  const gap = size > 4 ? 1 : 0;
  const own = Math.floor(chosen / each);
  pen.fillStyle = css(rgb("weights"));
  for (let j = 0; j < bars.length; j++)
    if (bars[j] && j !== own) pen.fillRect(j * size, HIGH - high(bars[j]), Math.max(size - gap, 0.5), high(bars[j]));
  pen.fillStyle = css(rgb("key"));
  pen.fillRect(own * size, HIGH - high(bars[own]), Math.max(size - gap, 0.5), high(bars[own]));
  if (!ghosts) return;
  pen.strokeStyle = css(rgb("soft"));
  pen.setLineDash([3, 2]);
  for (let j = 0; j < ghosts.length; j++)
    if (ghosts[j])
      pen.strokeRect(j * size + 0.5, HIGH - high(ghosts[j]) + 0.5, Math.max(size - gap - 1, 0.5), high(ghosts[j]));
  pen.setLineDash([]);
}
