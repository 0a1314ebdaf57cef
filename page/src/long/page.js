// The long view: every head as a square, one head as a map, and the text. All is drawn from one state.

import { add, h } from "../dom.js";
import { diveRoom } from "../dive/dive.js";
import { choice } from "./controls.js";
import { grid, headsOf, PICTURES, showChosen } from "./grid.js";
import { fromLink } from "./link.js";
import { openLook } from "./look.js";
import { newReading } from "./reading.js";
import { headAt } from "./source.js";
import { thumbnails } from "./thumbnails.js";

/** @typedef {import("./source.js").Address} Address */
/** @typedef {ReturnType<typeof newState>} State */
/** @typedef {ReturnType<typeof import("../answer.js").answerRoom>} Answer */

export const newState = () => ({
  statistic: PICTURES,
  at: /** @type {Address} */ ({ run: 0, layer: 0, head: 0 }),
  other: /** @type {Address | null} */ (null),
  rule: /** @type {"most" | "mean"} */ ("most"),
  scale: /** @type {"sqrt" | "linear" | "log"} */ ("sqrt"),
  shows: /** @type {import("./effects.js").Shows} */ ("weights"),
  aside: false,
  inView: /** @type {boolean | null} */ (null), // null: in view where the matrix is large
  fixed: false, // colours from 0 to 1
  words: false,
  display: false, // the further controls are open
  query: -1, // tokens; −1: the last
  key: -1, // −1: the one with the query's largest weight
  pinned: false,
  quiet: false, // the page's address stays as it is until the reader acts on the map
  view: /** @type {import("./shown.js").View | null} */ (null),
  reading: newReading(),
});

/** A place in a list that goes round. @param {number} at @param {number} size */
const around = (at, size) => (at < 0 ? size - 1 : at >= size ? 0 : at);

/** @param {import("../container.js").Page} page @param {import("../place.js").Place} place */
export function openLong(page, place) {
  const { runs, layers: steps } = page.header;
  const state = newState();
  const { run, layer, head, query, key } = place.chosen;
  Object.assign(state, { at: { run, layer, head }, query, key, quiet: Boolean(steps) });
  fromLink(state, runs);
  let latest = 0; // number of the latest head that was opened: an older one that arrives later is not drawn
  return (
    /** @type {import("../shell.js").Shell} */ shell,
    /** @type {HTMLElement} */ host,
    /** @type {Answer} */ answer,
  ) => {
    const { t } = shell;
    const pictures = thumbnails(page);
    const front = h("section.front");
    const here = h("section.here", { "aria-live": "off" });
    const dive = diveRoom(shell, place);
    const most = Math.max(...runs.map((/** @type {any} */ run) => headsOf(run)));
    front.hidden = most < 2 && runs.length < 2;
    add(host, [front, here, dive.element]);
    let placed = place.what;
    place.follow("map", ({ chosen, what }) => {
      const { at } = state;
      const { query, key } = chosen;
      const moves = query !== state.query || key !== state.key;
      Object.assign(state, { query, key });
      if (at.run !== chosen.run || at.layer !== chosen.layer || at.head !== chosen.head)
        go({ run: chosen.run, layer: chosen.layer, head: chosen.head });
      else if (moves) followed?.();
      if (what !== placed) supposed?.();
      placed = what;
    });
    /** @type {(() => void) | null} the map goes to the state's cell */
    let followed = null;
    /** @type {(() => void) | null} it is drawn under another supposition */
    let supposed = null;

    const nameOfRun = (/** @type {any} */ run, /** @type {number} */ at) =>
      run.name || (page.header.edited ? t(run.edited ? "edited" : "not edited") : String(at));

    function drawFront() {
      const run = runs[state.at.run];
      front.replaceChildren(
        h(
          "div.headed",
          h("h2", t("every head")),
          h(
            "div.picks",
            runs.length > 1 &&
              choice(
                t("run"),
                "run",
                runs.map((/** @type {any} */ each, /** @type {number} */ at) => [String(at), nameOfRun(each, at)]),
                String(state.at.run),
                (value) => pick({ ...state.at, run: Number(value) }),
              ),
            choice(
              t("colour by"),
              "statistic",
              [
                PICTURES,
                ...Object.keys(run.layers[0].statistics).filter((name) =>
                  run.layers.some((/** @type {any} */ layer) =>
                    layer.statistics[name].some((/** @type {any} */ x) => x !== null),
                  ),
                ),
              ].map((name) => [name, t(name === PICTURES ? "its weights" : name)]),
              state.statistic,
              (value) => {
                state.statistic = value;
                drawFront();
                document.getElementById("statistic")?.focus();
              },
            ),
          ),
        ),
        grid(run, state.statistic, state.at, (layer, head) => pick({ ...state.at, layer, head }), shell, pictures),
      );
      showChosen(front);
    }

    /** The reader chooses a head. @param {Address} at */
    function pick(at) {
      state.quiet = false;
      go(at);
      place.choose("map", state.at);
    }

    /** @param {Address} at */
    function go(at) {
      const { values } = place.what;
      if (Object.keys(values).length) place.suppose("map", { ...place.what, values: {} }); // edited numbers belong to their head
      const layers = runs[at.run].layers;
      const layer = around(at.layer, layers.length);
      const before = runs[state.at.run].layers[state.at.layer];
      state.at = { run: at.run, layer, head: around(at.head, layers[layer].heads.length) };
      if (before.queries !== layers[layer].queries || before.keys !== layers[layer].keys) state.view = null;
      const focused = document.activeElement?.getAttribute("data-place");
      drawFront();
      if (focused)
        /** @type {HTMLElement | null} */ (front.querySelector('[aria-pressed="true"]'))?.focus({
          preventScroll: true,
        });
      openHead();
    }

    async function openHead() {
      const request = ++latest;
      const layer = runs[state.at.run].layers[state.at.layer];
      const number = layer.heads[state.at.head];
      const several = runs[state.at.run].layers.length > 1 || layer.name !== "";
      const heading = h(
        "h2",
        { id: "head" },
        several ? t("this head", { layer: layer.name, head: number }) : t("this matrix", { head: number }),
      );
      if (!here.firstChild) add(here, [heading, h("p.says", t("computing"))]);
      const head = await headAt(page, state.at).catch((why) => failed(why));
      const other = state.other && (await headAt(page, state.other).catch((why) => failed(why)));
      if (request !== latest || !head) return;
      if (state.query < 0 || state.query >= head.n) state.query = head.n - 1;
      if (state.key >= head.m) state.key = -1;
      const given = {
        answer,
        dive,
        page,
        state,
        place,
        shell,
        head,
        other,
        pick,
        again: openHead,
        failed,
        shownAs: pictures.shownAs,
      };
      await openLook(given, here, heading, (follow, suppose) => ([followed, supposed] = [follow, suppose]));
      pictures.start();

      /** @param {unknown} why */
      function failed(why) {
        const reason = why instanceof Error ? why.message : String(why);
        here.replaceChildren(
          heading,
          h("p.warn", { role: "alert" }, reason === "ended" ? t("ended") : t("lost", { why: reason })),
        );
        return null;
      }
    }

    drawFront();
    openHead();
  };
}
