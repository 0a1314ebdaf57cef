// The text beside the map, with its controls and its search.

import { add, byId, h, scrollWithin } from "../dom.js";
import { follow, jump } from "./cell.js";
import { choice } from "./controls.js";
import { search } from "./names.js";
import { spelled } from "../numbers.js";
import { passage, shadeText } from "./reading.js";
import { rowOf } from "./source.js";

/** @param {Look} look */
export function drawText(look) {
  const { keyTexts, pads, head, state, answer, page } = look;
  const [{ text }, { t }, { reading }, { why }] = [look.parts, look.shell, state, page.header];
  text.replaceChildren();
  if (!keyTexts || !head.exact) return;
  const modes = [...(why ? ["effect"] : []), "received", "query", "key"].map((name) => [name, t(`by ${name}`)]);
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
    look.parts.decoding?.element,
    h(
      "div.picks",
      h("span.note", answer.legend || t(head.layer.cross ? "lens cross" : "lens")),
      searchField(look, again),
      h(
        "details.display",
        { open: state.reading.open, ontoggle: (/** @type {any} */ { target }) => (reading.open = target.open) },
        h("summary", t("display")),
        h(
          "div.picks",
          choice(t("text shaded"), "by", modes, reading.by, (value) => {
            reading.by = /** @type {any} */ (value);
            shadeText(look);
          }),
        ),
      ),
    ),
  ]);
  text.classList.toggle("short", keyTexts.length <= 60);
  const box = /** @type {HTMLElement} */ (text.querySelector(".passage"));
  if (why) box.dataset.answer = spelled(why.answer, 60);
  if (why?.sink) box.dataset.sink = "";
  answer.drawn();
  new ResizeObserver(() => scrollWithin(box, spanOf(look, reading.seen))).observe(box); // lines move with its width
}

/** The text as the token under the pointer attends to it; null: as the chosen one does. @param {Look} look @param {number | null} token */
async function pointAt(look, token) {
  const { head, offset, reading } = { ...look, ...look.state };
  if (reading.over === token) return;
  reading.over = token;
  if (reading.by === "effect") return look.answer.point(token);
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

/** @param {Look} look @param {() => void} again */
function searchField(look, again) {
  const { reading } = look.state;
  const label = look.shell.t("search");
  const count = h("small", { role: "status" }, reading.said);
  const field = /** @type {HTMLInputElement} */ (
    h("input", {
      type: "search",
      id: "search",
      placeholder: `${label}  /`,
      "aria-label": label,
      value: reading.word,
      onkeydown: (/** @type {KeyboardEvent} */ event) => {
        if (event.key === "Escape") field.blur();
        if (event.key !== "Enter") return;
        const token = find(look, field.value, event.shiftKey);
        count.textContent = reading.said;
        if (token === undefined) return;
        again();
        byId("search")?.focus();
        spanOf(look, token)?.scrollIntoView({ block: "nearest" });
      },
    })
  );
  return h("span", field, count);
}

/** Choose the next token where the word stands, or the one before. @param {Look} look @param {string} word @param {boolean} back */
function find(look, word, back) {
  const { keyTexts, offset, cell } = look;
  const [{ reading }, { t }] = [look.state, look.shell];
  const places = search(/** @type {string[]} */ (keyTexts), word);
  const ahead = (/** @type {number} */ token) => (picksQuery(look) ? token - offset - cell.i : token - cell.j);
  const next = back
    ? (places.findLast((token) => ahead(token) < 0) ?? places.at(-1))
    : (places.find((token) => ahead(token) > 0) ?? places[0]);
  reading.word = word;
  reading.said =
    next === undefined ? t("not found") : t("found", { place: places.indexOf(next) + 1, of: places.length });
  if (next === undefined) return;
  choose(look, next);
  reading.chosen = -1; // the text is drawn around it
  return next;
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
