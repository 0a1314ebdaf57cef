// From a cell of the map down to its arithmetic: the steps with their numbers.

import { h, renew, write } from "../dom.js";
import { LEVELS } from "../long/source.js";
import { arithmetic } from "./arithmetic.js";
import { problemOf, rowAt } from "./problem.js";

/** @param {Shell} shell */
export function diveRoom({ t }) {
  /** @type {Look | null} */
  let look = null;
  let drawn = "";
  const [lines, says] = [h("ol.lines"), h("p.note")];

  function update() {
    if (!look) return;
    const { cell, actual: head } = look;
    const { i, j } = cell;
    const here = `${Object.values(head.address)} ${head.version} ${i} ${j} ${Boolean(head.computing)}`;
    if (drawn === here) return;
    drawn = here;
    const problem = problemOf(head);
    const about = head.served ? "dive served" : head.exact ? "computing" : "pictured head";
    write(says, problem ? "" : t(about, { levels: LEVELS }));
    if (!problem) return lines.replaceChildren();
    const written = arithmetic(problem, rowAt(problem, i, j), i, j, head.computing?.bound(i) ?? null, t);
    renew(
      lines,
      written.map(([name, line]) => h("li", h("small", name), h("p.written", line))),
    );
  }

  /** The map's cell has moved. @param {Look} next */
  function show(next) {
    look = next;
    update();
    if (!next.head.computing) next.head.loading.then(() => look === next && update());
  }

  return { element: h("div.dive", h("h3", t("dive")), says, lines), show };
}
