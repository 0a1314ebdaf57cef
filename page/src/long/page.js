// The long view: every head as a square, one head as a map, and the text. All is drawn from one state.

import { add, byId, h } from "../dom.js";
import { diveRoom } from "../dive/dive.js";
import { choice } from "./controls.js";
import { grid, headsOf, nameOfHead, PICTURES, showChosen } from "./grid.js";
import { fromLink } from "./link.js";
import { openLook } from "./look.js";
import { newReading } from "./reading.js";
import { headAt, lastQuery } from "./source.js";
import { thumbnails } from "./thumbnails.js";

export const newState = () => ({
  statistic: PICTURES,
  address: /** @type {Address} */ ({ run: 0, layer: 0, head: 0 }),
  shows: /** @type {Shows} */ ("weights"),
  aside: false,
  display: false, // the further controls are open
  query: -1, // tokens; −1: the last that is no padding
  key: -1, // −1: the one with the query's largest weight
  pinned: false,
  quiet: false, // the page's address stays as it is until the reader acts on the map
  view: /** @type {View | null} */ (null),
  reading: newReading(),
});

/** A place in a list that goes round. @param {number} address @param {number} size */
const around = (address, size) => (address < 0 ? size - 1 : address >= size ? 0 : address);

/**
 * What the functions of this module share, from one drawing of the page to the next.
 * @typedef {{page: Page, place: Place, state: Source["state"], shell: Shell, answer: Answer, dive: Dive, front: HTMLElement, here: HTMLElement, pictures: ReturnType<typeof thumbnails>, follow: () => void, suppose: () => void}} Room      follow: the map goes to the state's cell; suppose: it is drawn under another supposition
 */

let latest = 0; // number of the latest head that was opened: an older one that arrives later is not drawn

/** @param {Page} page @param {Place} place */
export function openLong(page, place) {
  const { runs, layers: steps } = page.header;
  const state = newState();
  const { run, layer, head, query, key } = place.chosen;
  Object.assign(state, { address: { run, layer, head }, query, key, quiet: Boolean(steps) });
  if (page.header.why) state.reading.by = "effect";
  else if (runs[0].layers[0].statistics.effect) Object.assign(state, { statistic: "effect", shows: "contributions" });
  fromLink(state, runs);
  return (/** @type {Shell} */ shell, /** @type {HTMLElement} */ host, /** @type {Answer} */ answer) => {
    const [front, here] = [h("section.front"), h("section.here", { "aria-live": "off" })];
    const [pictures, dive, still] = [thumbnails(page), diveRoom(shell, place), () => {}];
    /** @type {Room} */
    const room = { page, place, state, shell, answer, dive, front, here, pictures, follow: still, suppose: still };
    const most = Math.max(...runs.map((/** @type {any} */ run) => headsOf(run)));
    front.hidden = most < 2 && runs.length < 2;
    add(host, [front, here, dive.element]);
    let { what } = place;
    place.follow("map", ({ chosen: { query, key, ...address }, what: now }) => {
      const moves = query !== state.query || key !== state.key;
      Object.assign(state, { query, key });
      if (
        address.run !== state.address.run ||
        address.layer !== state.address.layer ||
        address.head !== state.address.head
      )
        go(room, address);
      else if (moves) room.follow();
      if (now !== what) room.suppose();
      what = now;
    });
    drawFront(room);
    openHead(room);
  };
}

/** Every head of the run, and the choice of the run and of what is shown of each. @param {Room} room */
function drawFront(room) {
  const { page, state, front, pictures, shell } = room;
  const { t } = shell;
  const { runs } = page.header;
  const { layers } = runs[state.address.run];
  const nameOfRun = (/** @type {any} */ run, /** @type {number} */ index) => [String(index), run.name || String(index)];
  const known = (/** @type {string} */ name) =>
    layers.some(({ statistics }) => statistics[name].some((/** @type {any} */ x) => x !== null));
  const statistics = Object.keys(layers[0].statistics).filter(known);
  const options = statistics.map((name) => [name, t(name)]);
  const pickRun = (/** @type {string} */ run) => pick(room, { ...state.address, run: Number(run) });
  const show = (/** @type {string} */ statistic) => {
    state.statistic = statistic;
    drawFront(room);
    byId("statistic")?.focus();
  };
  const picks = h(
    "div.picks",
    runs.length > 1 && choice(t("run"), "run", runs.map(nameOfRun), String(state.address.run), pickRun),
    choice(t("colour by"), "statistic", [[PICTURES, t("its weights")], ...options], state.statistic, show),
  );
  const choose = (/** @type {number} */ layer, /** @type {number} */ head) =>
    pick(room, { ...state.address, layer, head });
  const heads = grid(page, state.statistic, state.address, choose, shell, pictures);
  front.replaceChildren(h("div.headed", h("h2", t("every head")), picks), heads);
  showChosen(front);
}

/** The reader chooses a head. @param {Room} room @param {Address} address */
function pick(room, address) {
  room.state.quiet = false;
  go(room, address);
  room.place.choose("map", room.state.address);
}

/** @param {Room} room @param {Address} address */
function go(room, { run, layer: place, head }) {
  const { page, state, front } = room;
  const { runs } = page.header;
  const { what } = room.place;
  if (Object.keys(what.values).length) room.place.suppose("map", { ...what, values: {} }); // edited numbers belong to their head
  const layers = runs[run].layers;
  const layer = around(place, layers.length);
  const before = runs[state.address.run].layers[state.address.layer];
  state.address = { run, layer, head: around(head, layers[layer].heads.length) };
  if (before.queries !== layers[layer].queries || before.keys !== layers[layer].keys) state.view = null;
  const focused = document.activeElement?.getAttribute("data-place");
  drawFront(room);
  const chosen = /** @type {HTMLElement | null} */ (front.querySelector('[aria-pressed="true"]'));
  if (focused) chosen?.focus({ preventScroll: true });
  openHead(room);
}

/** @param {Room} room */
async function openHead(room) {
  const { page, place, state, shell, here, pictures } = room;
  const { t } = shell;
  const request = ++latest;
  const { layers } = page.header.runs[state.address.run];
  const heading = h("h2", { id: "head" }, nameOfHead(layers, state.address.layer, state.address.head, t));
  const failed = (/** @type {unknown} */ why) => {
    const reason = why instanceof Error ? why.message : String(why);
    const said = reason === "ended" ? t("ended") : t("lost", { why: reason });
    here.replaceChildren(heading, h("p.warn", { role: "alert" }, said));
    return null;
  };
  if (!here.firstChild) add(here, [heading, h("p.says", t("computing"))]);
  const head = await headAt(page, state.address).catch(failed);
  if (request !== latest || !head) return;
  if (state.query < 0 || state.query >= head.n) state.query = lastQuery(page, head);
  if (state.key >= head.m) state.key = -1;
  const { answer, dive } = room;
  const actions = {
    pick: (/** @type {Address} */ address) => pick(room, address),
    again: () => openHead(room),
    failed,
    shownAs: pictures.shownAs,
  };
  const source = { answer, dive, page, state, place, shell, head, ...actions };
  await openLook(source, here, heading, (follow, suppose) => Object.assign(room, { follow, suppose }));
  pictures.start();
}
