// What the reader types and changes on a page that holds its model: the run takes the place of the page's record.

import { cellHere, fromAddress, isUnchanged, toAddress } from "../address.js";
import { afterwards } from "../dom.js";
import { largest } from "../numbers.js";
import { drawArcs } from "../long/text.js";
import { engineOf, show } from "./engine.js";

/** @typedef {{row: Float32Array | null, chosen: Chosen, parts: {text: HTMLElement}}} Shown      of the map */

const REST = 500; // milliseconds
const [ARCS, ARC] = [6, 0.01]; // of a query so many, and the least weight

/** A list without a place that it has, or with one that it has not. @template T @param {T[]} list @param {T} place */
function toggled(list, place) {
  const without = list.filter((each) => String(each) !== String(place));
  return without.length < list.length ? without : [...list, place];
}

/** What is chosen in a text of n tokens: the cell of the address, else the last query. @param {number} n @param {number[]} cell */
const cellIn = (n, [query, key]) => (query < n && key < n ? { query, key } : { query: n - 1, key: -1 });

/**
 * What the reader can do.
 * @param {{text: string, change: Change}} state @param {Chosen} chosen
 * @param {string} usual      the page's text @param {() => void} run      runs what is typed and changed, soon
 */
function actionsOf(state, chosen, usual, run) {
  const change = (/** @type {Partial<Change>} */ more) => {
    state.change = { ...state.change, ...more };
    toAddress(state.text === usual ? null : state.text, state.change);
    run();
  };
  return {
    change,
    type(/** @type {string} */ text) {
      state.text = text;
      change({});
    },
    /** Cuts an edge of the chosen head or puts it back. @param {number} [key] @param {number} [query] */
    cut(key = chosen.key, query = chosen.query) {
      if (key >= 0) change({ cuts: toggled(state.change.cuts, [chosen.layer, chosen.head, query, key]) });
    },
    strike: () => change({ hidden: toggled(state.change.hidden, chosen.query) }),
    turn: () => change({ off: toggled(state.change.off, [chosen.layer, chosen.head]) }),
  };
}

export function openLive(/** @type {Page} */ page, /** @type {Place} */ place) {
  const { header } = page;
  const { facts } = header;
  const { chosen } = place;
  const state = { writing: false, failed: false, ...fromAddress(facts.text) };
  const soon = afterwards(() => apply());
  const actions = actionsOf(state, chosen, facts.text, soon);
  /** @type {Awaited<ReturnType<typeof engineOf>> | null} */
  let engine = null;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let resting;
  let shown = ""; // the tokens of the run that is shown
  const room = {
    state,
    isReady: () => Boolean(engine),
    redraw: () => {}, // draws all rooms, of another text
    outdate: (/** @type {boolean} */ _) => {}, // what made the answer is that of the run before
    update: () => {}, // the controls
    ...actions,
    next: () => engine?.next(state.text, state.change),
    mark: () => mark(state.change),
    edges: (/** @type {Shown} */ look) => header.why || edges(look, state.change, actions.cut),
  };

  /** Runs the text, and shows the run. @param {boolean} [linked]      the address says what is chosen */
  function apply(linked) {
    const ids = engine?.idsOf(state.text) ?? [];
    if (engine && ids.length) {
      const [before, { why }] = [shown, header];
      page.version++;
      show(header, engine.document(state.text, ids, state.change));
      shown = ids.join();
      if (before === shown && !header.why) {
        room.outdate(Boolean(why));
        place.again();
      } else {
        if (linked || before !== shown) Object.assign(chosen, cellIn(header.tokens.length, linked ? cellHere() : []));
        room.redraw();
      }
    }
    room.update();
    clearTimeout(resting);
    if (!header.why && ids.length) resting = setTimeout(() => explain({ token: null, against: null }), REST);
  }

  /** Says what made the answer, once the reader rests. @param {import("./causes.js").Asked} asked */
  async function explain(asked) {
    const { version } = page;
    const still = () => page.version === version;
    const why = await engine?.causes(state.text, state.change, asked, explain, still);
    if (!why || !still()) return;
    header.why = why;
    room.redraw();
  }
  setTimeout(async () => {
    engine = await engineOf(page).catch(() => null);
    state.failed = !engine; // the browser has no WebAssembly, or does not let a page run it
    shown = engine?.idsOf(facts.text).join() ?? "";
    if (!engine || (state.text === facts.text && isUnchanged(state.change))) room.update();
    else apply(true);
  }, 50); // once the page is there
  addEventListener("hashchange", () => {
    Object.assign(state, fromAddress(facts.text));
    apply(true);
  });
  return room;
}

/** Marks hidden words and heads that are off. @param {Change} change */
export function mark({ hidden, off }) {
  const marked = (/** @type {string} */ what, /** @type {string} */ place, /** @type {any[]} */ list) => {
    const places = new Set(list.map((each) => [each].flat().join(" ")));
    for (const each of document.querySelectorAll(what))
      each.classList.toggle("out", places.has(each.getAttribute(place) ?? ""));
  };
  marked(".passage .token", "data-token", hidden);
  marked(".heads .head", "data-place", off);
}

/** What the chosen query looks at, as arcs over the text, and what is cut; a click cuts or puts back. @param {Shown} look @param {Change} change @param {(key: number, query: number) => void} cut */
function edges({ row, chosen: { layer, head, query }, parts }, { cuts }, cut) {
  if (!row) return;
  const here = String([layer, head, query]);
  const gone = cuts.filter((each) => String(each.slice(0, 3)) === here).map((each) => each[3]);
  const arcs = [...largest(row, ARCS, ARC), ...gone].map((key) => [key, gone.includes(key) ? 0 : row[key]]);
  drawArcs(parts.text, query, /** @type {[number, number][]} */ (arcs), (key) => cut(key, query));
}
