// Moves the chosen cell and updates all that depends on it: the readout, the lists, the text, the table, the link.

import { toLink } from "../address.js";
import { write } from "../dom.js";
import { fillLists } from "./lists.js";
import { frameOf, refresh } from "./mapbox.js";
import { shadeText } from "./reading.js";
import { readout } from "./readout.js";
import { onPage, stillAt } from "./shown.js";
import { columnOf, rowOf } from "./source.js";
import { fillTable } from "./table.js";
import { follow as bringIntoView } from "./view.js";

/** After the cell moved. @param {Look} look @param {number} [wait]      milliseconds to wait: where a row takes long, only the last of many moves is computed */
export async function moved(look, wait) {
  const { cell, head, parts, state, shell, place } = look;
  const { i, j } = cell;
  const still = stillAt(look);
  if (!onPage(look)) return;
  Object.assign(state, { query: i, key: j, pinned: cell.pinned });
  if (wait) await new Promise((then) => setTimeout(then, wait));
  if (!still()) return;
  const lines = [rowOf(head, i), columnOf(head, j)];
  const [row, column] = await Promise.all(lines).catch((why) => (look.failed(why), []));
  if (!still()) return;
  Object.assign(look, { row, column });
  refresh(look);
  const words = readout(look, shell.t);
  write(parts.readout, words);
  shell.say(words);
  fillLists(look, (query, key) => jump(look, query, key));
  shadeText(look);
  follow(look, state.query);
  look.dive.show(look);
  place.live?.edges(look);
  fillTable(look);
  toLink(state, true);
  place.choose("map", { ...state.address, query: state.query, key: state.key });
}

/** What the model says comes after a query's token. @param {Look} look @param {number} query */
export function follow({ answer, offset, queryName }, query) {
  answer.follow(query + offset, queryName(query));
}

/** The reader chooses a cell: bring it into view. @param {Look} look @param {number} i @param {number} j */
export function jump(look, i, j) {
  look.state.quiet = false;
  return show(look, i, j);
}

/** @param {Look} look @param {number} i @param {number} j */
export function show(look, i, j) {
  Object.assign(look.cell, { i, j });
  bringIntoView(look, frameOf(look));
  if (look.head.served) refresh(look); // its weights take a while; all else is drawn once, with them
  return moved(look);
}

/** @param {Look} look @param {number} down @param {number} right */
export function step(look, down, right) {
  const { cell, queries, keys } = look;
  jump(look, Math.max(0, Math.min(queries - 1, cell.i + down)), Math.max(0, Math.min(keys - 1, cell.j + right)));
}
