// Matrices drawn to scale: cells on a canvas; brackets, names, measures and marks in SVG above it; walked by keyboard.

import { css, hatching, inkOn, rgb } from "./colour.js";
import { add, h, svg } from "./dom.js";
import { short, spelled } from "./numbers.js";

/**
 * @typedef {object} Matrix
 * @property {string} symbol
 * @property {string} role      names its colours
 * @property {number} rows
 * @property {number} cols
 * @property {string} rowDim
 * @property {string} colDim
 * @property {(i: number, j: number) => number} at
 * @property {import("./colour.js").Shade} shade
 * @property {((i: number) => string) | null} [rowName]
 * @property {((j: number) => string) | null} [colName]
 * @property {((i: number, j: number) => boolean) | null} [hidden]      masked cells
 * @property {number} [split]      a line after so many columns: one head beside the other
 * @property {boolean} [flip]      drawn as its transpose
 */
/** @typedef {{m: Matrix, x: number, y: number, w: number, h: number, named: string, measured: string}} Block */
/** @typedef {{text: string, x: number, y: number, role?: string, end?: boolean}} Label */
/** @typedef {{blocks: Block[], width: number, height: number, marks: Label[]}} Layout */
/** @typedef {{block: number, row?: number, col?: number, kind?: string}} Mark */
/** @typedef {{block: number, row: number, col: number}} Place */

const PATIENCE = 400; // numbers in at most so many cells

/** The transpose, knowing that it is one. @param {Matrix} m @returns {Matrix} */
export const turn = (m) => ({
  ...m,
  rows: m.cols,
  cols: m.rows,
  rowDim: m.colDim,
  colDim: m.rowDim,
  rowName: m.colName,
  colName: m.rowName,
  at: (i, j) => m.at(j, i),
  hidden: m.hidden ? (i, j) => /** @type {any} */ (m.hidden)(j, i) : null,
  split: undefined,
  flip: !m.flip,
});

/**
 * A figure of one or more matrices.
 * @param {Layout} layout
 * @param {object} given
 * @param {string} given.label
 * @param {() => Place} given.cursor      where the keyboard stands
 * @param {(place: Place | null) => void} given.move
 * @param {(place: Place) => void} given.pin
 * @param {(block: number, by: number) => number | null} given.next      the matrix beside this one, past its edge
 */
export function figure(layout, given) {
  const { blocks, width, height } = layout;
  const ratio = Math.min(3, Math.max(1, window.devicePixelRatio || 1));
  const canvas = /** @type {HTMLCanvasElement} */ (h("canvas", { width: Math.ceil(width * ratio), height: Math.ceil(height * ratio) }));
  const above = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", focusable: "false" });
  const box = h("div.figure", { role: "application", tabindex: "0", "aria-roledescription": "matrix", "aria-label": given.label }, canvas, above);
  for (const part of [canvas, above, box]) {
    part.style.width = `${width}px`;
    part.style.height = `${height}px`;
  }
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  pen.scale(ratio, ratio);
  for (const block of blocks) {
    paint(pen, block);
    add(above, frame(block));
  }
  for (const { text, x, y, role, end } of layout.marks)
    add(above, svg("text", { x, y, class: `${role ? `symbol role-${role}` : "operator"} ${end ? "end" : "middle"}` }, raised(text)));
  const lit = svg("g.marks");
  above.append(lit);
  listen(box, blocks, given);
  return { element: box, mark: (/** @type {Mark[]} */ marks) => lit.replaceChildren(...marks.map((mark) => outline(blocks[mark.block], mark))) };
}

/** W^Q with its Q raised. @param {string} text */
const raised = (text) => text.split("^").map((part, place) => (place ? svg("tspan", { dy: -7, "font-size": 13 }, part) : part));

