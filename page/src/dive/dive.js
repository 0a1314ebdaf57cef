// From a cell of the map down to its arithmetic: the steps with their numbers, what-ifs, and the whole matrix step by step.

import { afterwards, h, renew, write } from "../dom.js";
import { isAsRun } from "../head.js";
import { spelled } from "../numbers.js";
import { under } from "../long/supposing.js";
import { LEVELS } from "../long/source.js";
import { arithmetic } from "./arithmetic.js";
import { drawBars } from "./bars.js";
import { problemOf, rowAt } from "./problem.js";
import { scrubber } from "./scrubber.js";
import { whatIfs } from "./whatifs.js";

/** @typedef {{key: string, problem: Problem, row: Row, lines: Map<string, HTMLElement>}} AsItRan      the run's own numbers of a cell */

/** @param {Shell} shell @param {Place} place */
export function diveRoom({ t }, place) {
  /** @type {Look | null} */
  let look = null;
  let drawn = "";
  let { what } = place;
  let drawBelow = () => {};
  const drawSoon = afterwards(() => drawBelow());
  const lines = h("ol.lines");
  const bars = h("canvas.row-bars");
  const says = h("p.says");
  const asItRan = keptRun(t);
  const chosen = () => look && chosenIn(look);
  const suppose = (/** @type {WhatIf} */ next) => {
    place.suppose("dive", next);
    update();
  };
  const controls = whatIfs(t, () => place.what, suppose, chosen);
  const steps = scrubber(t, (i, j) => look?.jumpTo(i, j));
  const play = h("div", controls.element, controls.ribbon, controls.numbers);
  const rest = h("div", play, bars, steps.element);
  const title = h("h2", { id: "dive-title" }, t("dive"));
  const element = h("section.dive", { "aria-labelledby": "dive-title" }, title, says, rest);
  place.follow("dive", () => place.what !== what && update());

  function update() {
    const spot = chosen();
    if (!look || !spot) return;
    what = place.what;
    const { i, j, head } = spot;
    const shown = under(head, what);
    const computed = `${shown.supposition} ${Boolean(head.computing)}`;
    const here = `${Object.values(head.address)} ${i} ${j} ${spot.name} ${computed}`;
    if (drawn === here) return;
    drawn = here;
    const problem = problemOf(shown);
    rest.hidden = !problem;
    const about = problem ? "dive says" : head.served ? "dive served" : head.exact ? "computing" : "pictured head";
    write(says, t(about, { i, j, levels: LEVELS }));
    if (!problem) return lines.replaceChildren();
    const row = rowAt(problem, i);
    const real = isAsRun(place.what);
    const bound = real ? (head.computing?.bound(i) ?? null) : null;
    const ran = real ? null : asItRan(head, i, j);
    const written = arithmetic(problem, row, i, j, bound, t);
    renew(lines, itemsOf(written, ran?.lines));
    drawBelow = () => {
      drawBars(bars, row.weights, ran?.row.weights ?? null, j);
      steps.update(problem, ran?.problem ?? null, i, j);
    };
    drawSoon();
    controls.update(problem);
  }

  /** The map's cell has moved. @param {Look} next */
  function show(next) {
    look = next;
    update();
    if (!next.head.computing) next.head.loading.then(() => look === next && update());
  }

  return { element, lines, show };
}

/** The chosen weight: its query and key, the key's name, and the head as it ran. @param {Look} look */
function chosenIn({ cell: { i, j }, keyName, actual: head }) {
  return { i, j, name: spelled(keyName(j).trim() || keyName(j), 16), head };
}

/** Each step's line, and under it the run's own where that differs. @param {[string, Child][]} written @param {Map<string, HTMLElement> | undefined} ran */
const itemsOf = (written, ran) =>
  written.map(([name, line]) => {
    const now = h("p.written", line);
    const old = ran?.get(name);
    const same = old?.textContent?.endsWith(String(now.textContent));
    return h("li", h("small", name), now, !same && old?.cloneNode(true));
  });

/** The run's own numbers of a cell; the latest are kept. @param {Say} t */
function keptRun(t) {
  /** @type {AsItRan | null} */
  let latest = null;
  return (/** @type {Head} */ head, /** @type {number} */ i, /** @type {number} */ j) => {
    const key = `${Object.values(head.address)} ${i} ${j}`;
    if (latest?.key === key) return latest;
    const problem = /** @type {Problem} */ (problemOf(head));
    const row = rowAt(problem, i);
    const lines = new Map();
    for (const [name, line] of arithmetic(problem, row, i, j, null, t))
      lines.set(name, h("p.written.ghost", h("small", `${t("run value")} `), line));
    return (latest = { key, problem, row, lines });
  };
}
