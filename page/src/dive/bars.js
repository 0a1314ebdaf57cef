// A query's weights as bars, with the run's own as outlines where something is supposed.

import { penOn } from "../canvas.js";
import { css, rgb } from "../colour.js";

const HIGH = 72;

/**
 * @param {HTMLCanvasElement} canvas @param {ArrayLike<number>} weights @param {ArrayLike<number> | null} ghost
 * @param {number} chosen
 */
export function drawBars(canvas, weights, ghost, chosen) {
  const wide = Math.max(60, canvas.clientWidth || 600);
  const pen = penOn(canvas, wide, HIGH, true);
  const each = Math.max(1, Math.ceil(weights.length / (2 * wide))); // keys that share a bar: the largest of them
  const pooled = (/** @type {ArrayLike<number>} */ all) => {
    const peaks = new Float64Array(Math.ceil(all.length / each));
    for (let j = 0; j < all.length; j++) {
      const bar = Math.floor(j / each);
      if (all[j] > peaks[bar] && all[j] < Infinity) peaks[bar] = all[j];
    }
    return peaks;
  };
  const [bars, ghosts] = [pooled(weights), ghost && pooled(ghost)];
  const size = Math.min(48, wide / bars.length);
  let most = 0;
  for (const some of ghosts ? [bars, ghosts] : [bars]) for (const a of some) most = Math.max(most, a);
  const high = (/** @type {number} */ a) => (most ? Math.max(a > 0 ? 1 : 0, (a / most) * (HIGH - 2)) : 0);
  const gap = size > 4 ? 1 : 0;
  const chosenBar = Math.floor(chosen / each);
  const [weight, key] = ["weights", "key"].map((name) => css(rgb(name)));
  const dense = canvas.width / wide;
  const edge = (/** @type {number} */ j) => Math.round(j * size * dense) / dense; // whole pixels: a rectangle takes a tenth of the time of a path
  for (let j = 0; j < bars.length; j++) {
    pen.fillStyle = j === chosenBar ? key : weight;
    pen.fillRect(edge(j), HIGH - high(bars[j]), Math.max(edge(j + 1) - edge(j) - gap, 1 / dense), high(bars[j]));
  }
  if (!ghosts) return;
  pen.beginPath();
  pen.strokeStyle = css(rgb("soft"));
  pen.setLineDash(gap ? [3, 2] : []);
  for (let j = 0; j <= ghosts.length; j++)
    if (gap && ghosts[j]) pen.rect(edge(j) + 0.5, HIGH - high(ghosts[j]) + 0.5, size - gap - 1, high(ghosts[j]));
    else if (!gap) {
      pen.lineTo(j * size, HIGH - high(ghosts[j - 1] ?? 0));
      pen.lineTo(j * size, HIGH - high(ghosts[j] ?? 0)); // one line along the tops of bars that are too narrow for outlines
    }
  pen.stroke();
  pen.setLineDash([]);
}
