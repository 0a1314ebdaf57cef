// Rooms that teach with numbers of their own: how weights are learned, and why scores are divided by √d_k.

import { barList } from "./barlist.js";
import { signed, weighed } from "./colour.js";
import { h, svg } from "./dom.js";
import { fmt, listOf, percent, spelled } from "./numbers.js";
import { freeFigure } from "./section.js";
import { matrix, most } from "./story.js";

/** @typedef {import("./shell.js").Shell} Shell */
/** @typedef {import("./dom.js").Child} Child */
/** @typedef {(shell: Shell) => [any, number, (at: number) => string, Child, Child?]} Lesson      its words, the slider's last place, what it shows and says at a place, the content, and what stands beside the slider */

const EACH = 300; // milliseconds between steps

/** The page of a lesson. The slider keeps its place when the page is redrawn. @param {import("./container.js").Page} page */
export function openLesson(page) {
  const { learning, scale } = page.header;
  let at = Infinity;
  /** @type {ReturnType<typeof setInterval> | undefined} */
  let playing;
  return (/** @type {Shell} */ shell) => {
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const [words, last, show, content] = learning ? learn(page, learning, shell) : why(scale, shell);
    const said = h("output.figures", { style: { "min-width": "11em" } });
    const slide = /** @type {HTMLInputElement} */ (
      h("input", {
        type: "range",
        id: "lesson",
        max: last,
        "aria-label": words.slider,
        style: { flex: 1, "accent-color": "var(--accent)" },
        oninput: () => go(Number(slide.value)),
      })
    );
    const play = h("button", { onclick: toggle });
    const name = () => (play.textContent = words[still ? "forward" : playing ? "pause" : "play"]);

    /** @param {number} to */
    function go(to) {
      at = Math.min(to, last);
      slide.value = String(at);
      said.textContent = show(at);
      slide.setAttribute("aria-valuetext", said.textContent);
    }

    /** Plays or pauses; under reduced motion it goes one step forward instead. */
    function toggle() {
      const start = !playing;
      stop();
      if (start) {
        go(at < last ? at + 1 : 0);
        if (!still) playing = setInterval(() => (at < last ? go(at + 1) : toggle()), EACH);
      }
      name();
    }
    const stop = () => {
      clearInterval(playing);
      playing = undefined;
    };
    stop();
    name();
    go(at);
    shell.main.append(
      h("div.opening", h("h1", words.title), h("p.says", words.says)),
      h("div.map", play, slide, said),
      h("div.opening", content),
    );
  };
}

const block = (/** @type {string} */ title, /** @type {Child[]} */ ...content) =>
  h("div.block.way", h("h2", title), content);

/**
 * How weights are learned: the loss, what comes next, the matrices, and the attention of each head.
 * @param {import("./container.js").Page} page @param {any} learning @param {Shell} shell @returns {[any, number, (at: number) => string, Child]}
 */
