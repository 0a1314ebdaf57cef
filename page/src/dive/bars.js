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
  const size = Math.min(48, wide / weights.length);
  let most = 0;
  for (const each of ghost ? [weights, ghost] : [weights])
    for (let j = 0; j < each.length; j++) if (each[j] > most && each[j] < Infinity) most = each[j];
  const high = (/** @type {number} */ a) => (most ? Math.max(a > 0 ? 1 : 0, (a / most) * (HIGH - 2)) : 0);
  const gap = size > 4 ? 1 : 0;
  for (let j = 0; j < weights.length; j++) {
    pen.fillStyle = css(rgb(j === chosen ? "key" : "weights"));
    pen.fillRect(j * size, HIGH - high(weights[j]), Math.max(size - gap, 0.5), high(weights[j]));
  }
  if (!ghost) return;
  pen.strokeStyle = css(rgb("soft"));
  pen.setLineDash([3, 2]);
  for (let j = 0; j < weights.length; j++)
    if (ghost[j] > 0)
      pen.strokeRect(j * size + 0.5, HIGH - high(ghost[j]) + 0.5, Math.max(size - gap - 1, 0.5), high(ghost[j]));
  pen.setLineDash([]);
}
