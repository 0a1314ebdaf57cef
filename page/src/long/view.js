// Which part of the matrix is in view, and its position on the canvas.

const NEAREST = 1 / 48; // units for a pixel: cells of 48 pixels

/** @typedef {{queries: number, keys: number, view: {y: number, x: number, step: number}, chosen: {query: number, key: number}}} Shown      the first query and key in view, and tokens for each pixel of the screen */

/** How the map's canvas is divided. @param {number} width @param {Shown} shown */
export function frame(width, { queries, keys }) {
  const [left, top] = width < 520 ? [54, 56] : [88, 76];
  const side = Math.max(120, Math.min(860, width - left - 2, keys / NEAREST));
  const ratio = Math.min(1, Math.max(0.12, queries / keys));
  const high = Math.max(96, Math.round(side * ratio));
  return { left, top, side, high, width: left + side + 2, height: top + high + 2 };
}

/** Where the view ends, in queries and keys. @param {Shown} shown @param {Frame} f */
export const endOf = ({ queries, keys, view }, f) => ({
  y: Math.min(queries, view.y + f.high * view.step),
  x: Math.min(keys, view.x + f.side * view.step),
});

/** How much of the frame the matrix fills, in pixels. @param {Shown} shown @param {Frame} f */
export const filled = ({ queries, keys, view }, f) => ({
  high: Math.min(f.high, queries / view.step),
  wide: Math.min(f.side, keys / view.step),
});

/** Keep the view inside the matrix. @param {Shown} shown @param {Frame} f */
export function settle({ queries, keys, view }, f) {
  view.step = Math.min(Math.max(view.step, NEAREST), Math.max(NEAREST, queries / f.high, keys / f.side));
  view.y = Math.max(0, Math.min(view.y, queries - f.high * view.step));
  view.x = Math.max(0, Math.min(view.x, keys - f.side * view.step));
}

/** The whole matrix. @param {Shown} shown @param {Frame} f */
export function showWhole(shown, f) {
  const { queries, keys, view } = shown;
  Object.assign(view, { y: 0, x: 0, step: Math.max(queries, keys) / f.side });
  settle(shown, f);
}

/** Zooms around a point of the matrix, which keeps its position. @param {Shown} shown @param {Frame} f @param {number} factor @param {number} y @param {number} x */
export function zoom(shown, f, factor, y, x) {
  const { view } = shown;
  const before = view.step;
  view.step = Math.max(NEAREST, before * factor);
  const change = view.step / before;
  view.y = y - (y - view.y) * change;
  view.x = x - (x - view.x) * change;
  settle(shown, f);
}

/** Bring the cell into view. @param {Shown} shown @param {Frame} f */
export function follow(shown, f) {
  const { view, chosen } = shown;
  view.y = Math.max(Math.min(view.y, chosen.query), chosen.query + 1 - f.high * view.step);
  view.x = Math.max(Math.min(view.x, chosen.key), chosen.key + 1 - f.side * view.step);
  settle(shown, f);
}

/** The cell under a point of the canvas, and the point in the matrix; null outside. @param {Shown} shown @param {Frame} f @param {number} left @param {number} top */
export function cellAt({ queries, keys, view }, f, left, top) {
  const [right, down] = [left - f.left, top - f.top];
  const [x, y] = [view.x + right * view.step, view.y + down * view.step];
  const inside = right >= 0 && down >= 0 && right <= f.side && down <= f.high && y < queries && x < keys;
  return inside ? { i: Math.floor(y), j: Math.floor(x), y, x } : null;
}
