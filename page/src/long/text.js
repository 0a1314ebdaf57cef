// The text beside the map.

import { add, h, scrollWithin } from "../dom.js";
import { follow, jump } from "./cell.js";
import { forgetPlaces } from "./arcs.js";
import { spelled } from "../numbers.js";
import { passage, shadeText } from "./reading.js";
import { rowOf } from "./source.js";

/** @param {Look} look */
export function drawText(look) {
  const { keyTexts, pads, head, state, answer, page } = look;
  const [{ text }, { t }, { reading }, { why }] = [look.parts, look.shell, state, page.header];
  text.replaceChildren();
  if (!keyTexts || !head.exact) return;
  const chosen = head.layer.cross ? state.key : state.query + look.offset; // a token of the text
  const [made, turns] = [page.header.facts?.generated ?? 0, why?.turns ?? []];
  if (reading.chosen !== chosen) {
    const seen = reading.chosen === null ? (why?.parts[0]?.tokens[0] ?? chosen) : chosen; // at first the strongest cause
    Object.assign(reading, { chosen, seen, start: seen - 300 }); // a quarter of the part stands before it
  }
  const again = () => {
    drawText(look);
    shadeText(look);
  };
  add(text, [
    passage(
      keyTexts,
      reading,
      (token) => choose(look, token),
      again,
      (token) => pointAt(look, token),
      t,
      made,
      pads,
      turns,
      answer.template,
    ),
    h("div.picks", h("span.note", answer.legend || t(head.layer.cross ? "lens cross" : "lens"))),
  ]);
  text.classList.toggle("short", keyTexts.length <= 60);
  const box = /** @type {HTMLElement} */ (text.querySelector(".passage"));
  const { live } = look.place;
  if (live) box.ondblclick = () => (getSelection()?.empty(), live.strike());
  if (why) box.dataset.answer = spelled(why.answer, 60);
  if (why?.sink) box.dataset.sink = "";
  live?.mark();
  const moved = () => {
    scrollWithin(box, spanOf(look, reading.seen)); // lines move with its width
    forgetPlaces(box);
    answer.drawn();
    live?.edges(look);
  };
  new ResizeObserver(moved).observe(box);
}

/** The text as the token under the pointer attends to it; null: as the chosen one does. @param {Look} look @param {number | null} token */
async function pointAt(look, token) {
  const { head, offset, reading } = { ...look, ...look.state };
  if (reading.over === token) return;
  reading.over = token;
  if (look.page.header.why) return look.answer.point(token);
  const query = token === null || head.layer.cross ? -1 : token - offset;
  if (query < 0 || query >= head.n) {
    shadeText(look);
    return follow(look, look.state.query);
  }
  const row = await rowOf(head, query).catch(() => null);
  if (reading.over !== token || !row) return;
  shadeText(look, { token: /** @type {number} */ (token), row });
  follow(look, query);
}

/** @param {Look} look @param {number} token */
const spanOf = (look, token) => look.parts.text.querySelector(`[data-token="${token}"]`);

/** @param {Look} look */
const picksQuery = ({ head }) => !head.layer.cross;

/** A token of the text becomes the query or the key. @param {Look} look @param {number} token */
function choose(look, token) {
  const { head, offset, cell } = look;
  const query = token - offset;
  if (picksQuery(look) && query >= 0 && query < head.n) jump(look, query, cell.j);
  else jump(look, cell.i, token);
}