/** @param {HTMLElement} box @param {Block[]} blocks @param {any} given */
function listen(box, blocks, given) {
  const find = (/** @type {MouseEvent} */ event) => {
    const frame = box.getBoundingClientRect();
    const [x, y] = [event.clientX - frame.left, event.clientY - frame.top];
    for (const [block, { m, x: left, y: top, w, h: tall }] of blocks.entries()) {
      if (x < left || y < top || x >= left + w || y >= top + tall) continue;
      const at = [Math.floor(((y - top) / tall) * m.rows), Math.floor(((x - left) / w) * m.cols)];
      if (m.flip) at.reverse();
      return { block, row: at[0], col: at[1] };
    }
    return null;
  };
  box.addEventListener("pointermove", (event) => event.pointerType !== "touch" && given.move(find(event)));
  box.addEventListener("pointerleave", () => given.move(null));
  box.addEventListener("click", (event) => {
    const place = find(event);
    if (place) given.pin(place);
  });
  box.addEventListener("blur", () => given.move(null));
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const place = { ...given.cursor() };
    const { m } = blocks[place.block];
    const steps = /** @type {Record<string, number[]>} */ ({ ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -1e9], End: [0, 1e9], PageUp: [-10, 0], PageDown: [10, 0] });
    const step = steps[event.key];
    if (step) {
      const [down, right] = m.flip ? [step[1], step[0]] : step;
      const beyond = place.col + right;
      const next = Math.abs(right) === 1 && !m.flip && (beyond < 0 || beyond >= m.cols) ? given.next(place.block, right) : null;
      if (next !== null) {
        const to = blocks[next].m;
        given.move({ block: next, row: Math.min(place.row, to.rows - 1), col: right > 0 ? 0 : to.cols - 1 });
        return event.preventDefault();
      }
      const [rows, cols] = m.flip ? [m.cols, m.rows] : [m.rows, m.cols];
      place.row = Math.min(Math.max(place.row + down, 0), rows - 1);
      place.col = Math.min(Math.max(place.col + right, 0), cols - 1);
      given.move(place);
    } else if (event.key === "Enter" || event.key === " ") given.pin(place);
    else if (event.key === "Escape") given.move(null);
    else return;
    event.preventDefault();
  });
}

/** @param {Block} block @param {Mark} mark */
function outline({ m, x, y, w, h: tall }, mark) {
  const [row, col] = m.flip ? [mark.col, mark.row] : [mark.row, mark.col];
  const [ux, uy] = [w / m.cols, tall / m.rows];
  const least = 3; // a row of half a pixel is still to be seen
  const [wide, high] = [col === undefined ? w : Math.max(ux, least), row === undefined ? tall : Math.max(uy, least)];
  const left = col === undefined ? x : x + (col + 0.5) * ux - wide / 2;
  const top = row === undefined ? y : y + (row + 0.5) * uy - high / 2;
  return svg("rect", { x: left - 1, y: top - 1, width: wide + 2, height: high + 2, rx: 2, class: `mark ${mark.kind ?? ""}` });
}

/** @param {CanvasRenderingContext2D} pen @param {Block} block */
function paint(pen, block) {
  const { m, x, y, w, h: tall } = block;
  const [ux, uy] = [w / m.cols, tall / m.rows];
  const hatch = hatching(pen);
  if (Math.min(ux, uy) < 12) return paintSmall(pen, block, hatch);
  for (let i = 0; i < m.rows; i++)
    for (let j = 0; j < m.cols; j++) {
      const [left, top] = [Math.round(x + j * ux), Math.round(y + i * uy)];
      const value = m.at(i, j);
      pen.fillStyle = m.hidden?.(i, j) ? hatch : css(Number.isFinite(value) ? m.shade.at(value) : rgb("warn"));
      pen.fillRect(left, top, Math.round(x + (j + 1) * ux) - left - 1, Math.round(y + (i + 1) * uy) - top - 1);
    }
}

/** Many small cells, as an image; where they are more than pixels, each pixel is their mean. @param {CanvasRenderingContext2D} pen @param {Block} block @param {CanvasPattern} hatch */
function paintSmall(pen, { m, x, y, w, h: tall }, hatch) {
  const [stepX, stepY] = [Math.max(1, Math.floor(m.cols / w)), Math.max(1, Math.floor(m.rows / tall))];
  const [wide, high] = [Math.ceil(m.cols / stepX), Math.ceil(m.rows / stepY)];
  const image = new ImageData(wide, high);
  const pixels = new Uint32Array(image.data.buffer);
  const word = (/** @type {number[]} */ [r, g, b]) => (255 << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r);
  const ramp = Uint32Array.from({ length: 256 }, (_, at) => word(m.shade.along(at / 255)));
  const warn = word(rgb("warn"));
  pen.fillStyle = hatch;
  pen.fillRect(x, y, w, tall);
  for (let i = 0; i < high; i++)
    for (let j = 0; j < wide; j++) {
      const [row, col] = [i * stepY, j * stepX];
      if (m.hidden?.(row, col)) continue; // the hatched ground shows through
      const value = stepX * stepY === 1 ? m.at(row, col) : mean(m, row, col, stepY, stepX);
      pixels[i * wide + j] = Number.isFinite(value) ? ramp[Math.round(255 * Math.min(Math.max(m.shade.shade(value), 0), 1))] : warn;
    }
  const whole = document.createElement("canvas");
  [whole.width, whole.height] = [wide, high];
  /** @type {CanvasRenderingContext2D} */ (whole.getContext("2d")).putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(whole, x, y, w, tall);
}

