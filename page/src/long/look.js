// A look at one head: its map, its numbers, the text beside it.

import { h } from "../dom.js";
import { fmt } from "../numbers.js";
import { follow, jump, moved, show } from "./cell.js";
import { controls } from "./controls.js";
import { showing } from "./effects.js";
import { bindKeys } from "./keyboard.js";
import { frameOf, refresh } from "./mapbox.js";
import { listen } from "./pointer.js";
import { lookAt, onPage } from "./shown.js";
import { headAt, LEVELS, lastQuery, strongestKey } from "./source.js";
import { surveyOf } from "./survey.js";
import { fillTable } from "./table.js";
import { drawText } from "./text.js";
import { whenReady } from "./tiles.js";
import { showWhole } from "./view.js";

/** @type {Look | null} the one that is drawn again with the window's size */
let latest = null;
addEventListener("resize", () => latest && refresh(latest));

/** Put a head on the page. @param {Source} source @param {HTMLElement} here @param {HTMLElement} heading @param {(follow: () => void, again: () => void) => void} follows      takes what brings the map to the state's cell, and what draws it of another run */
export async function openLook(source, here, heading, follows) {
  const { state, head } = source;
  const parts = newParts(source);
  const look = (latest = lookAt(source, parts));
  const { box, where, scale, readout, table, lists, text } = parts;
  source.answer.text.replaceChildren(text);
  here.replaceChildren(
    h("div.left", h("div.headed", heading), controls(look), box, scale, where, facts(source), table),
    h("div.right", readout, source.dive.element, lists),
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
    () => again(look),
  );
  await moved(look);
  fetchMore(look);
}

/** The same head of another run of this text. @param {Look} look */
async function again(look) {
  const actual = await headAt(look.page, look.state.address);
  await actual.loading;
  if (!onPage(look) || actual.version !== look.page.version) return;
  const { nonfinite, whole } = await surveyOf(actual);
  const head = showing(actual, look.state.shows);
  Object.assign(look, { actual, head, nonfinite, whole });
  await moved(look);
  follow(look, look.queries - 1);
}

/** @param {Look} look */
async function goTo(look) {
  const { page, state, actual: head } = look;
  if (state.query < 0 || state.query >= head.n) state.query = lastQuery(page, head);
  const key = state.key < 0 ? await strongestKey(head, state.query).catch(look.failed) : state.key;
  if (onPage(look)) show(look, state.query, Math.min(key ?? 0, head.m - 1));
}

/** @param {Source} source @returns {Parts} */
function newParts({ head: { n, m }, shell: { t } }) {
  const canvas = /** @type {HTMLCanvasElement} */ (h("canvas"));
  return {
    canvas,
    box: h("div.map-of", { tabindex: 0, role: "group", "aria-label": t("map", { n, m }) }, canvas),
    where: h("p.where"),
    scale: h("div"),
    readout: h("p.readout", { id: "readout" }),
    table: /** @type {HTMLDetailsElement} */ (h("details.numbers", h("summary", t("table here")))),
    lists: h("div.lists"),
    text: h("div.text"),
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
  const { actual, state } = look;
  const head = showing(actual, state.shows);
  const draw = () => onPage(look) && refresh(look);
  surveyOf(head).then((survey) => {
    if (look.head !== head) return;
    look.nonfinite = survey.nonfinite;
    look.whole = survey.whole;
    draw();
  });
  if (head.n * head.m > 2 ** 20)
    head.wide().then((wide) => {
      look.wide = wide;
      draw();
    });
  whenReady(() => requestAnimationFrame(draw), look.failed);
  const loaded = () => {
    const { g, v } = actual.computing ?? {};
    if (head.shows !== state.shows && g && v && onPage(look)) look.again(); // from here on what edges did is known
  };
  if (state.shows !== "weights") actual.loading.then(loaded);
}