function learn(
  page,
  { steps, loss, gradient, next, names, tokens, heads, curve, ticks, most: range, words: said },
  shell,
) {
  const words = said[shell.language()];
  const mark = svg("circle.shape.role-weights", { r: 5 });
  const [following, slopes] = [
    barList(
      names.map((/** @type {string} */ name) => spelled(name)),
      percent,
    ),
    barList(
      ["Q", "K", "V"].map((letter) => ["W", h("sup", letter)]),
      (size) => fmt(size, 2),
    ),
  ];
  let at = 0;
  /** A figure of matrices whose cells are those of the step. @param {string} between @param {number} unit @param {any[][]} given */
  const draw = (between, unit, ...given) => {
    const list = given.map(([symbol, role, name, first, shade, more]) => {
      const { shape, data } = page.array(`learning.${name}`);
      const [rows, cols] = shape.slice(-2);
      const every = data.length / steps.length;
      const cell = (/** @type {number} */ i, /** @type {number} */ j) =>
        data[at * every + (first * rows + i) * cols + j];
      const [rowDim, colDim] = more.hidden ? ["n", "m"] : ["d_model", "h·d_k"];
      return matrix(symbol, role, [rows, rowDim], [cols, colDim], cell, { shade, ...more });
    });
    const units = { n: unit, m: unit, d_model: unit, "h·d_k": unit };
    return freeFigure({ t: shell.t, shell }, list, between, units, shell.main.clientWidth - 28);
  };
  const { data } = page.array("learning.scaled");
  const n = tokens.length;
  const steepest = most(1, data.length, (_, place) => (place % n > Math.floor(place / n) % n ? 0 : data[place]));
  const token = (/** @type {number} */ i) => tokens[i];
  const more = { rowName: token, colName: token, hidden: (/** @type {number} */ i, /** @type {number} */ j) => j > i };
  const figures = [
    ...["query", "key", "value"].map((role, place) => {
      const letter = "QKV"[place];
      return draw("", 14, [
        `W^${letter}`,
        role,
        `w_${letter.toLowerCase()}`,
        0,
        signed(role, range),
        { split: 16 / heads },
      ]);
    }),
    ...listOf(heads, (head) =>
      draw(
        "softmax",
        36,
        ["S′", "weights", "scaled", head, signed("weights", steepest), more],
        ["A", "weights", "weights", head, weighed(), more],
      ),
    ),
  ];
  const elements = figures.map(({ element }) => element);
  return [
    words,
    steps.length - 1,
    (to) => {
      at = to;
      mark.setAttribute("cx", curve[at][0]);
      mark.setAttribute("cy", curve[at][1]);
      following.set(next[at]);
      slopes.set(gradient[at], Math.max(...gradient.flat()));
      for (const { paint } of figures) paint();
      return words.now.replace("{step}", steps[at]).replace("{loss}", fmt(loss[at], 3));
    },
    [
      h(
        "div.hold",
        block(
          words.loss,
          svg(
            "svg",
            { viewBox: "0 0 576 130", width: 576, role: "img", "aria-label": words.loss },
            svg("path.bracket.role-weights", { d: `M${curve.join("L")}` }),
            mark,
            ticks.map((/** @type {any[]} */ [x, y, text]) => svg("text.middle", { x, y }, text)),
          ),
          h("p.aside", words.curve),
        ),
        h(
          "div",
          { style: { flex: "1 1 20rem" } },
          block(words.next, following.list),
          block(words.gradient, slopes.list),
        ),
      ),
      block(words.matrices, h("p.aside", words.range), h("div.hold", elements.slice(0, 3))),
      words.heads.map((/** @type {string} */ title, /** @type {number} */ head) => block(title, elements[3 + head])),
      h("p.aside", words.check),
    ],
  ];
}

/**
 * Why scores are divided: scores, weights and gradients for queries and keys of one width, without and with the division.
 * @param {any} scale @param {Shell} shell @returns {[any, number, (at: number) => string, Child]}
 */
function why({ d_k, variance, histogram, ranked, slopes, words: said }, shell) {
  const words = said[shell.language()];
  const columns = ["q·k", "q·k / √dₖ"].map((title) => ({ title, body: h("div") }));
  /** @param {string} key @param {number} shown @param {number[]} values @param {number} top @param {string} role */
  const part = (key, shown, values, top, role) => {
    const [title, name, ...ends] = words[key];
    const unit = 400 / values.length;
    return block(
      title,
      svg(
        "svg",
        { viewBox: "0 0 400 122", width: 400, role: "img", "aria-label": title },
        values.map((value, at) => {
          const height = (96 * value) / top;
          return svg(`rect.shape.role-${role}`, { x: at * unit, y: 102 - height, width: unit, height });
        }),
        ends.map((/** @type {string} */ end, /** @type {number} */ at) =>
          svg("text", { x: 200 * at, y: 118, class: ["", "middle", "end"][at] }, end),
        ),
      ),
      h("p", name, " ", h("b", fmt(shown, 3))),
    );
  };
  return [
    words,
    d_k.length - 1,
    (at) => {
      for (const [divided, { body }] of columns.entries()) {
        const [counts, weights, gradients] = [histogram, ranked, slopes].map((list) => list[at][divided]);
        body.replaceChildren(
          part("scores", variance[at][divided], counts, Math.max(...counts), "plain"),
          part("weights", weights[0], weights, 1, "weights"),
          part("slopes", gradients[0], gradients, 0.25, "value"),
        );
      }
      return `dₖ = ${d_k[at]}, √dₖ = ${fmt(Math.sqrt(d_k[at]), 3)}`;
    },
    [
      h(
        "div.hold",
        columns.map(({ title, body }) => block(title, body)),
      ),
      h("p.says", words.means),
    ],
  ];
}
