// A figure of matrices drawn to scale: the cells on a canvas, everything else in SVG above it; pointer and keyboard.

import { colour, fill, hatching, inkOn, penOn, sized } from "./colour.js";
import { ARROWS, h, svg } from "./dom.js";
import { bare, short } from "./numbers.js";

/** Down and right, by the name of a key. @type {Record<string, number[]>} */
const STEPS = { ...ARROWS, Home: [0, -1e9], End: [0, 1e9], PageUp: [-10, 0], PageDown: [10, 0] };
const HIDDEN = -Number.MAX_VALUE; // in place of the value of a masked cell
const MOST_NUMBERS = 400; // a matrix with more cells shows no numbers

/** The transpose; `flip` tells that it is one. @param {Matrix} m @returns {Matrix} */
export const transposed = (m) => ({
  ...{ ...m, rows: m.cols, cols: m.rows, rowDim: m.colDim, colDim: m.rowDim, rowName: m.colName, colName: m.rowName },
  value: (i, j) => m.value(j, i),
  hidden: m.hidden ? (i, j) => /** @type {any} */ (m.hidden)(j, i) : null,
  ...{ split: undefined, flip: !m.flip },
});

/** An axis's letter as it is printed. @param {string} dim */
export const dimension = (dim) =>
  ({ d_model: "d", d_k: "dₖ", d_v: "dᵥ", "h·d_v": "h·dᵥ", "h·d_k": "h·dₖ" })[dim] ?? dim;

/**
 * A figure of one or more matrices.
 * @param {Layout} layout @param {object} options @param {string} options.label
 * @param {() => Spot} options.cursor      the cell that the keyboard moves from
 * @param {(place: Spot | null) => void} options.move @param {(place: Spot) => void} options.pin
 * @param {Scene["next"]} options.next      the matrix that an arrow past the edge of this one leads to
 */
export function figure({ blocks, marks, width, height }, options) {
  const canvas = h("canvas");
  const size = { width, height, viewBox: `0 0 ${width} ${height}` };
  const [frames, outlines] = [svg("g"), svg("g.marks")];
  const symbols = marks.map(({ text, x, y, role, end }) => {
    const kind = `${role ? `symbol role-${role}` : "operator"} ${end ? "end" : "middle"}`;
    const parts = text
      .split("^")
      .map((part, place) => (place ? svg("tspan", { dy: -7, "font-size": 13 }, part) : part)); // W^Q
    return svg("text", { x, y, class: kind }, parts);
  });
  const above = svg("svg", { ...size, "aria-hidden": "true", focusable: "false" }, frames, symbols, outlines);
  const named = { role: "application", tabindex: "0", "aria-roledescription": "matrix", "aria-label": options.label };
  const box = h("div.figure", named, canvas, above);
  for (const part of [above, box]) sized(part, width, height);
  const paint = () => {
    const pen = penOn(canvas, width, height);
    for (const block of blocks) drawCells(pen, block);
    frames.replaceChildren(...blocks.flatMap(frame));
  };
  paint();
  listen(box, blocks, options);
  return {
    element: box,
    paint, // again, where the cells have changed
    mark: (/** @type {Mark[]} */ list) =>
      outlines.replaceChildren(...list.map((mark) => outline(blocks[mark.block], mark))),
  };
}

