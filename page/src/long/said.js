// What is said of the chosen cell: in a sentence, in lists of the strongest weights, and as a table that screen readers read.

import { MASKED } from "../attention.js";
import { h, renew } from "../dom.js";
import { fmt, isolated, largest, listOf, percent, spelled, within, withSign } from "../numbers.js";
import { windowOf } from "../section.js";
import { rowOf } from "./source.js";

/** @typedef {(token: number) => string} Name */

const MOST = 10; // weights of a list
const NEAR = 12; // rows before and after the chosen one: as many as the table may have

/** A token in few characters, without the space before it. @param {Name} name @param {number} token @param {number} most */
export const labelOf = (name, token, most) =>
  spelled(
    name(token)
      .replace(/^##/, "")
      .replace(/^[ ▁Ġ]+(?! |$)/, ""),
    most,
  );

/** The same in quotes after its place; only the place where there is no text. @param {Name} name @param {number} token @param {number} most */
function placed(name, token, most) {
  const label = labelOf(name, token, most);
  return label === String(token) ? label : `${token} “${label}”`;
}

/** The cell in words: query, key, weight with its error bound, rank and the row's sum. @param {Look} look @param {Say} t */
export function readout(look, t) {
  const { chosen, queryName, keyName, row, head } = look;
  const { layer, rules, served } = head;
  const reading = cellValue(look);
  const names = {
    query: isolated(placed(queryName, chosen.query, 24)),
    key: isolated(placed(keyName, chosen.key, 24)),
  };
  const read = (/** @type {string} */ value) => t("read", { ...names, value });
  if (!reading) return read(t("computing"));
  const { value, off } = reading;
  if (value === MASKED) return read(t("masked cell"));
  const parts = [read(within(value, off))];
  if (!Number.isFinite(value)) parts.push(t("nonfinite cell"));
  else if (!reading.exact) parts.push(t("of pixel"));
  else if (row) {
    const seen = row.filter((other) => other !== MASKED);
    const sum = seen.reduce((total, other) => total + other, 0);
    const rank = 1 + seen.filter((other) => other > value).length;
    const sink = layer.sinks && (served || rules.sink > -Infinity);
    parts.push(t("rank here", { rank, of: seen.length }));
    parts.push(t(sink ? "sums with sink" : "sums to", { sum: fmt(sum, 6), sink: fmt(Math.max(0, 1 - sum), 4) }));
  }
  return parts.join(" · ");
}

/** The chosen cell's weight and its error bound. @param {Look} look */
function cellValue({ head, chosen: { query: i, key: j }, row }) {
  if (row) return { value: row[j], off: head.computing ? row[j] * head.computing.bound(i) : 0, exact: true };
  if (!head.small) return null;
  const { rows, cols, first, pixel } = head.small;
  const at = Math.floor(((i + 0.5) * rows) / head.n);
  const read = j === head.first ? first(at) : pixel(at, Math.floor(((j + 0.5) * cols) / head.m));
  return { ...read, exact: rows === head.n && cols === head.m };
}

/** The strongest weights of the chosen query and of the chosen key; each entry leads to its cell. @param {Look} look @param {(i: number, j: number) => void} jump */
export function fillLists({ parts, chosen, queryName, keyName, row, column, shell: { t } }, jump) {
  /** The ten largest, as buttons that lead there. @param {string} title @param {string} role @param {Float32Array | null} values @param {Name} name @param {(token: number) => void} go */
  const list = (title, role, values, name, go) => {
    const weights = values ?? new Float32Array();
    const best = largest(weights, MOST, 0);
    const items = best.map((index) => {
      const size = { "background-size": `${(100 * weights[index]) / weights[best[0]]}%` };
      const label = name(index) === String(index) ? "" : labelOf(name, index, 18);
      const words = [h("span.place", index), h("bdi", label), h("span.num", percent(weights[index]))];
      return h("li", h("button", { style: size, onclick: () => go(index) }, words));
    });
    return h(`div.strongest.role-${role}`, { hidden: !values }, h("h3", title), h("ol", items));
  };
  const titles = [
    t("query looks", { name: placed(queryName, chosen.query, 16) }),
    t("key seen", { name: placed(keyName, chosen.key, 16) }),
  ];
  renew(parts.lists, [
    list(titles[0], "query", row, keyName, (j) => jump(chosen.query, j)),
    list(titles[1], "key", column, queryName, (i) => jump(i, chosen.key)),
  ]);
}

/** The weights around the chosen cell, where the table is open. @param {Look} look @param {() => boolean} still      whether the cell is still chosen */
export async function fillTable({ head, queries, keys, queryName, keyName, chosen, parts: { table }, shell }, still) {
  if (!table.open || !head.exact) return;
  const first = Math.max(0, chosen.query - NEAR);
  const count = Math.min(queries, chosen.query + NEAR) - first;
  const lines = await Promise.all(listOf(count, (i) => rowOf(head, first + i)));
  if (!still()) return;
  const value = (/** @type {number} */ i, /** @type {number} */ j) => lines[i - first]?.[j] ?? NaN;
  const [rowName, colName] = [queryName, keyName].map((name) => (/** @type {number} */ i) => labelOf(name, i, 12));
  const hidden = (/** @type {number} */ i, /** @type {number} */ j) => value(i, j) === MASKED;
  const shown = { symbol: "A", rows: queries, cols: keys, value, hidden, rowName, colName };
  const made = windowOf(shell.t, shown, { row: chosen.query, col: chosen.key });
  table.replaceChildren(/** @type {Node} */ (table.firstChild), h("div.table", { tabindex: 0 }, made));
}
