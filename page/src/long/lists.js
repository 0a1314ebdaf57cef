// The strongest weights of the chosen query and of the chosen key.

import { MASKED } from "../attention.js";
import { add, h } from "../dom.js";
import { fmt, percent } from "../numbers.js";
import { inUnits, weightFrom, weightOn } from "./lines.js";
import { placed, tokenAt, unitLabel } from "./units.js";

const MOST = 10;
const signedNumber = (/** @type {number} */ x) => (x > 0 ? "+" : "") + fmt(x, 3);

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
  const effects = look.head.shows !== "weights";
  const what = t(`shows ${look.head.shows}`);
  const said = effects ? signedNumber : percent;
  add(parts.lists, [
    strongest(
      t(effects ? "query effects" : "query looks", { name: placed(queries, queryName, cell.i, 16), what }),
      inUnits(row, keys, weightOn),
      keys,
      keyName,
      (j) => jump(cell.i, j),
      "query",
      said,
    ),
    strongest(
      t(effects ? "key effects" : "key seen", { name: placed(keys, keyName, cell.j, 16), what }),
      inUnits(column, queries, weightFrom),
      queries,
      queryName,
      (i) => jump(i, cell.j),
      "key",
      said,
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
 * @param {(value: number) => string} said
 */
function strongest(title, values, units, name, go, role, said) {
  if (!values) return null;
  const best = largest(values);
  const most = Math.abs(values[best[0]]) || 1;
  const labelled = (/** @type {number} */ at) =>
    name(tokenAt(units, at)) === String(tokenAt(units, at)) ? "" : unitLabel(units, name, at, 18);
  const entry = (/** @type {number} */ at) =>
    h(
      "button",
      { onclick: () => go(at) },
      h(values[at] < 0 ? "span.bar-in.below" : "span.bar-in", {
        style: { width: `${(100 * Math.abs(values[at])) / most}%` },
      }),
      h("span.place", String(at)),
      h("bdi", labelled(at)),
      h("span.num", said(values[at])),
    );
  return h(
    `div.strongest.role-${said === percent ? role : "effect"}`,
    h("h3", title),
    h(
      "ol",
      best.map((at) => h("li", entry(at))),
    ),
  );
}

/** Where the largest by magnitude are, the first of equals first. @param {Float32Array} values */
function largest(values) {
  const size = (/** @type {number} */ at) => Math.abs(values[at]);
  /** @type {number[]} */
  const best = [];
  for (let at = 0; at < values.length; at++) {
    if (!(size(at) > 0) || values[at] === MASKED) continue; // NaN is left out, too
    if (best.length === MOST && size(at) <= size(best[MOST - 1])) continue;
    const place = best.findIndex((other) => size(other) < size(at));
    best.splice(place < 0 ? best.length : place, 0, at);
    if (best.length > MOST) best.pop();
  }
  return best;
}
