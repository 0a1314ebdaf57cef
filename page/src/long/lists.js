// The strongest weights of the chosen query and of the chosen key.

import { add, h } from "../dom.js";
import { percent, spelled } from "../numbers.js";
import { placed, unitOf } from "./units.js";

const MOST = 10;

/** Both lists; each entry leads to its cell. @param {import("./shown.js").Look} look @param {(i: number, j: number) => void} jump */
export function fillLists(look, jump) {
  const { parts, cell, queries, keys, queryName, keyName, row, column, shell: { t } } = look;
  parts.lists.replaceChildren();
  add(parts.lists, [
    strongest(t("query looks", { name: placed(queries, queryName, cell.i, 16) }), row, keyName, (token) => jump(cell.i, unitOf(keys, token)), "query"),
    strongest(t("key seen", { name: placed(keys, keyName, cell.j, 16) }), column, queryName, (token) => jump(unitOf(queries, token), cell.j), "key"),
  ]);
}

/**
 * The ten largest of a row or column, as buttons that lead there.
 * @param {string} title
 * @param {Float32Array | null} values      by token
 * @param {(token: number) => string} name
 * @param {(token: number) => void} go
 * @param {string} role
 */
function strongest(title, values, name, go, role) {
  if (!values) return null;
  const best = largest(values);
  const most = values[best[0]] || 1;
  const entry = (/** @type {number} */ at) =>
    h("button", { onclick: () => go(at) }, h("span.bar-in", { style: { width: `${(100 * values[at]) / most}%` } }), h("span.place", String(at)), h("bdi", name(at) === String(at) ? "" : spelled(name(at).replace(/^ (?=.)/, ""), 18)), h("span.num", percent(values[at])));
  return h(`div.strongest.role-${role}`, h("h3", title), h("ol", best.map((at) => h("li", entry(at)))));
}

/** Where the largest are, the first of equals first. @param {Float32Array} values */
function largest(values) {
  /** @type {number[]} */
  const best = [];
  for (let at = 0; at < values.length; at++) {
    if (values[at] <= 0) continue;
    if (best.length === MOST && values[at] <= values[best[MOST - 1]]) continue;
    const place = best.findIndex((other) => values[other] < values[at]);
    best.splice(place < 0 ? best.length : place, 0, at);
    if (best.length > MOST) best.pop();
  }
  return best;
}
