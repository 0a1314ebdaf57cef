// From a cell of the map down to its arithmetic: the steps with their numbers, what-ifs, and the whole matrix step by step.

import { add, h } from "../dom.js";
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
  let frame = 0;
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
    says.textContent = t(
      problem ? (part ? "dive part" : "dive says") : head.exact ? "computing" : "pictured head",
      part ?? { i, j, levels: LEVELS },
    );
    if (!problem) return lines.replaceChildren();
    const row = part?.row ?? rowAt(problem, i);
    const real = Boolean(part) || isAsRun(place.what);
    const own = real ? null : problemOf(head);
    const ghost = own && rowAt(own, i);
    const bound = real ? (part?.bound ?? head.computing?.bound(i) ?? null) : null;
    const known = head.layer.values !== null;
    const before = own && ghost && arithmetic(own, ghost, i, j, null, known, t);
    const [at_i, at_j] = part ? [part.i, part.j] : [i, j];
    lines.replaceChildren(
      ...arithmetic(problem, row, at_i, at_j, bound, known, t).map(([name, line]) => {
        const was = before?.find(([other]) => other === name);
        const now = h("p.written", line);
        const old = was && h("p.written.ghost", h("small", `${t("run value")} `), was[1]);
        return h("li", h("small", name), now, old && old.textContent?.endsWith(String(now.textContent)) ? null : old);
      }),
    );
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => drawBars(bars, row.weights, ghost?.weights ?? null, at_j)); // it reads the width, for which the browser lays out the page: once, when all is there
    if (part) return void (steps.element.hidden = true);
    controls.update(problem);
    steps.update(problem, own, i, j);
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