/** @param {HTMLElement} box @param {Block[]} blocks @param {Parameters<typeof figure>[1]} options */
function listen(box, blocks, { cursor, move, pin, next }) {
  const find = (/** @type {MouseEvent} */ event) => {
    const { left, top } = box.getBoundingClientRect();
    const block = blocks.findIndex(({ x, y, w, h }) => {
      const [right, down] = [event.clientX - left - x, event.clientY - top - y];
      return right >= 0 && down >= 0 && right < w && down < h;
    });
    if (block < 0) return null;
    const { m, x, y, w, h: tall } = blocks[block];
    const row = Math.floor(((event.clientY - top - y) / tall) * m.rows);
    const col = Math.floor(((event.clientX - left - x) / w) * m.cols);
    return m.flip ? { block, row: col, col: row } : { block, row, col };
  };
  box.addEventListener("pointermove", (event) => event.pointerType !== "touch" && move(find(event)));
  box.addEventListener("pointerleave", () => move(null));
  box.addEventListener("click", (event) => {
    const place = find(event);
    if (place) pin(place);
  });
  box.addEventListener("blur", () => move(null));
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const place = cursor();
    const { m } = blocks[place.block];
    const step = STEPS[event.key];
    if (step) {
      const [down, right] = m.flip ? [step[1], step[0]] : step;
      const [rows, cols] = m.flip ? [m.cols, m.rows] : [m.rows, m.cols];
      const [row, col] = [place.row + down, place.col + right];
      const beyond = Math.abs(right) === 1 && !m.flip && (col < 0 || col >= cols);
      const beside = beyond ? (next?.(place.block, right) ?? null) : null;
      if (beside === null)
        move({ ...place, row: Math.min(Math.max(row, 0), rows - 1), col: Math.min(Math.max(col, 0), cols - 1) });
      else {
        const to = blocks[beside].m;
        move({ block: beside, row: Math.min(place.row, to.rows - 1), col: right > 0 ? 0 : to.cols - 1 });
      }
    } else if (event.key === "Enter" || event.key === " ") pin(place);
    else if (event.key === "Escape") move(null);
    else return;
    event.preventDefault();
  });
}

function outline(/** @type {Block} */ { m, x, y, w, h: tall }, /** @type {Mark} */ mark) {
  const [row, col] = m.flip ? [mark.col, mark.row] : [mark.row, mark.col];
  /** Where it begins along an axis, and how long it is: at least three pixels, since less could not be seen. @param {number | undefined} place @param {number} from @param {number} size @param {number} count */
  const along = (place, from, size, count) => {
    const length = place === undefined ? size : Math.max(size / count, 3);
    return [place === undefined ? from : from + ((place + 0.5) * size) / count - length / 2, length];
  };
  const [[left, wide], [top, high]] = [along(col, x, w, m.cols), along(row, y, tall, m.rows)];
  const kind = `mark ${mark.kind ?? ""}`;
  return svg("rect", { x: left - 1, y: top - 1, width: wide + 2, height: high + 2, rx: 2, class: kind });
}

/** Draws the cells of a matrix as an image, large ones with lines between them. Where several fall on a pixel, it shows their mean. @param {CanvasRenderingContext2D} pen @param {Block} block */
function drawCells(pen, { m, x, y, w, h: tall }) {
  if (!(m.rows * m.cols)) return;
  const [stepX, stepY] = [Math.max(1, Math.floor(m.cols / w)), Math.max(1, Math.floor(m.rows / tall))];
  const [wide, high] = [Math.ceil(m.cols / stepX), Math.ceil(m.rows / stepY)];
  const values = Float64Array.from({ length: wide * high }, (_, index) => {
    const [row, col] = [Math.floor(index / wide) * stepY, (index % wide) * stepX];
    if (m.hidden?.(row, col)) return HIDDEN;
    let [sum, count] = [0, 0];
    for (let i = row; i < Math.min(row + stepY, m.rows); i++)
      for (let j = col; j < Math.min(col + stepX, m.cols); j++, count++) sum += m.value(i, j);
    return sum / count;
  });
  pen.fillStyle = hatching(pen);
  pen.fillRect(x, y, w, tall);
  pen.imageSmoothingEnabled = false;
  const paint = (/** @type {Uint32Array} */ pixels) => colour(pixels, values, m.shade, 0, HIDDEN);
  pen.drawImage(fill(wide, high, paint), x, y, w, tall);
  const [ux, uy] = [w / m.cols, tall / m.rows];
  if (Math.min(ux, uy) < 12) return;
  for (let j = 1; j <= m.cols; j++) pen.clearRect(Math.round(x + j * ux) - 1, y, 1, tall);
  for (let i = 1; i <= m.rows; i++) pen.clearRect(x, Math.round(y + i * uy) - 1, w, 1);
}

