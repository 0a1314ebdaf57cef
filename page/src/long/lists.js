// The strongest weights of the chosen query and of the chosen key.

import { MASKED } from "../attention.js";
import { h, renew } from "../dom.js";
import { fmt, percent, withSign } from "../numbers.js";
import { labelOf, placed } from "./names.js";

const MOST = 10;
const signed = (/** @type {number} */ x) => withSign(x, (size) => fmt(size, 3));

/** Both lists; each entry leads to its cell. @param {Look} look @param {(i: number, j: number) => void} jump */
export function fillLists({ parts, cell, queryName, keyName, row, column, shell: { t }, head: { shows } }, jump) {
  const [plain, what] = [shows === "weights", t(`shows ${shows}`)];
  const [query, key] = [placed(queryName, cell.i, 16), placed(keyName, cell.j, 16)].map((name) => ({ name, what }));
  const titles = plain
    ? [t("query looks", query), t("key seen", key)]
    : [t("query effects", query), t("key effects", key)];
  /** The ten largest, as buttons that lead there. @param {string} title @param {string} role @param {Float32Array | null} values @param {(token: number) => string} name @param {(token: number) => void} go */
  const list = (title, role, values, name, go) => {
    const best = values ? largest(values) : [];
    const items = best.map((index) => {
      const x = /** @type {Float32Array} */ (values)[index];
      const size = `${Math.abs((100 * x) / /** @type {Float32Array} */ (values)[best[0]])}%`;
      const label = name(index) === String(index) ? "" : labelOf(name, index, 18);
      const words = [h("span.place", index), h("bdi", label), h("span.num", (plain ? percent : signed)(x))];
      const look = { class: x < 0 ? "below" : null, style: { "background-size": size } };
      return h("li", h("button", { ...look, onclick: () => go(index) }, words));
    });
    return h(`div.strongest.role-${plain ? role : shows}`, { hidden: !values }, h("h3", title), h("ol", items));
  };
  renew(parts.lists, [
    list(titles[0], "query", row, keyName, (j) => jump(cell.i, j)),
    list(titles[1], "key", column, queryName, (i) => jump(i, cell.j)),
  ]);
}

/** Where the largest by magnitude are, the first of equals first. @param {Float32Array} values */
function largest(values) {
  const size = (/** @type {number} */ index) => Math.abs(values[index]);
  /** @type {number[]} */
  const best = [];
  for (let index = 0; index < values.length; index++) {
    if (!(size(index) > 0) || values[index] === MASKED) continue; // NaN is left out, too
    if (best.length === MOST && size(index) <= size(best[MOST - 1])) continue;
    const place = best.findIndex((other) => size(other) < size(index));
    best.splice(place < 0 ? best.length : place, 0, index);
    if (best.length > MOST) best.pop();
  }
  return best;
}
