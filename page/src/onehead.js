// One head against several: the shapes and costs of this layer with one head, its weights and its output beside the run's.

import { signed, weighed } from "./colour.js";
import { h } from "./dom.js";
import { freeFigure } from "./section.js";
import { matrix, most, weightMatrix } from "./story.js";

/** The step with a part to unfold. @param {Story} s @param {Section} section */
export function withOneHead(s, section) {
  const row = (/** @type {string[]} */ cells, /** @type {number} */ index) => {
    const made = cells.map((cell, place) => h(!cell || (index && place) ? "td" : "th", cell));
    return h("tr", made);
  };
  const hold = h("div");
  const sizes = h("table", s.layer.one[s.shell.language()].map(row));
  const fold = h("details.numbers", h("summary", s.words("beside")), sizes, hold);
  const fill = () => fold.open && hold.replaceChildren(...figuresOf(s));
  fold.addEventListener("toggle", fill);
  section.element.append(fold);
  const { outdate } = section;
  section.outdate = () => {
    outdate();
    fill();
  };
  return section;
}

/** @param {Story} s */
function figuresOf(s) {
  const { n, m } = s.head;
  /** The cells of an array of the batch item. @param {string} name @returns {Cell} */
  const stored = (name) => {
    const { data, shape } = /** @type {NumberArray} */ (s.named(name));
    const [, tall, wide] = shape;
    const first = s.state.batch * tall * wide;
    return (i, j) => data[first + i * wide + j];
  };
  const names = { rowName: s.queryName, colName: s.keyName, hidden: s.hidden };
  const one = matrix("A,\u00a0h=1", "weights", [n, "n"], [m, "m"], stored("one_weights"), {
    ...names,
    shade: weighed(),
  });
  const figures = [[one, weightMatrix(s, { symbol: `A,\u00a0${s.t("head")}\u00a0${s.head.number}` })]];
  if (s.named("w_o")) {
    const output = s.layerOutput();
    const wide = output.length / n;
    const cells = [stored("one_output"), (/** @type {number} */ i, /** @type {number} */ c) => output[i * wide + c]];
    const more = {
      shade: signed("plain", Math.max(...cells.map((value) => most(n, wide, value)))),
      rowName: s.queryName,
    };
    const symbols = [1, s.layer.heads].map((count) => `U,\u00a0h=${count}`);
    figures.push(
      cells.map((value, place) => matrix(symbols[place], "plain", [n, "n"], [wide, "d_model"], value, more)),
    );
  }
  return figures.map((list) => freeFigure(s, list.map(s.laid), "", s.units, s.room).element);
}
