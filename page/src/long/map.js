// The matrix as a map: its weights, names beside them, and the chosen cell.

import { penOn } from "../canvas.js";
import { css, rgb } from "../colour.js";
import { drawNames } from "./margins.js";
import { filled } from "./view.js";
import { drawWeights } from "./weights.js";

/**
 * Draw everything; says how: what a pixel is, and whether tiles are missing.
 * @param {HTMLCanvasElement} canvas @param {Shown} shown @param {Frame} f
 */
export function draw(canvas, shown, f) {
  const pen = penOn(canvas, f.width, f.height);
  pen.imageSmoothingEnabled = false;
  pen.save();
  clip(pen, f, 0);
  pen.translate(f.left, f.top);
  const how = drawWeights(pen, shown, f);
  pen.restore();
  const { wide, high } = filled(shown, f);
  pen.strokeStyle = css(rgb("line"));
  pen.strokeRect(f.left - 0.5, f.top - 0.5, wide + 1, high + 1);
  drawNames(pen, shown, f);
  drawCell(pen, shown, f);
  return how;
}

/** @param {CanvasRenderingContext2D} pen @param {Frame} f @param {number} more */
function clip(pen, f, more) {
  pen.beginPath();
  pen.rect(f.left - more, f.top - more, f.side + 2 * more, f.high + 2 * more);
  pen.clip();
}

/** The chosen cell: its row and column, and the cell itself. @param {CanvasRenderingContext2D} pen @param {Shown} shown @param {Frame} f */
function drawCell(pen, { view, cell }, f) {
  const size = 1 / view.step;
  const [x, y] = [f.left + (cell.j - view.x) * size, f.top + (cell.i - view.y) * size];
  const box = Math.max(size, 3);
  pen.save();
  clip(pen, f, 2);
  pen.lineWidth = 1;
  pen.setLineDash(cell.pinned ? [] : [3, 3]);
  pen.strokeStyle = css(rgb("query"));
  pen.strokeRect(f.left - 4, y - 0.5, f.side + 8, box + 1);
  pen.strokeStyle = css(rgb("key"));
  pen.strokeRect(x - 0.5, f.top - 4, box + 1, f.high + 8);
  pen.setLineDash([]);
  pen.lineWidth = 2;
  pen.strokeStyle = css(rgb("ink"));
  pen.strokeRect(x - 1, y - 1, box + 2, box + 2);
  pen.restore();
}
