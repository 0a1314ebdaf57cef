// The room that shows how weights are learned: the loss, what comes next, the matrices, and the attention of each head.

import { signed, weighed } from "./colour.js";
import { h, slider, svg } from "./dom.js";
import { fmt, percent, spelled } from "./numbers.js";
import { freeFigure } from "./section.js";
import { matrix } from "./story.js";
import { lettered } from "./written.js";

const block = (/** @type {string} */ title, /** @type {Child[]} */ ...content) =>
  h("div.block.way", h("h2", title), content);

/** Bars with names and numbers. @param {Child[]} names @param {number[]} values @param {number} most @param {(x: number) => string} format */
const barsOf = (names, values, most, format) =>
  names.map((name, at) => {
    const bar = h("span.share", { style: { width: `${(100 * values[at]) / most}%` } });
    return h("li", h("bdi", name), h("span.track", bar), h("span.figures", format(values[at])));
  });

/** The page of a lesson. The slider keeps its place when the page is redrawn. @param {Page} page */
export function openLesson(page) {
  const { gradient, steepest, next, names, matrices, tokens, curve, ticks, groups, words: both } = page.header.learning;
  let step = curve.length - 1;
  const token = (/** @type {number} */ i) => tokens[i];
  const texts = { rowName: token, colName: token, hidden: (/** @type {number} */ i, /** @type {number} */ j) => j > i };
  /** A matrix whose cells are those of the step. @param {any} given */
  const matrixOf = ({ symbol, role, name, part, dims, most, split }) => {
    const { shape, data } = page.array(name);
    const [rows, cols] = shape.slice(-2);
    const start = () => (step * data.length) / curve.length + part * rows * cols;
    const cell = (/** @type {number} */ i, /** @type {number} */ j) => data[start() + i * cols + j];
    const shade = most ? signed(role, most) : weighed();
    return matrix(symbol, role, [rows, dims[0]], [cols, dims[1]], cell, { shade, split, ...(split ? {} : texts) });
  };
  return (/** @type {Shell} */ shell) => {
    const words = both[shell.language()];
    const mark = svg("circle.shape.role-weights", { r: 5 });
    const [following, slopes, said] = [h("ol.next"), h("ol.next"), h("output.figures")];
    const figureOf = (/** @type {any} */ { unit, between, list }) => {
      const units = Object.fromEntries(list[0].dims.map((/** @type {string} */ dim) => [dim, unit]));
      return freeFigure({ t: shell.t, shell }, list.map(matrixOf), between, units, shell.main.clientWidth - 28);
    };
    const figures = groups.map((/** @type {any[]} */ group) => group.map(figureOf));
    const groupOf = (/** @type {string} */ title, /** @type {number} */ group) =>
      block(
        title,
        h(
          "div.hold",
          figures[group].map((/** @type {any} */ { element }) => element),
        ),
      );
    const picture = { viewBox: "0 0 576 200", width: 576, role: "img", "aria-label": words.loss };
    const labels = ticks.map((/** @type {any[]} */ [x, y, text]) => svg("text.middle", { x, y }, text));
    const loss = svg("svg", picture, svg("path.bracket.role-weights", { d: `M${curve.join("L")}` }), mark, labels);
    const show = (/** @type {number} */ to) => {
      step = to;
      slide.value = String(step);
      said.textContent = words.now[step];
      slide.setAttribute("aria-valuetext", words.now[step]);
      mark.setAttribute("transform", `translate(${curve[step]})`);
      following.replaceChildren(
        ...barsOf(
          names.map((/** @type {string} */ name) => spelled(name)),
          next[step],
          1,
          percent,
        ),
      );
      slopes.replaceChildren(...barsOf(matrices.map(lettered), gradient[step], steepest, (size) => fmt(size, 2)));
      for (const { paint } of figures.flat()) paint();
    };
    const style = { flex: 1, "accent-color": "var(--accent)" };
    const slide = slider("lesson", 0, curve.length - 1, show, { "aria-label": words.slider, style });
    const lists = [block(words.next, following), block(words.gradient, slopes)];
    const first = h("div.hold", block(words.loss, loss), h("div", { style: { flex: "1 1 20rem" } }, lists));
    shell.main.append(
      h("div.opening", h("h1", words.title), h("p.says", words.says)),
      h("div.map", slide, said),
      h("div.opening", first, words.groups.map(groupOf), h("p.aside", words.check)),
    );
    show(step);
  };
}
