// The long view: every head as a square, one head as a map, and the text. All is drawn from one state.

import { fromLink } from "../address.js";
import { add, byId, h, write } from "../dom.js";
import { diveRoom } from "../dive.js";
import { wordsOf } from "../causes.js";
import { grid, headsOf, nameOfHead, OFF, PICTURES, showChosen } from "./grid.js";
import { choice, isFolded, lastQuery, openLook } from "./look.js";
import { headAt } from "./source.js";
import { newReading } from "./text.js";
import { thumbnails } from "./thumbnails.js";

export const newState = () => ({
  statistic: OFF, // or the first that there is
  address: /** @type {Address} */ ({ run: 0, layer: 0, head: 0 }),
  shows: /** @type {Shows} */ ("weights"),
  query: -1, // tokens; −1: the last that is no padding
  key: -1, // −1: the one with the query's largest weight
  pinned: false,
  quiet: false, // the page's address stays as it is until the reader acts on the map
  view: /** @type {{y: number, x: number, step: number} | null} */ (null), // the first query and key, and tokens for each pixel
  size: "", // of the matrix that the view is of
  reading: newReading(),
});

/** A place in a list that goes round. @param {number} address @param {number} size */
const around = (address, size) => (address < 0 ? size - 1 : address >= size ? 0 : address);

/** @typedef {Omit<Source, "head"> & {front: HTMLElement, here: HTMLElement, pictures: ReturnType<typeof thumbnails>, follow: () => void, redo: () => void}} Room      what the functions of this module share, from one drawing of the page to the next; follow: the map goes to the state's cell; redo: it is drawn of another run */

let latest = 0; // number of the latest head that was opened: an older one that arrives later is not drawn

/** @param {Page} page @param {Place} place @returns {(shell: Shell, host: HTMLElement, answer: Answer, front: HTMLElement) => void} */
export function openLong(page, place) {
  const { runs, layers: steps } = page.header;
  const state = newState();
  const { run, layer, head, query, key } = place.chosen;
  Object.assign(state, { address: { run, layer, head }, query, key, quiet: Boolean(steps) });
  if (!page.header.why && runs[0].layers[0].statistics.effect)
    Object.assign(state, { statistic: "effect", shows: "contributions" });
  fromLink(state, runs);
  let { version } = page; // that is drawn
  return (shell, host, answer, front) => {
    const here = h("section.here", { "aria-live": "off" });
    const [pictures, dive, still] = [thumbnails(page), diveRoom(shell), () => {}];
    const failed = (/** @type {unknown} */ why) => {
      const reason = why instanceof Error ? why.message : String(why);
      const said = reason === "ended" ? shell.t("ended") : shell.t("lost", { why: reason });
      here.replaceChildren(headingOf(room), h("p.warn", { role: "alert" }, said));
      return null;
    };
    /** @type {Room} */
    const room = {
      ...{ page, place, state, shell, answer, dive, front, here, pictures, follow: still, redo: still, failed },
      again: () => openHead(room),
      pick(address) {
        state.quiet = false;
        go(room, address);
        place.choose("map", state.address);
      },
    };
    front.hidden = Math.max(...runs.map(headsOf)) < 2 && runs.length < 2;
    host.querySelector(".here")?.remove();
    host.append(here);
    if (place.live)
      // no dblclick comes where the first click draws the heads anew
      front.onclick = ({ target, detail }) =>
        detail === 2 && /** @type {Element} */ (target).closest(".head") && place.live?.turn();
    if (version < page.version) Object.assign(state, { query: place.chosen.query, key: place.chosen.key });
    let drawn = (version = page.version);
    place.follow("map", ({ chosen: { query, key, run, layer, head } }) => {
      const moves = query !== state.query || key !== state.key;
      const { address } = state;
      Object.assign(state, { query, key });
      if (address.run !== run || address.layer !== layer || address.head !== head) go(room, { run, layer, head });
      else if (moves) room.follow();
      if (version !== page.version) room.redo();
      version = page.version;
      const waits = front.closest(".stale") && front.querySelector(".squares"); // for what made the answer
      if (drawn === version || isFolded(front) || waits) return;
      drawn = version;
      redrawFront(room);
      pictures.again();
    });
    drawFront(room);
    showChosen(front);
    openHead(room);
  };
}

