// A look at one head: its map with what is said of it, the chosen cell, and all that follows the cell.

import { toLink } from "../address.js";
import { drawColours, weighed } from "../colour.js";
import { ARROWS, h, later, select, write } from "../dom.js";
import { fmt } from "../numbers.js";
import { draw } from "./map.js";
import { listen } from "./pointer.js";
import { fillLists, fillTable, readout } from "./said.js";
import { columnOf, headAt, LEVELS, rowOf, strongestKey } from "./source.js";
import { surveyOf, whenReady } from "./tiles.js";
import { drawText, shadeText } from "./text.js";
import { endOf, follow as bringIntoView, frame, settle, showWhole, zoom } from "./view.js";

/** @type {Look | null} the one on the page */
let latest = null;
addEventListener("resize", () => latest && (latest.stale ? moved(latest) : refresh(latest))); // or unfolded

/** Put a head on the page. @param {Source} source @param {HTMLElement} heading */
export async function openLook(source, heading) {
  const { state, head, here, place } = source;
  const look = (latest = lookAt(source));
  const { box, where, scale, readout, table, lists, text } = look.parts;
  source.answer.text.replaceChildren(text);
  here.replaceChildren(
    h("div.left", h("div.headed", heading), controls(look), box, scale, where, facts(source), table),
    h("div.right", readout, source.dive.element, lists),
  );
  if (!state.view) showWhole(look, frameOf(look));
  table.addEventListener("toggle", () => fillTable(look, stillAt(look)));
  listen(look);
  bindKeys(look);
  drawText(look);
  refresh(look);
  performance.mark("clearhead picture");
  if (place.chosen.key < 0) await followPlace();
  else await moved(look);
  fetchMore(look);
}

/** What is shown of a head, as the page's state says: the map draws it; the cell, the text and the controls change it. @param {Source} source */
export function lookAt(source) {
  const { page, state, head, shell, place } = source;
  const { layer, n, m } = head;
  const run = page.header.runs[place.chosen.run];
  const queryTexts = layer.text ? run[layer.text] : null;
  const keyTexts = layer.cross ? run.sources : queryTexts;
  const offset = layer.cross ? 0 : layer.rules.query_offset[0];
  const nameOf = (/** @type {string[] | null} */ texts, /** @type {number} */ from) => (/** @type {number} */ token) =>
    texts?.[token + from] ?? String(token);
  const canvas = h("canvas");
  return {
    ...source,
    offset, // the key position of query 0
    keyTexts,
    pads: new Set(layer.cross || layer.text !== "tokens" ? [] : run.pads), // which of them are padding
    queries: n,
    keys: m,
    wide: /** @type {Picture | null} */ (null), // the finer picture, once it is loaded
    queryName: nameOf(queryTexts, offset),
    keyName: nameOf(keyTexts, 0),
    whole: 1, // the end of the colour scale
    view: state.view ?? { y: 0, x: 0, step: 1 },
    chosen: place.chosen, // its query and key are the cell
    row: /** @type {Float32Array | null} */ (null), // weights of the chosen query, by key token
    column: /** @type {Float32Array | null} */ (null), // weights on the chosen key, by query token
    nonfinite: false, // NaN or infinity is among the weights
    stale: false, // what is said of the cell waits until somebody sees it
    /** The elements whose content changes. */
    parts: {
      canvas,
      box: h("div.map-of", { tabindex: 0, role: "group", "aria-label": shell.t("map", { n, m }) }, canvas),
      where: h("p.where"),
      scale: h("div"),
      readout: h("p.readout", { id: "readout" }),
      table: h("details.numbers", h("summary", shell.t("table here"))),
      lists: h("div.lists"),
      text: h("div.text"),
    },
  };
}

/** Whether this is still on the page. @param {Look} look */
const onPage = ({ parts }) => parts.box.isConnected;

/** Returns a function that tells whether the present cell is still chosen: results for an older cell are dropped. @param {Look} look */
function stillAt(look) {
  const { query, key } = look.chosen;
  return () => onPage(look) && look.chosen.query === query && look.chosen.key === key;
}

