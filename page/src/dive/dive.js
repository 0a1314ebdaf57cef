// From a cell of the map down to its arithmetic: the steps with their numbers, what-ifs, and the whole matrix step by step.

import { add, afterwards, h, renew, write } from "../dom.js";
import { isAsRun } from "../head.js";
import { spelled } from "../numbers.js";
import { operandsAt } from "../long/operands.js";
import { under } from "../long/supposing.js";
import { LEVELS } from "../long/source.js";
import { tokenAt } from "../long/units.js";
import { arithmetic } from "./arithmetic.js";
import { drawBars } from "./bars.js";
import { problemOf, rowAt } from "./problem.js";
import { scrubber } from "./scrubber.js";
import { whatIfs } from "./whatifs.js";

/** @typedef {import("../long/shown.js").Look} Look */
/** @typedef {ReturnType<typeof diveRoom>} Dive */

/**
 * @param {import("../shell.js").Shell} shell
 * @param {import("../place.js").Place} place
 */
export function diveRoom({ t }, place) {
  /** @type {Look | null} */
  let look = null;
  let drawn = "";
  /** @type {{key: string, problem: import("./problem.js").Problem, row: import("./problem.js").Row, lines: Map<string, HTMLElement>} | null} the run's own numbers of the cell */
  let own = null;
  /** @type {import("../long/operands.js").Cell | null} what the server sent of a head too large to be sent whole */
  let part = null;
  const lines = h("ol.lines");
  const bars = /** @type {HTMLCanvasElement} */ (h("canvas.row-bars"));
  const title = h("h2", { id: "dive-title" }, t("dive"));
  const says = h("p.says");
  const chosen = () => {
    if (!look) return null;
    const { cell, queries, keys, keyName, actual: head } = look;
    const [i, j] = [tokenAt(queries, cell.i), tokenAt(keys, cell.j)];
    return { i, j, name: spelled(keyName(j).trim() || keyName(j), 16), head };
  };
  const suppose = (/** @type {import("../head.js").WhatIf} */ what) => {
    place.suppose("dive", what);
    update();
  };
  const controls = whatIfs(t, () => place.what, suppose, chosen);
  const steps = scrubber(t, (i, j) => look?.jumpTo(i, j));
  const play = h("div", controls.element, controls.ribbon, controls.numbers);
  const rest = h("div", play, bars, steps.element);
  const element = h("section.dive", { "aria-labelledby": "dive-title" });
  add(element, [title, says, rest]);
  let { what } = place;
  place.follow("dive", () => place.what !== what && update());

  let pictured = () => {};
  const drawSoon = afterwards(() => pictured());

  function update() {
    const at = chosen();
    if (!look || !at) return;
    what = place.what;
    const { i, j, head } = at;
    if (part?.head !== head) part = null;
    const shown = under(head, what);
    const here = `${Object.values(head.address)} ${i} ${j} ${at.name} ${shown.supposition} ${Boolean(head.computing)} ${part?.i} ${part?.j}`;
    if (drawn === here) return;
    drawn = here;
    const problem = part?.problem ?? problemOf(shown);
    rest.hidden = !problem;
    play.hidden = Boolean(part);
    const about = problem ? (part ? "dive part" : "dive says") : head.exact ? "computing" : "pictured head";
    const cell = part ?? { i, j, levels: LEVELS };
    write(says, t(about, cell));
    if (!problem) return lines.replaceChildren();
    const row = part?.row ?? rowAt(problem, i);
    const real = Boolean(part) || isAsRun(place.what);
    const bound = real ? (part?.bound ?? head.computing?.bound(i) ?? null) : null;
    const known = head.layer.values !== null;
    const ran = real ? null : asItRan(head, i, j, known);
    renew(
      lines,
      arithmetic(problem, row, cell.i, cell.j, bound, known, t).map(([name, line]) => {
        const now = h("p.written", line);
        const old = ran?.lines.get(name);
        const same = old?.textContent?.endsWith(String(now.textContent));
        return h("li", h("small", name), now, !same && old?.cloneNode(true));
      }),
    );
    pictured = () => {
      drawBars(bars, row.weights, ran?.row.weights ?? null, cell.j);
      if (!part) steps.update(problem, ran?.problem ?? null, i, j);
    };
    drawSoon();
    if (part) return void (steps.element.hidden = true);
    controls.update(problem);
  }

  /** @param {import("../long/source.js").Head} head @param {number} i @param {number} j @param {boolean} known */
  function asItRan(head, i, j, known) {
    const key = `${Object.values(head.address)} ${i} ${j}`;
    if (own?.key === key) return own;
    const problem = /** @type {import("./problem.js").Problem} */ (problemOf(head));
    const row = rowAt(problem, i);
    const written = arithmetic(problem, row, i, j, null, known, t).map(
      ([name, line]) =>
        /** @type {[string, HTMLElement]} */ ([name, h("p.written.ghost", h("small", `${t("run value")} `), line)]),
    );
    return (own = { key, problem, row, lines: new Map(written) });
  }

  return {
    element,
    lines,
    /** The map's cell has moved. @param {Look} next */
    show(next) {
      look = next;
      const { head } = next;
      const { i, j } = next.cell;
      const here = () => look === next && next.cell.i === i && next.cell.j === j;
      if (part?.head !== head) update();
      if (head.computing) return;
      if (!head.served) return void head.loading.then(() => look === next && update());
      const at = chosen();
      if (at)
        operandsAt(head, at.i, at.j)
          .then((found) => {
            if (!here()) return;
            part = found;
            update();
          })
          .catch(next.failed);
    },
  };
}
