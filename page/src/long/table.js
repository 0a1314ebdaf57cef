// The weights around the chosen cell as a table, which screen readers can read.

import { MASKED } from "../attention.js";
import { h } from "../dom.js";
import { windowOf } from "../section.js";
import { labelOf } from "./names.js";
import { stillAt } from "./shown.js";
import { rowOf } from "./source.js";

const NEAR = 12; // rows before and after the chosen one: as many as the table may have

/** Fill the table if it is open. @param {Look} look */
export async function fillTable(look) {
  const still = stillAt(look);
  const { head, queries, keys, queryName, keyName, cell } = look;
  const [{ table }, { t }] = [look.parts, look.shell];
  if (!table.open || !head.exact) return;
  const first = Math.max(0, cell.i - NEAR);
  const count = Math.min(queries, cell.i + NEAR) - first;
  const lines = await Promise.all(Array.from({ length: count }, (_, i) => rowOf(head, first + i)));
  if (!still()) return;
  const value = (/** @type {number} */ i, /** @type {number} */ j) => lines[i - first]?.[j] ?? NaN;
  const [rowName, colName] = [queryName, keyName].map((name) => (/** @type {number} */ i) => labelOf(name, i, 12));
  const hidden = (/** @type {number} */ i, /** @type {number} */ j) => value(i, j) === MASKED;
  const shown = { symbol: "A", rows: queries, cols: keys, value, hidden, rowName, colName };
  const made = windowOf(t, shown, { row: cell.i, col: cell.j });
  table.replaceChildren(/** @type {Node} */ (table.firstChild), h("div.table", { tabindex: 0 }, made));
}