/** Draws the same head of another run of this text. */
export async function drawAgain() {
  if (!latest) return;
  const look = latest;
  const head = await headAt(look.page, look.chosen);
  await head.loading;
  if (!onPage(look) || head.version !== look.page.version) return;
  Object.assign(look, { head, ...(await surveyOf(head)) });
  await moved(look);
  follow(look, look.queries - 1);
}

/** The query at which a head opens: the last that is no padding. @param {Page} page @param {Head} head */
export function lastQuery(page, { address, layer, n }) {
  const pads = new Set(layer.text === "tokens" ? page.header.runs[address.run].pads : []);
  const offset = layer.cross ? 0 : layer.rules.query_offset[0];
  let query = n - 1;
  while (query > 0 && pads.has(query + offset)) query -= 1;
  return query;
}

/** Brings the map to the chosen cell; where no key is chosen, to the query's largest weight. */
export async function followPlace() {
  if (!latest) return;
  const look = latest;
  const { page, chosen, head } = look;
  const query = chosen.query < 0 || chosen.query >= head.n ? lastQuery(page, head) : chosen.query;
  const key = chosen.key < 0 ? await strongestKey(head, query).catch(look.failed) : chosen.key;
  if (onPage(look)) await show(look, query, Math.min(key ?? 0, head.m - 1));
}

/** The head's statistics, and what its weights are made of. @param {Source} source */
function facts({ head, place, shell: { t } }) {
  const { statistics, note } = head.layer;
  const said = Object.entries(statistics).flatMap(([name, values]) => {
    const value = values[place.chosen.head];
    return value === null ? [] : `${t(name)} ${fmt(value, 3)}`;
  });
  const stored = head.exact ? t("exact head", { dtype: head.stored }) : t("pictured head", { levels: LEVELS });
  return [h("p.says", said.join(" · ")), h("p.note", head.served ? t("served head") : stored, note && ` · ${note}`)];
}

/** What takes longer: the largest weight, what each key receives, a finer picture, tiles. @param {Look} look */
function fetchMore(look) {
  const { head } = look;
  const draw = () => onPage(look) && refresh(look);
  surveyOf(head).then((survey) => {
    if (look.head !== head) return;
    Object.assign(look, survey);
    draw();
  });
  if (head.n * head.m > 2 ** 20)
    head.wide().then((wide) => {
      look.wide = wide;
      draw();
    });
  whenReady(() => later(draw, requestAnimationFrame), look.failed);
}

// the map, with its scale, the part that is in view, and what a pixel is

export const frameOf = (/** @type {Look} */ look) => frame(look.parts.box.clientWidth, look);

/** Whether nobody sees an element, since what it is in is folded. @param {Element} element */
export const isFolded = (element) => Boolean(element.closest("details:not([open])"));

/** Draw the map again. @param {Look} look */
export function refresh(look) {
  const { parts, head, queries, keys, view, state, nonfinite } = look;
  const { t } = look.shell;
  parts.box.dataset.missing = "0";
  if (isFolded(parts.box)) return;
  const f = frameOf(look);
  settle(look, f);
  const { rows, cols, stretched, missing } = draw(parts.canvas, look, f);
  state.view = view;
  const shade = weighed(look.whole);
  const hatched = Boolean(head.layer.masked);
  const swatches = [
    hatched && h("span", h("i.hatched"), t("masked cell")),
    nonfinite && h("span", h("i.nonfinite"), t("nonfinite")),
  ];
  const [ends, high] = [t("ends here"), `≥ ${fmt(shade.high, 3)}`];
  const said = [high, nonfinite, ends, hatched].join(" ");
  if (parts.scale.dataset.said !== said) {
    const bar = h("canvas.bar-of", { width: 132, height: 10 });
    drawColours(bar, (x) => shade.along(x / 131));
    parts.scale.replaceChildren(h("div.legend", "0", bar, high, swatches, h("span.note", ends)));
  }
  parts.scale.dataset.said = said;
  const end = endOf(look, f);
  const inside = { i0: Math.floor(view.y), i1: Math.ceil(end.y) - 1, j0: Math.floor(view.x), j1: Math.ceil(end.x) - 1 };
  const pixel = rows * cols === 1 ? t("single") : (stretched ? t("stretched") : "") + t("many", { rows, cols });
  const where = t("where", { ...inside, n: queries, m: keys });
  write(parts.where, [where, pixel, missing && t("computing")].filter(Boolean).join(" · "));
  parts.box.dataset.missing = String(missing);
}

