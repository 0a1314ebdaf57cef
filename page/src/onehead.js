// One head against several: the shapes and costs of this layer with one head, its weights and its output beside the run's.

import { signed, weighed } from "./colour.js";
import { h } from "./dom.js";
import { freeFigure } from "./section.js";
import { matrix, most, weightMatrix } from "./story.js";

/** The step with a part to unfold. @param {import("./story.js").Story} s @param {import("./section.js").Section} section */
export function withOneHead(s, section) {
  const { n, m } = s.head;
  const row = (/** @type {string[]} */ cells, /** @type {number} */ at) =>
    h(
      "tr",
      cells.map((cell, place) => h(!cell || (at && place) ? "td" : "th", cell)),
    );
  const hold = h("div");
  const fold = /** @type {HTMLDetailsElement} */ (
    h(
      "details.numbers",
      { ontoggle: fill },
      h("summary", s.words("beside")),
      h("table", s.layer.one[s.shell.language()].map(row)),
      hold,
    )
  );
  const stored = (/** @type {string} */ name) => {
    const { data, shape } = /** @type {import("./container.js").NumberArray} */ (s.named(name));
    const [, tall, wide] = shape;
    const first = s.state.batch * tall * wide;
    return (/** @type {number} */ i, /** @type {number} */ j) => data[first + i * wide + j];
  };
  function fill() {
    if (!fold.open) return;
    const of = { rowName: s.queryName, hidden: s.hidden, shade: weighed() };
    const one = matrix("A,\u00a0h=1", "weights", [n, "n"], [m, "m"], stored("one_weights"), {
      ...of,
      colName: s.keyName,
    });
    const figures = [[one, weightMatrix(s, { symbol: `A,\u00a0${s.t("head")}\u00a0${s.head.number}` })]];
    if (s.named("w_o")) {
      const own = s.layerOutput();
      const wide = own.length / n;
      const cells = [stored("one_output"), (/** @type {number} */ i, /** @type {number} */ c) => own[i * wide + c]];
      const shade = signed("plain", Math.max(...cells.map((at) => most(n, wide, at))));
      figures.push(
        cells.map((at, place) =>
          matrix(`U,\u00a0h=${place ? s.layer.heads : 1}`, "plain", [n, "n"], [wide, "d_model"], at, {
            shade,
            rowName: s.queryName,
          }),
        ),
      );
    }
    hold.replaceChildren(...figures.map((list) => freeFigure(s, list.map(s.laid), "", s.units, s.room).element));
  }
  section.element.append(fold);
  const { outdate } = section;
  section.outdate = () => {
    outdate();
    fill();
  };
  return section;
}
