// The cells of a matrix, drawn on a canvas.

import { colour, fill, hatching } from "./canvas.js";
import { css, rgb } from "./colour.js";

/** Fills the cells of a matrix with their colours. @param {CanvasRenderingContext2D} pen @param {Block} block */
export function drawCells(pen, block) {
  const { m, x, y, w, h: tall } = block;
  const [ux, uy] = [w / m.cols, tall / m.rows];
  const hatch = hatching(pen);
  if (Math.min(ux, uy) < 12) return drawSmallCells(pen, block, hatch);
  for (let i = 0; i < m.rows; i++)
    for (let j = 0; j < m.cols; j++) {
      const [left, top] = [Math.round(x + j * ux), Math.round(y + i * uy)];
      const value = m.value(i, j);
      pen.fillStyle = m.hidden?.(i, j) ? hatch : css(Number.isFinite(value) ? m.shade.colour(value) : rgb("warn"));
      pen.fillRect(left, top, Math.round(x + (j + 1) * ux) - left - 1, Math.round(y + (i + 1) * uy) - top - 1);
    }
}

/** Draws small cells as an image. Where several fall on a pixel, it shows their mean. @param {CanvasRenderingContext2D} pen @param {Block} block @param {CanvasPattern} hatch */
function drawSmallCells(pen, { m, x, y, w, h: tall }, hatch) {
  const [stepX, stepY] = [Math.max(1, Math.floor(m.cols / w)), Math.max(1, Math.floor(m.rows / tall))];
  const [wide, high] = [Math.ceil(m.cols / stepX), Math.ceil(m.rows / stepY)];
  const place = (/** @type {number} */ index) => [Math.floor(index / wide) * stepY, (index % wide) * stepX];
  const values = Float64Array.from({ length: wide * high }, (_, index) => {
    const [row, col] = place(index);
    return stepX * stepY === 1 ? m.value(row, col) : mean(m, row, col, stepY, stepX);
  });
  pen.fillStyle = hatch;
  pen.fillRect(x, y, w, tall);
  const whole = fill(wide, high, (pixels) => {
    colour(pixels, values, m.shade, 0, NaN);
    for (let index = 0; index < pixels.length; index++) {
      const [row, col] = place(index);
      if (m.hidden?.(row, col)) pixels[index] = 0; // transparent: the hatching below shows
    }
  });
  pen.imageSmoothingEnabled = false;
  pen.drawImage(whole, x, y, w, tall);
}

/** @param {Matrix} m @param {number} i @param {number} j @param {number} tall @param {number} wide */
function mean(m, i, j, tall, wide) {
  let sum = 0;
  let count = 0;
  for (let a = i; a < Math.min(i + tall, m.rows); a++)
    for (let b = j; b < Math.min(j + wide, m.cols); b++, count++) sum += m.value(a, b);
  return sum / count;
}
