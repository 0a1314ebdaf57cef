// From a cell of the map down to its arithmetic: the steps with their numbers, and what-ifs.

import { h, renew, write } from "../dom.js";
import { isAsRun } from "../head.js";
import { spelled } from "../numbers.js";
import { under } from "../long/supposing.js";
import { LEVELS } from "../long/source.js";
import { arithmetic } from "./arithmetic.js";
import { problemOf, rowAt } from "./problem.js";
import { whatIfs } from "./whatifs.js";

/** @param {Shell} shell @param {Place} place */
export function diveRoom({ t }, place) {
  /** @type {Look | null} */
  let look = null;
  let drawn = "";
  let { what } = place;
  const lines = h("ol.lines");
  const says = h("p.says");
  const asItRan = keptRun(t);
  const chosen = () => look && chosenIn(look);
  const suppose = (/** @type {WhatIf} */ next) => {
    place.suppose("dive", next);
    update();
  };
  const controls = whatIfs(t, () => place.what, suppose, chosen);
  const rest = h("div", controls.element, controls.ribbon, controls.numbers);
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
    const ran = real ? undefined : asItRan(head, i, j);
    const written = arithmetic(problem, row, i, j, bound, t);
    renew(lines, itemsOf(written, ran));
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
  /** @type {[string, Map<string, HTMLElement>]} */
  let latest = ["", new Map()];
  return (/** @type {Head} */ head, /** @type {number} */ i, /** @type {number} */ j) => {
    const key = `${Object.values(head.address)} ${i} ${j}`;
    if (latest[0] === key) return latest[1];
    const problem = /** @type {Problem} */ (problemOf(head));
    const row = rowAt(problem, i);
    const lines = new Map();
    for (const [name, line] of arithmetic(problem, row, i, j, null, t))
      lines.set(name, h("p.written.ghost", h("small", `${t("run value")} `), line));
    latest = [key, lines];
    return lines;
  };
}