/** @param {Matrix} m @param {number} i @param {number} j @param {number} tall @param {number} wide */
function mean(m, i, j, tall, wide) {
  let sum = 0;
  let count = 0;
  for (let a = i; a < Math.min(i + tall, m.rows); a++)
    for (let b = j; b < Math.min(j + wide, m.cols); b++, count++) sum += m.at(a, b);
  return sum / count;
}

/** Brackets, names of rows and columns, measures, and numbers where they fit. @param {Block} block */
function frame(block) {
  const { m, x, y, w, h: tall, named, measured } = block;
  const [left, top, right, bottom] = [x - 4, y - 3, x + w + 3, y + tall + 2];
  const bracket = `M${left + 4} ${top}H${left}V${bottom}H${left + 4}M${right - 4} ${top}H${right}V${bottom}H${right - 4}`;
  const parts = [svg("path", { d: bracket, class: `bracket role-${m.role}` })];
  if (m.split)
    for (let at = m.split; at < m.cols; at += m.split)
      parts.push(svg("path", { d: `M${x + (at * w) / m.cols} ${y - 3}V${y + tall + 3}`, class: "split" }));
  parts.push(...names(block, named), ...measures(block, measured), ...figures(block));
  return parts;
}

/** @param {Block} block @param {string} named */
function names({ m, x, y, w, h: tall }, named) {
  const parts = [];
  const [ux, uy] = [w / m.cols, tall / m.rows];
  if (m.rowName && named.includes("l")) {
    const every = Math.ceil(13 / uy);
    for (let i = 0; i < m.rows; i += every)
      parts.push(svg("text", { x: x - 10, y: y + (i + 0.5) * uy + 4, class: "name end" }, spelled(m.rowName(i).trim(), 10)));
  }
  if (m.colName && named.includes("t")) {
    const every = Math.ceil(14 / ux);
    const flat = ux >= 44;
    for (let j = 0; j < m.cols; j += every) {
      const at = x + (j + 0.5) * ux;
      const place = flat ? { x: at, y: y - 9, class: "name middle" } : { transform: `translate(${at + 4} ${y - 8}) rotate(-90)`, class: "name" };
      parts.push(svg("text", place, spelled(m.colName(j).trim(), flat ? Math.floor(ux / 7) : 8)));
    }
  }
  return parts;
}

/**
 * Lines along the edges with the axis' letter and size, as in a technical drawing.
 * @param {Block} block
 * @param {string} measured      edges: l, r, t, b
 */
function measures({ m, x, y, w, h: tall }, measured) {
  const label = (/** @type {string} */ dim, /** @type {number} */ size) => [
    svg("tspan.dim", { "data-dim": dim }, dimension(dim)),
    svg("tspan.size", ` ${size}`),
  ];
  const parts = [];
  for (const [edge, far] of [...measured.matchAll(/([lrtb])(\d*)/g)].map((found) => /** @type {[string, number]} */ ([found[1], Number(found[2] || 12)]))) {
    const across = edge === "t" || edge === "b";
    const at = edge === "l" ? x - far : edge === "r" ? x + w + far : edge === "t" ? y - far : y + tall + far;
    const d = across ? `M${x} ${at - 3}v6m0-3H${x + w}m0-3v6` : `M${at - 3} ${y}h6m-3 0V${y + tall}m-3 0h6`;
    parts.push(svg("path", { d, class: "measure" }));
    const [dim, size] = across ? [m.colDim, m.cols] : [m.rowDim, m.rows];
    const place = across
      ? { x: x + w / 2, y: edge === "t" ? at - 6 : at + 15, class: "middle" }
      : { transform: `translate(${edge === "l" ? at - 6 : at + 14} ${y + tall / 2}) rotate(-90)`, class: "middle" };
    parts.push(svg("text", { ...place, class: "measured middle" }, label(dim, size)));
  }
  return parts;
}

/** @param {Block} block */
function figures({ m, x, y, w, h: tall }) {
  const [ux, uy] = [w / m.cols, tall / m.rows];
  if (ux < 33 || uy < 18 || m.rows * m.cols > PATIENCE) return [];
  const parts = [];
  for (let i = 0; i < m.rows; i++)
    for (let j = 0; j < m.cols; j++) {
      if (m.hidden?.(i, j)) continue;
      const value = m.at(i, j);
      parts.push(svg("text", { x: x + (j + 0.5) * ux, y: y + (i + 0.5) * uy + 4, class: `number middle ${ux < 42 ? "small " : ""}${inkOn(m.shade.at(value))}` }, short(value, ux < 42)));
    }
  return parts;
}

/** An axis' letter as it is written. @param {string} dim */
export const dimension = (dim) => ({ d_model: "d", d_k: "dₖ", d_v: "dᵥ", "h·d_v": "h·dᵥ" })[dim] ?? dim;