/** What stands around and above the cells of a matrix: bracket, names, dimension lines, numbers. @param {Block} block */
function frame(block) {
  const { m, x, y, w, h: tall } = block;
  const [left, top, right, bottom] = [x - 4, y - 3, x + w + 3, y + tall + 2];
  const bracket = `M${left + 4} ${top}H${left}V${bottom}H${left + 4}M${right - 4} ${top}H${right}V${bottom}H${right - 4}`;
  const parts = [svg("path", { d: bracket, class: `bracket role-${m.role}` })];
  if (m.split)
    for (let offset = m.split; offset < m.cols; offset += m.split)
      parts.push(svg("path", { d: `M${x + (offset * w) / m.cols} ${y - 3}V${y + tall + 3}`, class: "split" }));
  return [...parts, ...names(block), ...measures(block), ...numbersIn(block)];
}

/** Names of rows (l) and columns (t). @param {Block} block */
function names({ m, x, y, w, h: tall, named }) {
  const parts = [];
  const [ux, uy] = [w / m.cols, tall / m.rows];
  if (m.rowName && named.includes("l"))
    for (let i = 0; i < m.rows; i += Math.ceil(13 / uy))
      parts.push(svg("text", { x: x - 10, y: y + (i + 0.5) * uy + 4, class: "name end" }, bare(m.rowName(i), 10)));
  if (m.colName && named.includes("t"))
    for (let j = 0; j < m.cols; j += Math.ceil(14 / ux)) {
      const [offset, flat] = [x + (j + 0.5) * ux, ux >= 44];
      const place = flat
        ? { x: offset, y: y - 9, class: "name middle" }
        : { transform: `translate(${offset + 4} ${y - 8}) rotate(-90)`, class: "name" };
      parts.push(svg("text", place, bare(m.colName(j), flat ? Math.floor(ux / 7) : 8)));
    }
  return parts;
}

/** Dimension lines along the edges l, r, t and b, with the axis's letter and size. @param {Block} block */
function measures({ m, x, y, w, h: tall, measured }) {
  return [...measured.matchAll(/([lrtb])(\d*)/g)].flatMap(([, edge, away]) => {
    const across = edge === "t" || edge === "b";
    const before = edge === "l" || edge === "t";
    const far = Number(away || 12);
    const offset = (across ? y : x) + (before ? -far : far + (across ? tall : w));
    const d = across ? `M${x} ${offset - 3}v6m0-3H${x + w}m0-3v6` : `M${offset - 3} ${y}h6m-3 0V${y + tall}m-3 0h6`;
    const [dim, size] = across ? [m.colDim, m.cols] : [m.rowDim, m.rows];
    const place = across
      ? { x: x + w / 2, y: offset + (before ? -6 : 15) }
      : { transform: `translate(${offset + (before ? -6 : 14)} ${y + tall / 2}) rotate(-90)` };
    const label = [svg("tspan.dim", dimension(dim)), svg("tspan.size", ` ${size}`)];
    return [svg("path", { d, class: "measure" }), svg("text", { ...place, class: "measured middle" }, label)];
  });
}

/** Numbers in the cells, where they fit. @param {Block} block */
function numbersIn({ m, x, y, w, h: tall }) {
  const [ux, uy] = [w / m.cols, tall / m.rows];
  if (ux < 33 || uy < 18 || m.rows * m.cols > MOST_NUMBERS) return [];
  const parts = [];
  for (let i = 0; i < m.rows; i++)
    for (let j = 0; j < m.cols; j++) {
      if (m.hidden?.(i, j)) continue;
      const value = m.value(i, j);
      const kind = `number middle ${ux < 42 ? "small " : ""}${inkOn(m.shade.colour(value))}`;
      const place = { x: x + (j + 0.5) * ux, y: y + (i + 0.5) * uy + 4, class: kind };
      parts.push(svg("text", place, short(value, ux < 42)));
    }
  return parts;
}
