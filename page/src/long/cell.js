// The chosen cell moves, and all that speaks of it follows: the readout, the lists, the text, the table, the link.

import { fmt } from "../numbers.js";
import { unitColumn, unitRow } from "./lines.js";
import { toLink } from "./link.js";
import { fillLists } from "./lists.js";
import { frameOf, onPage, refresh } from "./mapbox.js";
import { shadeText } from "./reading.js";
import { readout } from "./readout.js";
import { rowOf } from "./source.js";
import { fillTable } from "./table.js";
import { tokenAt } from "./units.js";
import { follow } from "./view.js";

/** @typedef {import("./shown.js").Look} Look */

/** After the cell moved. @param {Look} look @param {number} [wait]      milliseconds; where a row is slow, only the last of many moves is followed */
export async function moved(look, wait) {
  const { cell, head, queries, keys, parts, state, shell } = look;
  const { i, j } = cell;
  const left = () => !onPage(look) || i !== cell.i || j !== cell.j;
  Object.assign(state, { query: tokenAt(queries, i), key: tokenAt(keys, j), pinned: cell.pinned });
  if (wait) await new Promise((then) => setTimeout(then, wait));
  if (left()) return;
  const [row, column] = await Promise.all([unitRow(head, queries, i), unitColumn(head, keys, j)]).catch((why) => (look.failed(why), [null, null]));
  if (left()) return;
  Object.assign(look, { row, column });
  refresh(look);
  parts.readout.textContent = readout(look, shell.t) + (look.other ? ` · ${shell.t("difference")} ${await difference(look)}` : "");
  shell.say(parts.readout.textContent);
  fillLists(look, (query, key) => jump(look, query, key));
  shadeText(look);
  fillTable(look);
  toLink(state);
}

/** @param {Look} look */
async function difference({ other, cell, queries, keys, row }) {
  const line = other && (await rowOf(other, tokenAt(queries, cell.i)));
  const key = tokenAt(keys, cell.j);
  return line && row ? fmt(Math.max(0, row[key]) - Math.max(0, line[key]), 4) : "?";
}

/** Choose a cell and bring it into view. @param {Look} look @param {number} i @param {number} j */
export function jump(look, i, j) {
  Object.assign(look.cell, { i, j });
  follow(look, frameOf(look));
  refresh(look);
  moved(look);
}

/** @param {Look} look @param {number} down @param {number} right */
export function step(look, down, right) {
  const { cell, queries, keys } = look;
  jump(look, Math.max(0, Math.min(queries.count - 1, cell.i + down)), Math.max(0, Math.min(keys.count - 1, cell.j + right)));
}
