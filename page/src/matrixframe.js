// What stands around and above the cells of a matrix, as SVG: brackets, names, dimension lines, numbers.

import { inkOn } from "./colour.js";
import { svg } from "./dom.js";
import { bare, short } from "./numbers.js";

const MOST_NUMBERS = 400; // a matrix with more cells shows no numbers

/** All of it for one matrix. @param {Block} block */
export function frame(block) {
  const { m, x, y, w, h: tall, named, measured } = block;
  const [left, top, right, bottom] = [x - 4, y - 3, x + w + 3, y + tall + 2];
  const bracket = `M${left + 4} ${top}H${left}V${bottom}H${left + 4}M${right - 4} ${top}H${right}V${bottom}H${right - 4}`;
  const parts = [svg("path", { d: bracket, class: `bracket role-${m.role}` })];
  if (m.split)
    for (let offset = m.split; offset < m.cols; offset += m.split)
      parts.push(svg("path", { d: `M${x + (offset * w) / m.cols} ${y - 3}V${y + tall + 3}`, class: "split" }));
  parts.push(...names(block, named), ...measures(block, measured), ...numbersIn(block));
  return parts;
}

/** Names of rows (l) and columns (t). @param {Block} block @param {string} named */
function names({ m, x, y, w, h: tall }, named) {
  const parts = [];
  const [ux, uy] = [w / m.cols, tall / m.rows];
  if (m.rowName && named.includes("l")) {
    const every = Math.ceil(13 / uy);
    for (let i = 0; i < m.rows; i += every)
      parts.push(svg("text", { x: x - 10, y: y + (i + 0.5) * uy + 4, class: "name end" }, bare(m.rowName(i), 10)));
  }
  if (m.colName && named.includes("t")) {
    const every = Math.ceil(14 / ux);
    const flat = ux >= 44;
    for (let j = 0; j < m.cols; j += every) {
      const offset = x + (j + 0.5) * ux;
      const place = flat
        ? { x: offset, y: y - 9, class: "name middle" }
        : { transform: `translate(${offset + 4} ${y - 8}) rotate(-90)`, class: "name" };
      parts.push(svg("text", place, bare(m.colName(j), flat ? Math.floor(ux / 7) : 8)));
    }
  }
  return parts;
}

/**
 * Dimension lines along the edges, with the axis's letter and size.
 * @param {Block} block
 * @param {string} measured      edges: l, r, t, b
 */
function measures({ m, x, y, w, h: tall }, measured) {
  const label = (/** @type {string} */ dim, /** @type {number} */ size) => [
    svg("tspan.dim", dimension(dim)),
    svg("tspan.size", ` ${size}`),
  ];
  const parts = [];
  for (const [edge, far] of [...measured.matchAll(/([lrtb])(\d*)/g)].map(
    (match) => /** @type {[string, number]} */ ([match[1], Number(match[2] || 12)]),
  )) {
    const across = edge === "t" || edge === "b";
    const offset = edge === "l" ? x - far : edge === "r" ? x + w + far : edge === "t" ? y - far : y + tall + far;
    const d = across ? `M${x} ${offset - 3}v6m0-3H${x + w}m0-3v6` : `M${offset - 3} ${y}h6m-3 0V${y + tall}m-3 0h6`;
    parts.push(svg("path", { d, class: "measure" }));
    const [dim, size] = across ? [m.colDim, m.cols] : [m.rowDim, m.rows];
    const place = across
      ? { x: x + w / 2, y: edge === "t" ? offset - 6 : offset + 15, class: "middle" }
      : {
          transform: `translate(${edge === "l" ? offset - 6 : offset + 14} ${y + tall / 2}) rotate(-90)`,
          class: "middle",
        };
    parts.push(svg("text", { ...place, class: "measured middle" }, label(dim, size)));
  }
  return parts;
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
      parts.push(
        svg(
          "text",
          {
            x: x + (j + 0.5) * ux,
            y: y + (i + 0.5) * uy + 4,
            class: `number middle ${ux < 42 ? "small " : ""}${inkOn(m.shade.colour(value))}`,
          },
          short(value, ux < 42),
        ),
      );
    }
  return parts;
}

/** An axis's letter as it is printed. @param {string} dim */
export const dimension = (dim) =>
  ({ d_model: "d", d_k: "dₖ", d_v: "dᵥ", "h·d_v": "h·dᵥ", "h·d_k": "h·dₖ" })[dim] ?? dim;
