// The strongest weights of the chosen query and of the chosen key.

import { add, h } from "../dom.js";
import { percent } from "../numbers.js";
import { inUnits, weightFrom, weightOn } from "./lines.js";
import { placed, tokenAt, unitLabel } from "./units.js";

const MOST = 10;

/** Both lists; each entry leads to its cell. @param {import("./shown.js").Look} look @param {(i: number, j: number) => void} jump */
export function fillLists(look, jump) {
  const {
    parts,
    cell,
    queries,
    keys,
    queryName,
    keyName,
    row,
    column,
    shell: { t },
  } = look;
  parts.lists.replaceChildren();
  add(parts.lists, [
    strongest(
      t("query looks", { name: placed(queries, queryName, cell.i, 16) }),
      inUnits(row, keys, weightOn),
      keys,
      keyName,
      (j) => jump(cell.i, j),
      "query",
    ),
    strongest(
      t("key seen", { name: placed(keys, keyName, cell.j, 16) }),
      inUnits(column, queries, weightFrom),
      queries,
      queryName,
      (i) => jump(i, cell.j),
      "key",
    ),
  ]);
}

/**
 * The ten largest of a row or column, as buttons that lead there.
 * @param {string} title
 * @param {Float32Array | null} values      by unit
 * @param {import("./units.js").Units} units
 * @param {(token: number) => string} name
 * @param {(unit: number) => void} go
 * @param {string} role
 */
function strongest(title, values, units, name, go, role) {
  if (!values) return null;
  const best = largest(values);
  const most = values[best[0]] || 1;
  const labelled = (/** @type {number} */ at) =>
    name(tokenAt(units, at)) === String(tokenAt(units, at)) ? "" : unitLabel(units, name, at, 18);
  const entry = (/** @type {number} */ at) =>
    h(
      "button",
      { onclick: () => go(at) },
      h("span.bar-in", { style: { width: `${(100 * values[at]) / most}%` } }),
      h("span.place", String(at)),
      h("bdi", labelled(at)),
      h("span.num", percent(values[at])),
    );
  return h(
    `div.strongest.role-${role}`,
    h("h3", title),
    h(
      "ol",
      best.map((at) => h("li", entry(at))),
    ),
  );
}

/** Where the largest are, the first of equals first. @param {Float32Array} values */
function largest(values) {
  /** @type {number[]} */
  const best = [];
  for (let at = 0; at < values.length; at++) {
    if (!(values[at] > 0)) continue; // NaN is left out, too
    if (best.length === MOST && values[at] <= values[best[MOST - 1]]) continue;
    const place = best.findIndex((other) => values[other] < values[at]);
    best.splice(place < 0 ? best.length : place, 0, at);
    if (best.length > MOST) best.pop();
  }
  return best;
}
