// A figure of matrices drawn to scale: the cells on a canvas, everything else in SVG above it; pointer and keyboard.

import { penOn, sized } from "./canvas.js";
import { add, ARROWS, h, svg } from "./dom.js";
import { drawCells } from "./matrixcells.js";
import { frame } from "./matrixframe.js";

/** Down and right, by the name of a key. @type {Record<string, number[]>} */
const STEPS = { ...ARROWS, Home: [0, -1e9], End: [0, 1e9], PageUp: [-10, 0], PageDown: [10, 0] };

/** The transpose; `flip` tells that it is one. @param {Matrix} m @returns {Matrix} */
export const transposed = (m) => ({
  ...m,
  rows: m.cols,
  cols: m.rows,
  rowDim: m.colDim,
  colDim: m.rowDim,
  rowName: m.colName,
  colName: m.rowName,
  value: (i, j) => m.value(j, i),
  hidden: m.hidden ? (i, j) => /** @type {any} */ (m.hidden)(j, i) : null,
  split: undefined,
  flip: !m.flip,
});

/**
 * A figure of one or more matrices.
 * @param {Layout} layout @param {object} options @param {string} options.label
 * @param {() => Spot} options.cursor      the cell that the keyboard moves from
 * @param {(place: Spot | null) => void} options.move @param {(place: Spot) => void} options.pin
 * @param {(block: number, by: number) => number | null} options.next      the matrix that an arrow past the edge of this one leads to
 */
export function figure(layout, options) {
  const { blocks, width, height } = layout;
  const canvas = /** @type {HTMLCanvasElement} */ (h("canvas"));
  const above = svg("svg", {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    "aria-hidden": "true",
    focusable: "false",
  });
  const box = h(
    "div.figure",
    { role: "application", tabindex: "0", "aria-roledescription": "matrix", "aria-label": options.label },
    canvas,
    above,
  );
  for (const part of [above, box]) sized(part, width, height);
  const frames = svg("g");
  const paint = () => {
    const pen = penOn(canvas, width, height);
    for (const block of blocks) drawCells(pen, block);
    frames.replaceChildren(...blocks.flatMap(frame));
  };
  paint();
  above.append(frames);
  for (const { text, x, y, role, end } of layout.marks)
    add(
      above,
      svg(
        "text",
        { x, y, class: `${role ? `symbol role-${role}` : "operator"} ${end ? "end" : "middle"}` },
        withSuperscript(text),
      ),
    );
  const outlines = svg("g.marks");
  above.append(outlines);
  listen(box, blocks, options);
  return {
    element: box,
    paint, // again, where the cells have changed
    mark: (/** @type {Mark[]} */ marks) =>
      outlines.replaceChildren(...marks.map((mark) => outline(blocks[mark.block], mark))),
  };
}

/** W^Q with Q as a superscript. @param {string} text */
const withSuperscript = (text) =>
  text.split("^").map((part, place) => (place ? svg("tspan", { dy: -7, "font-size": 13 }, part) : part));

/** @param {HTMLElement} box @param {Block[]} blocks @param {any} options */
function listen(box, blocks, options) {
  const find = (/** @type {MouseEvent} */ event) => {
    const frame = box.getBoundingClientRect();
    const [x, y] = [event.clientX - frame.left, event.clientY - frame.top];
    for (const [block, { m, x: left, y: top, w, h: tall }] of blocks.entries()) {
      if (x < left || y < top || x >= left + w || y >= top + tall) continue;
      const cell = [Math.floor(((y - top) / tall) * m.rows), Math.floor(((x - left) / w) * m.cols)];
      if (m.flip) cell.reverse();
      return { block, row: cell[0], col: cell[1] };
    }
    return null;
  };
  box.addEventListener("pointermove", (event) => event.pointerType !== "touch" && options.move(find(event)));
  box.addEventListener("pointerleave", () => options.move(null));
  box.addEventListener("click", (event) => {
    const place = find(event);
    if (place) options.pin(place);
  });
  box.addEventListener("blur", () => options.move(null));
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const place = { ...options.cursor() };
    const { m } = blocks[place.block];
    const step = STEPS[event.key];
    if (step) {
      const [down, right] = m.flip ? [step[1], step[0]] : step;
      const beyond = place.col + right;
      const next =
        Math.abs(right) === 1 && !m.flip && (beyond < 0 || beyond >= m.cols) ? options.next(place.block, right) : null;
      if (next !== null) {
        const to = blocks[next].m;
        options.move({ block: next, row: Math.min(place.row, to.rows - 1), col: right > 0 ? 0 : to.cols - 1 });
        return event.preventDefault();
      }
      const [rows, cols] = m.flip ? [m.cols, m.rows] : [m.rows, m.cols];
      place.row = Math.min(Math.max(place.row + down, 0), rows - 1);
      place.col = Math.min(Math.max(place.col + right, 0), cols - 1);
      options.move(place);
    } else if (event.key === "Enter" || event.key === " ") options.pin(place);
    else if (event.key === "Escape") options.move(null);
    else return;
    event.preventDefault();
  });
}

/** @param {Block} block @param {Mark} mark */
function outline({ m, x, y, w, h: tall }, mark) {
  const [row, col] = m.flip ? [mark.col, mark.row] : [mark.row, mark.col];
  const [ux, uy] = [w / m.cols, tall / m.rows];
  const least = 3; // pixels: the outline of a thinner row or column could not be seen
  const [wide, high] = [col === undefined ? w : Math.max(ux, least), row === undefined ? tall : Math.max(uy, least)];
  const left = col === undefined ? x : x + (col + 0.5) * ux - wide / 2;
  const top = row === undefined ? y : y + (row + 0.5) * uy - high / 2;
  return svg("rect", {
    x: left - 1,
    y: top - 1,
    width: wide + 2,
    height: high + 2,
    rx: 2,
    class: `mark ${mark.kind ?? ""}`,
  });
}