/** Around the chosen cell. @param {Look} look @param {number} factor      of what a pixel covers; 0: the whole */
export function nearer(look, factor) {
  const { query, key } = look.chosen;
  const f = frameOf(look);
  if (factor) zoom(look, f, factor, query + 0.5, key + 0.5);
  else showWhole(look, f);
  refresh(look);
  toLink(look);
}

// the chosen cell, and all that depends on it

/** After the cell moved. @param {Look} look @param {number} [wait]      milliseconds to wait: where a row takes long, only the last of many moves is computed */
export async function moved(look, wait) {
  const { chosen, head, parts, shell, place } = look;
  const still = stillAt(look);
  if (wait) await new Promise((then) => setTimeout(then, wait));
  if (!still()) return;
  const lines = [rowOf(head, chosen.query), columnOf(head, chosen.key)];
  const [row, column] = await Promise.all(lines).catch((why) => (look.failed(why), []));
  if (!still()) return;
  Object.assign(look, { row, column });
  look.stale = isFolded(parts.box);
  if (!look.stale) {
    refresh(look);
    const words = readout(look, shell.t);
    write(parts.readout, words);
    shell.say(words);
    fillLists(look, (query, key) => jump(look, query, key));
    look.dive.show({ actual: head, cell: { i: chosen.query, j: chosen.key } });
    fillTable(look, still);
  }
  shadeText(look);
  follow(look, chosen.query);
  place.live?.edges(look);
  toLink(look);
}

/** What the model says comes after a query's token. @param {Look} look @param {number} query */
export function follow({ answer, offset, queryName }, query) {
  answer.follow(query + offset, queryName(query));
}

/** The reader chooses a cell: bring it into view. @param {Look} look @param {number} query @param {number} key */
export function jump(look, query, key) {
  look.state.quiet = false;
  return show(look, query, key);
}

/** @param {Look} look @param {number} query @param {number} key */
function show(look, query, key) {
  look.place.choose("map", { query, key });
  bringIntoView(look, frameOf(look));
  if (look.head.served) refresh(look); // its weights take a while; all else is drawn once, with them
  return moved(look);
}

// controls and keys

/** @param {string} label @param {string} id @param {string[][]} options @param {string} value @param {(value: string) => void} then */
export const choice = (label, id, options, value, then) => h("label", `${label} `, select(id, options, value, then));

/** The controls of the map. @param {Look} look */
function controls(look) {
  const { t } = look.shell;
  const near = (/** @type {string} */ name, /** @type {string} */ sign, /** @type {number} */ factor) =>
    h("button", { title: t(name), "aria-label": t(name), onclick: () => nearer(look, factor) }, sign);
  const zooms = [near("nearer", "+", 0.5), near("farther", "−", 2), near("whole", "⤢", 0)];
  return h("div.picks.controls", h("span.zooms", zooms));
}

function bindKeys(/** @type {Look} */ look) {
  const { shell, chosen, state, pick, queries, keys } = look;
  const { box } = look.parts;
  /** Whether the map is in view: elsewhere the arrows scroll. */
  const inView = () => box.getBoundingClientRect().bottom > 0 && box.getBoundingClientRect().top < innerHeight;
  const within = (/** @type {number} */ place, /** @type {number} */ size) => Math.max(0, Math.min(size - 1, place));
  for (const [key, [down, right]] of Object.entries(ARROWS))
    shell.key(key, ({ shiftKey }) => {
      if (!inView()) return false;
      const far = shiftKey ? 10 : 1;
      jump(look, within(chosen.query + far * down, queries), within(chosen.key + far * right, keys));
    });
  for (const key of ["Enter", "Escape"])
    shell.key(key, () => {
      state.pinned = key === "Enter";
      moved(look);
    });
  for (const [key, factor] of Object.entries({ "+": 0.5, "=": 0.5, "-": 2, "−": 2, 0: 0 }))
    shell.key(key, () => nearer(look, factor));
  for (const [key, [layers, heads]] of Object.entries({ "[": [0, -1], "]": [0, 1], "{": [-1, 0], "}": [1, 0] }))
    shell.key(key, () => {
      pick({ run: chosen.run, layer: chosen.layer + layers, head: chosen.head + heads });
    });
}
