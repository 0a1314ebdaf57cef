// The room that shows how weights are learned.

import { signed, weighed } from "./colour.js";
import { h, slider, svg } from "./dom.js";
import { fmt, percent, spelled } from "./numbers.js";
import { freeFigure } from "./section.js";
import { matrix } from "./story.js";
import { lettered } from "./written.js";

/** @typedef {[words: any, show: (at: number) => void, content: Child]} Lesson      its sentences, what shows a place, and what there is to see */

/** The page of a lesson. The slider keeps its place when the page is redrawn. @param {Page} page */
export function openLesson(page) {
  const { learning } = page.header;
  let step = Infinity;
  return (/** @type {Shell} */ shell) => {
    const [words, show, content] = learn(page, learning, shell);
    const last = words.now.length - 1;
    const said = h("output.figures", { style: { "min-width": "11em" } });
    const go = (/** @type {number} */ to) => {
      step = Math.min(to, last);
      slide.value = String(step);
      show(step);
      said.textContent = words.now[step];
      slide.setAttribute("aria-valuetext", words.now[step]);
    };
    const style = { flex: 1, "accent-color": "var(--accent)" };
    const slide = slider("lesson", 0, last, go, { "aria-label": words.slider, style });
    go(step);
    shell.main.append(
      h("div.opening", h("h1", words.title), h("p.says", words.says)),
      h("div.map", slide, said),
      h("div.opening", content),
    );
  };
}

const block = (/** @type {string} */ title, /** @type {Child[]} */ ...content) =>
  h("div.block.way", h("h2", title), content);

/** How weights are learned: the loss, what comes next, the matrices, and the attention of each head. @param {Page} page @param {any} learning @param {Shell} shell @returns {Lesson} */
function learn(page, { gradient, steepest, next, names, matrices, tokens, curve, ticks, groups, words: said }, shell) {
  const words = said[shell.language()];
  const mark = svg("circle.shape.role-weights", { r: 5 });
  const spelledNames = names.map((/** @type {string} */ name) => spelled(name));
  const following = barList(spelledNames, percent);
  const slopes = barList(matrices.map(lettered), (size) => fmt(size, 2));
  const token = (/** @type {number} */ i) => tokens[i];
  const texts = { rowName: token, colName: token, hidden: (/** @type {number} */ i, /** @type {number} */ j) => j > i };
  let step = 0;
  /** A figure of matrices whose cells are those of the step. @param {any} figure */
  const draw = ({ unit, between, list }) => {
    const shown = list.map((/** @type {any} */ { symbol, role, name, part, dims, most, split }) => {
      const { shape, data } = page.array(name);
      const [rows, cols] = shape.slice(-2);
      const every = data.length / curve.length;
      const cell = (/** @type {number} */ i, /** @type {number} */ j) =>
        data[step * every + (part * rows + i) * cols + j];
      const shade = most ? signed(role, most) : weighed();
      return matrix(symbol, role, [rows, dims[0]], [cols, dims[1]], cell, { shade, split, ...(split ? {} : texts) });
    });
    const units = Object.fromEntries(list[0].dims.map((/** @type {string} */ dim) => [dim, unit]));
    return freeFigure({ t: shell.t, shell }, shown, between, units, shell.main.clientWidth - 28);
  };
  const figures = groups.map((/** @type {any[]} */ group) => group.map(draw));
  const groupOf = (/** @type {string} */ title, /** @type {number} */ group) => {
    const elements = figures[group].map((/** @type {any} */ { element }) => element);
    return block(title, h("div.hold", elements));
  };
  const picture = { viewBox: "0 0 576 200", width: 576, role: "img", "aria-label": words.loss };
  const labels = ticks.map((/** @type {any[]} */ [x, y, text]) => svg("text.middle", { x, y }, text));
  const loss = svg("svg", picture, svg("path.bracket.role-weights", { d: `M${curve.join("L")}` }), mark, labels);
  const beside = [block(words.next, following.list), block(words.gradient, slopes.list)];
  const lists = h("div", { style: { flex: "1 1 20rem" } }, beside);
  return [
    words,
    (to) => {
      step = to;
      mark.setAttribute("transform", `translate(${curve[step]})`);
      following.set(next[step]);
      slopes.set(gradient[step], steepest);
      for (const { paint } of figures.flat()) paint();
    },
    [h("div.hold", block(words.loss, loss), lists), words.groups.map(groupOf), h("p.aside", words.check)],
  ];
}

/** A list of bars with names, whose lengths and numbers change. @param {Child[]} names @param {(x: number) => string} format */
function barList(names, format) {
  const rows = names.map(() => ({ bar: h("span.share"), figures: h("span.figures") }));
  const items = rows.map(({ bar, figures }, index) => h("li", h("bdi", names[index]), h("span.track", bar), figures));
  return {
    list: h("ol.next", items),
    set: (/** @type {ArrayLike<number>} */ values, most = 1) =>
      rows.forEach(({ bar, figures }, index) => {
        const x = values[index] ?? 0;
        bar.style.width = `${(100 * x) / most}%`;
        figures.textContent = format(x);
      }),
  };
}
