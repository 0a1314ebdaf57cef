// A look at one head: its map, its numbers, the text beside it.

import { afterwards, h } from "../dom.js";
import { ribbonOf } from "../dive/whatifs.js";
import { asRun, isAsRun } from "../head.js";
import { fmt } from "../numbers.js";
import { jump, moved, show } from "./cell.js";
import { controls } from "./controls.js";
import { decoding } from "./decoding.js";
import { bindKeys } from "./keyboard.js";
import { strongestKey } from "./lines.js";
import { frameOf, refresh } from "./mapbox.js";
import { listen } from "./pointer.js";
import { shadeText } from "./reading.js";
import { lookAt, onPage, shownUnder } from "./shown.js";
import { LEVELS, lastQuery } from "./source.js";
import { under } from "./supposing.js";
import { surveyOf } from "./survey.js";
import { fillTable } from "./table.js";
import { drawText } from "./text.js";
import { whenReady } from "./tiles.js";
import { showWhole } from "./view.js";

/** @type {Look | null} the one that is drawn again with the window's size */
let latest = null;
addEventListener("resize", () => latest && refresh(latest));

/** Put a head on the page. @param {Source} source @param {HTMLElement} here @param {HTMLElement} heading @param {(follow: () => void, suppose: () => void) => void} follows      takes what brings the map to the state's cell, and what draws it under another supposition */
export async function openLook(source, here, heading, follows) {
  const { state, head } = source;
  const parts = newParts(source);
  const look = (latest = lookAt(source, parts));
  parts.decoding = decoding(look);
  look.drawSoon = afterwards(() => drawSupposed(look));
  const { box, where, scale, readout, table, lists, text } = parts;
  source.answer.text.replaceChildren(text);
  here.replaceChildren(
    h("div.left", h("div.headed", heading, parts.ribbon), controls(look), box, scale, where, facts(source), table),
    h("div.right", readout, source.dive.lines, lists),
  );
  if (!state.view) showWhole(look, frameOf(look));
  table.addEventListener("toggle", () => fillTable(look));
  look.jumpTo = (query, key) => jump(look, query, key);
  listen(look);
  bindKeys(look);
  drawText(look);
  refresh(look);
  performance.mark("clearhead picture");
  if (state.key < 0) {
    const key = await strongestKey(head, state.query).catch(source.failed);
    if (state.key < 0) look.cell.j = key ?? 0;
  }
  follows(
    () => goTo(look),
    () => suppose(look),
  );
  await moved(look);
  fetchMore(look);
}

/**
 * The weights under what is supposed now. All that is written follows within the event: the arithmetic, the readout, the
 * lists, the text's shading. The pictures follow just before the frame that shows it: the map, the head's small
 * picture, the bars of the row. Each is drawn whole from what is supposed when it is drawn, so that the newest change wins.
 * @param {Look} look
 */
function suppose(look) {
  if (!onPage(look)) return;
  const { actual, parts, place, state } = look;
  look.head = shownUnder(actual, place.what, state.shows);
  parts.ribbon.hidden = isAsRun(place.what);
  const tally = look.head.computing?.tally;
  if (tally) look.received = tally.received; // whole once the column is there, which takes all weights
  moved(look, 0, look.drawSoon);
  clearTimeout(look.resting);
  if (!tally) look.resting = setTimeout(() => receive(look), 150);
}

/** @param {Look} look */
function drawSupposed(look) {
  if (!onPage(look)) return;
  const { actual, place, head } = look;
  look.nonfinite = head.computing?.tally?.nonfinite ?? look.nonfinite;
  refresh(look);
  look.shownAs(under(actual, place.what));
}

/** What each key receives, which takes all weights. @param {Look} look */
async function receive(look) {
  const { head } = look;
  const survey = await surveyOf(head);
  if (look.head !== head || !onPage(look)) return;
  look.received = survey.received;
  if (look.nonfinite !== survey.nonfinite) {
    look.nonfinite = survey.nonfinite;
    refresh(look);
  }
  shadeText(look);
}

/** @param {Look} look */
async function goTo(look) {
  const { page, state, actual: head } = look;
  if (state.query < 0 || state.query >= head.n) state.query = lastQuery(page, head);
  const key = state.key < 0 ? await strongestKey(head, state.query).catch(look.failed) : state.key;
  if (onPage(look)) show(look, state.query, Math.min(key ?? 0, head.m - 1));
}

/** @param {Source} source @returns {Parts} */
function newParts({ head: { n, m }, shell: { t }, place }) {
  const canvas = /** @type {HTMLCanvasElement} */ (h("canvas"));
  const ribbon = ribbonOf(t, (what) => place.suppose("", what));
  ribbon.hidden = isAsRun(place.what);
  return {
    canvas,
    box: h("div.map-of", { tabindex: 0, role: "group", "aria-label": t("map", { n, m }) }, canvas),
    ribbon,
    where: h("p.where"),
    scale: h("div"),
    readout: h("p.readout", { id: "readout" }),
    table: /** @type {HTMLDetailsElement} */ (h("details.numbers", h("summary", t("table here")))),
    lists: h("div.lists"),
    text: h("div.text"),
    decoding: null,
  };
}

/** The head's statistics, and what its weights are made of. @param {Source} source */
function facts({ head, state, shell: { t } }) {
  const { statistics, note } = head.layer;
  const known = Object.keys(statistics).filter((name) => statistics[name][state.address.head] !== null);
  const nature = head.served
    ? t("served head")
    : head.exact
      ? t("exact head", { dtype: head.stored })
      : t("pictured head", { levels: LEVELS });
  return [
    h("p.says", known.map((name) => `${t(name)} ${fmt(Number(statistics[name][state.address.head]), 3)}`).join(" · ")),
    h("p.note", nature, note && ` · ${note}`),
  ];
}

/** What takes longer: the largest weight, what each key receives, a finer picture, tiles. @param {Look} look */
function fetchMore(look) {
  const { actual, aside, state } = look;
  const head = shownUnder(actual, asRun(), state.shows);
  const draw = () => onPage(look) && refresh(look);
  surveyOf(head).then((survey) => {
    if (look.head === head) look.received = survey.received;
    look.nonfinite = survey.nonfinite;
    look.whole = survey[aside ? "aside" : "whole"];
    draw();
    shadeText(look);
  });
  if (head.n * head.m > 2 ** 20)
    head.wide().then((wide) => {
      look.wide = wide;
      draw();
    });
  whenReady(() => requestAnimationFrame(draw), look.failed);
  const loaded = () => {
    const { g, v } = actual.computing ?? {};
    if (head.shows === state.shows || !g || !v) return suppose(look);
    if (onPage(look)) look.again(); // from here on what edges did is known, and where its colours end
  };
  if (state.shows !== "weights" || !isAsRun(look.place.what)) actual.loading.then(loaded);
}
