// The weights around the chosen cell as a table, which screen readers can read.

import { MASKED } from "../attention.js";
import { h } from "../dom.js";
import { fmt, listOf } from "../numbers.js";
import { labelOf } from "./names.js";
import { stillAt } from "./shown.js";
import { rowOf } from "./source.js";

const SIZE = 9;

/** Fill the table if it is open. @param {Look} look */
export async function fillTable(look) {
  const still = stillAt(look);
  const { head, queries, keys, queryName, keyName, cell } = look;
  const [{ table }, { t }] = [look.parts, look.shell];
  if (!table.open || !head.exact) return;
  const [rows, cols] = [around(cell.i, queries), around(cell.j, keys)];
  const lines = await Promise.all(rows.map((i) => rowOf(head, i)));
  if (!still()) return;
  const said = (/** @type {number} */ value) => (value === MASKED ? t("masked cell") : fmt(value, 3));
  const made = h(
    "table",
    h("caption", t("where", { i0: rows[0], i1: rows.at(-1), n: queries, j0: cols[0], j1: cols.at(-1), m: keys })),
    h(
      "thead",
      h(
        "tr",
        h("td"),
        cols.map((j) => h("th", { scope: "col" }, `${j} ${labelOf(keyName, j, 12)}`)),
      ),
    ),
    h(
      "tbody",
      rows.map((i, index) => {
        const line = lines[index];
        return h(
          "tr",
          h("th", { scope: "row" }, `${i} ${labelOf(queryName, i, 12)}`),
          cols.map((j) => h("td", said(line ? line[j] : NaN))),
        );
      }),
    ),
  );
  table.replaceChildren(/** @type {Node} */ (table.firstChild), h("div.table", { tabindex: 0 }, made));
}

/** As many places around one as fit. @param {number} index @param {number} count */
function around(index, count) {
  const first = Math.max(0, Math.min(index - 4, count - SIZE));
  return listOf(Math.min(SIZE, count), (place) => first + place);
}
