// What stands beside the map in words and numbers: the readout, the strongest weights, a table.

import { MASKED } from "../attention.js";
import { h } from "../dom.js";
import { fmt, percent, spelled } from "../numbers.js";
import { firstPixel, pixel } from "./source.js";
import { tokenAt, unitName } from "./units.js";

/** @typedef {import("./map.js").Shown} Shown */
/** @typedef {(key: string, values?: any) => string} Say */

/** The sum and mean that make a unit's weight of tokens' weights. @param {Float32Array} row @param {import("./units.js").Units} u @param {number} at */
function ofUnit(row, u, at) {
  let [sum, seen] = [0, false];
  for (let token = tokenAt(u, at); token < tokenAt(u, at + 1); token++)
    if (row[token] !== MASKED) {
      sum += row[token];
      seen = true;
    }
  return seen ? sum : MASKED;
}

/** The chosen cell's weight, and how far off it may be. @param {Shown} s */
export function cellValue(s) {
  const { head, cell, row } = s;
  if (row) {
    const value = ofUnit(row, s.cols, cell.j);
    return { value, off: head.computing ? value * head.computing.bound(tokenAt(s.rows, cell.i)) : 0, exact: true };
  }
  const p = head.small.most;
  if (!p) return null;
  const [i, j] = [tokenAt(s.rows, cell.i), tokenAt(s.cols, cell.j)];
  const at = Math.floor(((i + 0.5) * p.pixels[0]) / head.n);
  return { ...(j === head.first ? firstPixel(p, at) : pixel(p, at, Math.floor(((j + 0.5) * p.pixels[1]) / head.m))), exact: p.pixels[0] === head.n && p.pixels[1] === head.m };
}

/** So many digits that count. @param {number} x @param {number} digits */
export const precise = (x, digits) => (Math.abs(x) >= 1e-4 ? String(Number(x.toPrecision(digits))) : fmt(x, digits));

/** A weight as a share, with what it may be off. @param {number} value @param {number} off */
export const share = (value, off) => `${precise(value, 4)}${off > 0 ? ` ± ${fmt(off, 1)}` : ""}`;

/** @param {Shown} s @param {Say} t */
export function readout(s, t) {
  const { cell, rows, cols } = s;
  const name = (/** @type {import("./units.js").Units} */ u, /** @type {(token: number) => string} */ from, /** @type {number} */ at) => `“${spelled(unitName(u, from, at), 24)}”`;
  const found = cellValue(s);
  const values = { i: cell.i, j: cell.j, query: name(rows, s.rowName, cell.i), key: name(cols, s.colName, cell.j) };
  if (!found) return t("read", { ...values, value: t("computing") });
  if (found.value === MASKED) return t("read", { ...values, value: t("masked cell") });
  const parts = [t("read", { ...values, value: share(found.value, found.off) })];
  if (!found.exact) parts.push(t("of pixel"));
  if (s.row) {
    let [rank, of, sum] = [1, 0, 0];
    for (let at = 0; at < cols.count; at++) {
      const other = ofUnit(s.row, cols, at);
      if (other === MASKED) continue;
      of++;
      sum += other;
      if (other > found.value) rank++;
    }
    parts.push(t("rank here", { rank, of }), t("sums to", { sum: fmt(sum, 6) }));
  }
  return parts.join(" · ");
}

/**
 * The ten largest of a row or column, as buttons that lead there.
 * @param {string} title
 * @param {Float32Array | null} values      by token
 * @param {(token: number) => string} name
 * @param {(token: number) => void} go
 * @param {string} role
 */
export function strongest(title, values, name, go, role) {
  if (!values) return null;
  /** @type {number[]} */
  const best = [];
  for (let at = 0; at < values.length; at++) {
    if (values[at] <= 0) continue;
    if (best.length === 10 && values[at] <= values[best[9]]) continue;
    const place = best.findIndex((other) => values[other] < values[at]);
    best.splice(place < 0 ? best.length : place, 0, at);
    if (best.length > 10) best.pop();
  }
  const largest = values[best[0]] || 1;
  return h(
    `div.strongest.role-${role}`,
    h("h3", title),
    h("ol", best.map((at) => h("li", h("button", { onclick: () => go(at) }, h("span.bar-in", { style: { width: `${(100 * values[at]) / largest}%` } }), h("span.place", String(at)), h("bdi", spelled(name(at).replace(/^ (?=.)/, ""), 18)), h("span.num", percent(values[at])))))),
  );
}

/**
 * Weights around the cell: for those who read tables.
 * @param {Shown} s @param {Say} t @param {(i: number) => Promise<Float32Array | null>} rowOf
 */
export async function tableHere(s, t, rowOf) {
  const around = (/** @type {number} */ at, /** @type {number} */ size) => {
    const first = Math.max(0, Math.min(at - 4, size - 9));
    return Array.from({ length: Math.min(9, size) }, (_, place) => first + place);
  };
  const [rows, cols] = [around(s.cell.i, s.rows.count), around(s.cell.j, s.cols.count)];
  const lines = await Promise.all(rows.map(rowOf));
  const name = (/** @type {import("./units.js").Units} */ u, /** @type {(token: number) => string} */ from, /** @type {number} */ at) => `${at} ${spelled(unitName(u, from, at), 12)}`;
  return h(
    "div.table",
    { tabindex: 0 },
    h(
      "table",
      h("caption", t("where", { i0: rows[0], i1: rows.at(-1), n: s.rows.count, j0: cols[0], j1: cols.at(-1), m: s.cols.count })),
      h("thead", h("tr", h("td"), cols.map((j) => h("th", { scope: "col" }, name(s.cols, s.colName, j))))),
      h("tbody", rows.map((i, at) => {
        const line = lines[at];
        return h("tr", h("th", { scope: "row" }, name(s.rows, s.rowName, i)), cols.map((j) => {
          const value = line ? ofUnit(line, s.cols, j) : NaN;
          return h("td", value === MASKED ? t("masked cell") : precise(value, 3));
        }));
      })),
    ),
  );
}