/** Every head of the run, and the choice of the run and of what is shown of each. @param {Room} room */
function drawFront(room) {
  const { page, state, front, pictures, shell, answer, place } = room;
  const { t } = shell;
  const { runs, why } = page.header;
  const { layers } = runs[state.address.run];
  const nameOfRun = (/** @type {any} */ run, /** @type {number} */ index) => [String(index), run.name || String(index)];
  const known = (/** @type {string} */ name) =>
    layers.some(({ statistics }) => statistics[name].some((/** @type {any} */ x) => x !== null));
  const statistics = [...(why ? [OFF] : []), PICTURES, ...Object.keys(layers[0].statistics).filter(known)];
  const shown = statistics.includes(state.statistic) ? state.statistic : statistics[0];
  const options = statistics.map((name) => [name, t(name === PICTURES ? "its weights" : name)]);
  const pickRun = (/** @type {string} */ run) => room.pick({ ...state.address, run: Number(run) });
  const show = (/** @type {string} */ statistic) => {
    state.statistic = statistic;
    drawFront(room);
    byId("statistic")?.focus();
  };
  const choose = (/** @type {number} */ layer, /** @type {number} */ head) =>
    room.pick({ ...state.address, layer, head });
  const picks = h(
    "div.picks",
    runs.length > 1 && choice(t("run"), "run", runs.map(nameOfRun), String(state.address.run), pickRun),
    choice(t("colour by"), "statistic", options, shown, show),
    why && findField(shell, layers, choose),
  );
  const made = grid(page, shown, state.address, choose, shell, pictures, answer);
  answer.show = (layer = place.chosen.layer, head = place.chosen.head) => {
    write(answer.caption, made.wordsOf(layer, head));
    answer.arcs(layer, head);
  };
  const title = why ? wordsOf(page, shell).grid : t("every head");
  front.replaceChildren(h("div.headed", h("h2", title), picks), made.element);
  answer.show();
  place.live?.mark();
}

/** A field that finds a head by its name, such as 23.4. @param {Shell} shell @param {Layer[]} layers @param {(layer: number, head: number) => void} choose */
function findField(shell, layers, choose) {
  const oninput = (/** @type {any} */ { target }) => {
    const [layer, head] = target.value.trim().split(".");
    const place = layers.findIndex(({ name }) => name === layer);
    if (layers[place]?.heads[head] === undefined) return;
    choose(place, Number(head));
    const field = /** @type {HTMLInputElement} */ (byId("find"));
    field.value = target.value;
    field.focus();
  };
  for (const digit of "123456789") shell.key(digit, () => (byId("find")?.focus(), false)); // which types it there
  const label = shell.t("find");
  return h("input", { type: "search", id: "find", placeholder: label, "aria-label": label, oninput });
}

function go(/** @type {Room} */ room, /** @type {Address} */ { run, layer: place, head }) {
  const { layers } = room.page.header.runs[run];
  const layer = around(place, layers.length);
  room.state.address = { run, layer, head: around(head, layers[layer].heads.length) };
  redrawFront(room);
  showChosen(room.front);
  openHead(room);
}

/** The heads again; where one has the focus, the chosen one gets it. @param {Room} room */
function redrawFront(room) {
  const focused = room.front.contains(document.activeElement) && document.activeElement?.hasAttribute("data-place");
  const top = scrollY; // meanwhile the page is shorter, and its end may be in view
  drawFront(room);
  if (scrollY !== top) scrollTo({ top, behavior: "instant" });
  const chosen = /** @type {HTMLElement | null} */ (room.front.querySelector('[aria-pressed="true"]'));
  if (focused) chosen?.focus({ preventScroll: true });
}

function headingOf(/** @type {Room} */ { page, state: { address }, shell }) {
  const { layers } = page.header.runs[address.run];
  return h("h2", { id: "head" }, nameOfHead(layers, address.layer, address.head, shell.t));
}

async function openHead(/** @type {Room} */ room) {
  const { page, state, shell, here } = room;
  const request = ++latest;
  if (!here.firstChild) add(here, [headingOf(room), h("p.says", shell.t("computing"))]);
  const head = await headAt(page, state.address).catch(room.failed);
  if (request !== latest || !head) return;
  if (state.query < 0 || state.query >= head.n) state.query = lastQuery(page, head);
  if (state.key >= head.m) state.key = -1;
  const size = `${head.n} ${head.m}`;
  if (state.size && state.size !== size) state.view = null;
  state.size = size;
  await openLook({ ...room, head }, here, headingOf(room), (follow, redo) => Object.assign(room, { follow, redo }));
  room.pictures.start();
}
