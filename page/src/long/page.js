// The long view: every head as a square, one head as a map, and the text. All is drawn from one state.

import { add, h } from "../dom.js";
import { spelled } from "../numbers.js";
import { choice } from "./controls.js";
import { grid } from "./grid.js";
import { fromLink } from "./link.js";
import { openLook } from "./look.js";
import { newReading } from "./reading.js";
import { headAt } from "./source.js";

/** @typedef {import("./source.js").Address} Address */
/** @typedef {ReturnType<typeof newState>} State */

export const newState = () => ({
  statistic: "entropy",
  at: /** @type {Address} */ ({ run: 0, layer: 0, head: 0 }),
  other: /** @type {Address | null} */ (null),
  rule: /** @type {"most" | "mean"} */ ("most"),
  scale: /** @type {"sqrt" | "linear" | "log"} */ ("sqrt"),
  aside: false,
  inView: /** @type {boolean | null} */ (null), // null: in view where the matrix is large
  words: false,
  query: -1, // tokens; −1: the last
  key: -1, // −1: the one with the query's largest weight
  pinned: false,
  view: /** @type {import("./shown.js").View | null} */ (null),
  reading: newReading(),
});

/** @param {import("../container.js").Page} page */
export function openLong(page) {
  const { runs, title } = page.header;
  const state = newState();
  fromLink(state, runs);
  let latest = 0; // number of the latest head that was opened: an older one that arrives later is not drawn
  return (/** @type {import("../shell.js").Shell} */ shell) => {
    const { t, main } = shell;
    const front = h("section.front");
    const here = h("section.here", { "aria-live": "off" });
    add(main, [h("h1", spelled(title, 80)), front, here]);

    function drawFront() {
      const run = runs[state.at.run];
      const heads = run.layers.reduce(
        (/** @type {number} */ sum, /** @type {any} */ layer) => sum + layer.heads.length,
        0,
      );
      front.replaceChildren(
        h("h2", t("every head")),
        h("p.says", t("every head says", { layers: run.layers.length, heads, tokens: run.layers[0].keys })),
        h(
          "div.picks",
          runs.length > 1 &&
            choice(
              t("run"),
              "run",
              runs.map((/** @type {any} */ each, /** @type {number} */ at) => [String(at), each.name || String(at)]),
              String(state.at.run),
              (value) => go({ ...state.at, run: Number(value) }),
            ),
          choice(
            t("colour by"),
            "statistic",
            Object.keys(run.layers[0].statistics)
              .filter((name) =>
                run.layers.some((/** @type {any} */ layer) =>
                  layer.statistics[name].some((/** @type {any} */ x) => x !== null),
                ),
              )
              .map((name) => [name, t(name)]),
            state.statistic,
            (value) => {
              state.statistic = value;
              drawFront();
              document.getElementById("statistic")?.focus();
            },
          ),
        ),
        grid(run, state.statistic, state.at, (layer, head) => go({ ...state.at, layer, head }), shell),
      );
    }

    /** @param {Address} at */
    function go(at) {
      const layers = runs[at.run].layers;
      const layer = Math.max(0, Math.min(at.layer, layers.length - 1));
      const before = runs[state.at.run].layers[state.at.layer];
      state.at = { run: at.run, layer, head: Math.max(0, Math.min(at.head, layers[layer].heads.length - 1)) };
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
      await openLook({ page, state, shell, head, other, go, again: openHead, failed }, here, heading);

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
