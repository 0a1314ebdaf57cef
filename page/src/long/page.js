// The long view: every head as a picture, one head as a map, and the text. All is drawn from the chosen place.

import { fromLink } from "../address.js";
import { add, h, write } from "../dom.js";
import { diveRoom } from "../dive.js";
import { wordsOf } from "../causes.js";
import { grid, headsOf, nameOfHead, showChosen } from "./grid.js";
import { choice, drawAgain, followPlace, isFolded, lastQuery, openLook } from "./look.js";
import { headAt } from "./source.js";
import { newReading } from "./text.js";
import { thumbnails } from "./thumbnails.js";

export const newState = () => ({
  pinned: false, // the pointer leaves the cell as it is
  quiet: false, // the page's address stays as it is until the reader acts on the map
  view: /** @type {{y: number, x: number, step: number} | null} */ (null), // the first query and key, and tokens for each pixel
  size: "", // of the matrix that the view is of
  reading: newReading(),
});

/** A place in a list that goes round. @param {number} address @param {number} size */
const around = (address, size) => (address < 0 ? size - 1 : address >= size ? 0 : address);

/** @typedef {Omit<Source, "head"> & {front: HTMLElement, pictures: ReturnType<typeof thumbnails>, opened: string}} Room      what the functions of this module share, from one drawing of the page to the next; opened: the head that is on the map */

let latest = 0; // number of the latest head that was opened: an older one that arrives later is not drawn

/** @param {Page} page @param {Place} place @returns {(shell: Shell, host: HTMLElement, answer: Answer, front: HTMLElement) => void} */
export function openLong(page, place) {
  const { runs, layers: steps } = page.header;
  const state = newState();
  state.quiet = Boolean(steps);
  fromLink(state, place.chosen, runs);
  return (shell, host, answer, front) => {
    const here = h("section.here", { "aria-live": "off" });
    const [pictures, dive] = [thumbnails(page), diveRoom(shell)];
    const failed = (/** @type {unknown} */ why) => {
      const reason = why instanceof Error ? why.message : String(why);
      const said = reason === "ended" ? shell.t("ended") : shell.t("lost", { why: reason });
      here.replaceChildren(headingOf(room), h("p.warn", { role: "alert" }, said));
      return null;
    };
    /** @type {Room} */
    const room = {
      ...{ page, place, state, shell, answer, dive, front, here, pictures, opened: "", failed },
      pick({ run, layer: to, head }) {
        const { layers } = runs[run];
        const layer = around(to, layers.length);
        state.quiet = false;
        place.choose("", { run, layer, head: around(head, layers[layer].heads.length) });
      },
    };
    front.hidden = Math.max(...runs.map(headsOf)) < 2 && runs.length < 2;
    host.querySelector(".here")?.remove();
    host.append(here);
    if (place.live)
      // no dblclick comes where the first click draws the heads anew
      front.onclick = ({ target, detail }) =>
        detail === 2 && /** @type {Element} */ (target).closest(".head") && place.live?.turn();
    let [{ version }, drawn] = [page, page.version];
    place.follow("map", () => {
      if (room.opened !== nameOf(room)) go(room);
      else if (version === page.version) followPlace();
      if (version !== page.version) drawAgain();
      version = page.version;
      if (drawn === version || isFolded(front)) return;
      drawn = version;
      if (!front.closest(".stale")) redrawFront(room); // else they wait for what made the answer
      pictures.again();
    });
    drawFront(room);
    showChosen(front);
    openHead(room);
  };
}

const nameOf = (/** @type {Room} */ { place: { chosen } }) => `${chosen.run} ${chosen.layer} ${chosen.head}`;

/** Every head of the run, and the choice of the run. @param {Room} room */
function drawFront(room) {
  const { page, front, pictures, shell, answer, place } = room;
  const { t } = shell;
  const { runs, why } = page.header;
  const { chosen } = place;
  const nameOfRun = (/** @type {any} */ run, /** @type {number} */ index) => [String(index), run.name || String(index)];
  const pickRun = (/** @type {string} */ run) => room.pick({ ...chosen, run: Number(run) });
  const choose = (/** @type {number} */ layer, /** @type {number} */ head) => room.pick({ ...chosen, layer, head });
  const picks = runs.length > 1 && choice(t("run"), "run", runs.map(nameOfRun), String(chosen.run), pickRun);
  const made = grid(page, chosen, choose, shell, pictures, answer);
  answer.show = (layer = chosen.layer, head = chosen.head) => {
    write(answer.caption, made.wordsOf(layer, head));
    answer.arcs(layer, head);
  };
  const title = why ? wordsOf(page, shell).grid : t("every head");
  front.replaceChildren(h("div.headed", h("h2", title), h("div.picks", picks)), made.element);
  answer.show();
  place.live?.mark();
}

function go(/** @type {Room} */ room) {
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

function headingOf(/** @type {Room} */ { page, place: { chosen }, shell }) {
  const { layers } = page.header.runs[chosen.run];
  return h("h2", { id: "head" }, nameOfHead(layers, chosen.layer, chosen.head, shell.t));
}

async function openHead(/** @type {Room} */ room) {
  const { page, state, shell, here, place } = room;
  const { chosen } = place;
  const request = ++latest;
  room.opened = nameOf(room);
  if (!here.firstChild) add(here, [headingOf(room), h("p.says", shell.t("computing"))]);
  const head = await headAt(page, chosen).catch(room.failed);
  if (request !== latest || !head) return;
  const query = chosen.query < 0 || chosen.query >= head.n ? lastQuery(page, head) : chosen.query;
  place.choose("map", { query, key: chosen.key >= head.m ? -1 : chosen.key });
  const size = `${head.n} ${head.m}`;
  if (state.size && state.size !== size) state.view = null;
  state.size = size;
  await openLook({ ...room, head }, headingOf(room));
  room.pictures.start();
}
