// The strongest weights of the chosen query and of the chosen key.

import { MASKED } from "../attention.js";
import { h, write } from "../dom.js";
import { fmt, listOf, percent, withSign } from "../numbers.js";
import { labelOf, placed } from "./names.js";

const MOST = 10;
const signed = (/** @type {number} */ x) => withSign(x, (size) => fmt(size, 3));

/** @typedef {ReturnType<typeof strongest>} List */
/** @type {WeakMap<HTMLElement, List[]>} */
const lists = new WeakMap();

/** Both lists; each entry leads to its cell. They stay in place while their numbers change. @param {Look} look @param {(i: number, j: number) => void} jump */
export function fillLists(look, jump) {
  const { parts, cell, queryName, keyName, row, column } = look;
  const { t } = look.shell;
  const made = lists.get(parts.lists) ?? [
    strongest("query", (j) => jump(cell.i, j)),
    strongest("key", (i) => jump(i, cell.j)),
  ];
  if (!lists.has(parts.lists)) parts.lists.append(...made.map(({ element }) => element));
  lists.set(parts.lists, made);
  const { shows } = look.head;
  const what = t(`shows ${shows}`);
  const query = { name: placed(queryName, cell.i, 16), what };
  const key = { name: placed(keyName, cell.j, 16), what };
  const titles = shows === "weights" ? ["query looks", "key seen"] : ["query effects", "key effects"];
  made[0].set(t(titles[0], query), row, keyName, shows);
  made[1].set(t(titles[1], key), column, queryName, shows);
}

/** The ten largest of a row or column, as buttons that lead there. @param {string} role @param {(token: number) => void} go */
function strongest(role, go) {
  const title = h("h3");
  const entries = listOf(MOST, (rank) => {
    const parts = [h("span.place"), h("bdi"), h("span.num")];
    const button = h("button", { onclick: () => go(best[rank]) }, parts);
    return { button, parts, element: h("li", button) };
  });
  const list = h("ol");
  const element = h("div", title, list);
  /** @type {number[]} */
  let best = [];
  return {
    element,
    /** @param {string} words @param {Float32Array | null} values      by token @param {(token: number) => string} name @param {Shows} shows */
    set(words, values, name, shows) {
      element.hidden = !values;
      if (!values) return;
      element.className = `strongest role-${shows === "weights" ? role : shows}`;
      write(title, words);
      best = largest(values);
      for (const [rank, index] of best.entries()) {
        const { button, parts } = entries[rank];
        const [place, label, number] = parts;
        button.className = values[index] < 0 ? "below" : "";
        button.style.backgroundSize = `${Math.abs((100 * values[index]) / values[best[0]])}%`;
        write(place, String(index));
        write(label, name(index) === String(index) ? "" : labelOf(name, index, 18));
        write(number, (shows === "weights" ? percent : signed)(values[index]));
      }
      if (list.childElementCount !== best.length)
        list.replaceChildren(...entries.slice(0, best.length).map(({ element }) => element));
    },
  };
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
