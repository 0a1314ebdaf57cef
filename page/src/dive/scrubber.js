// The whole matrix of a small problem, from product to output: one figure whose cells change from step to step.

import { penOn } from "../canvas.js";
import { css, inkOn, rgb, signed, weighed } from "../colour.js";
import { h, isStill, slider } from "../dom.js";
import { fmt, listOf, short } from "../numbers.js";
import { rowAt, outputAt, throughRules } from "./problem.js";

const SIDE = 64; // queries and keys
const LASTS = 300; // milliseconds from step to step
const STEPS = ["product", "scaled", "masked", "softmax", "mixed"];

/** @typedef {import("./problem.js").Problem} Problem */
/** @typedef {{rows: number, cols: number, at: (i: number, j: number) => number, colour: (x: number) => number[], hidden: (i: number, j: number) => boolean, symbol: string}} Stage */

/**
 * @param {(key: string, values?: any) => string} t
 * @param {(i: number, j: number) => void} choose
 */
export function scrubber(t, choose) {
  let at = 3;
  /** @type {Stage[]} */
  let stages = [];
  let place = { i: 0, j: 0 };
  let [frame, size, room] = [0, 10, 600];
  const wideOf = (/** @type {Stage} */ stage) =>
    stage.symbol === "O" ? Math.max(4, Math.min(44, Math.floor(room / stage.cols))) : size;
  const canvas = /** @type {HTMLCanvasElement} */ (h("canvas"));
  const says = h("p.readout");
  const slide = slider("scrub", 0, STEPS.length - 1, go, { "aria-label": t("steps") });
  const names = STEPS.map((name, step) => h("button", { onclick: () => go(step) }, t(`step ${name}`)));
  const element = h(
    "div.scrubber",
    { hidden: true },
    h("h3", t("matrix by step")),
    h("div.stops", names),
    slide,
    says,
    h("div.pan", { tabindex: 0, role: "group", "aria-label": t("matrix by step") }, canvas),
  );
  canvas.addEventListener("click", ({ offsetX, offsetY }) => {
    const [i, j] = [Math.floor(offsetY / size), Math.floor(offsetX / wideOf(stages[at]))];
    if (i >= 0 && i < stages[at].rows && j >= 0) choose(i, at === 4 ? place.j : Math.min(j, stages[0].cols - 1));
  });

  /** @param {number} step */
  function go(step) {
    if (!stages.length) return;
    const from = stages[at];
    at = step;
    tell();
    cancelAnimationFrame(frame);
    const still = isStill();
    if (still || from === stages[at]) return draw(stages[at], null, 1);
    const start = performance.now();
    const move = (/** @type {number} */ now) => {
      const part = Math.min(1, Math.max(0, (now - start) / LASTS));
      draw(stages[at], from, part);
      if (part < 1) frame = requestAnimationFrame(move);
    };
    frame = requestAnimationFrame(move);
  }

  function tell() {
    slide.value = String(at);
    slide.setAttribute("aria-valuetext", t(`step ${STEPS[at]}`));
    for (const [step, name] of names.entries()) name.setAttribute("aria-pressed", String(step === at));
    const { i, j } = place;
    const stage = stages[at];
    const col = Math.min(j, stage.cols - 1);
    const value = stage.hidden(i, col) ? t("masked cell") : fmt(stage.at(i, col), 5);
    says.textContent = `${t(`step ${STEPS[at]} says`)} ${stage.symbol}: ${i}, ${col}: ${value}`;
  }

  /** @param {Stage} stage @param {Stage | null} from @param {number} part      of the way from the step before */
  function draw(stage, from, part) {
    const between = (/** @type {number} */ before, /** @type {number} */ after) => before + (after - before) * part;
    const cols = between(from?.cols ?? stage.cols, stage.cols);
    const across = between(wideOf(from ?? stage), wideOf(stage));
    const [wide, high] = [Math.ceil(cols * across), stage.rows * size];
    const pen = penOn(canvas, wide, high);
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const paper = rgb("hatch-ground");
    const colourOf = (/** @type {Stage} */ s, /** @type {number} */ i, /** @type {number} */ j) =>
      j >= s.cols || s.hidden(i, j) ? paper : s.colour(s.at(i, j));
    for (let i = 0; i < stage.rows; i++)
      for (let j = 0; j < Math.ceil(cols); j++) {
        const to = colourOf(stage, i, j);
        const before = from ? colourOf(from, i, j) : to;
        const colour = to.map((x, c) => before[c] + (x - before[c]) * part);
        pen.fillStyle = css(colour);
        pen.fillRect(j * across, i * size, across - 0.5, size - 0.5);
        if (Math.min(size, across) < 34 || part < 1 || stage.hidden(i, j)) continue;
        pen.fillStyle = inkOn(colour) === "dark" ? "#000" : "#fff";
        pen.fillText(short(stage.at(i, j)), (j + 0.5) * across, (i + 0.5) * size);
      }
    pen.lineWidth = 2;
    pen.strokeStyle = css(rgb("ink"));
    if (at === 4) pen.strokeRect(1, place.i * size + 1, wide - 2, size - 2);
    else pen.strokeRect(place.j * size + 1, place.i * size + 1, size - 2, size - 2);
  }

  return {
    element,
    /** @param {Problem} problem @param {Problem | null} own      that of the run, where the other is a supposition: it keeps the colours comparable @param {number} i @param {number} j */
    update(problem, own, i, j) {
      const { n, m, v } = problem;
      element.hidden = Math.max(n, m) > SIDE;
      if (element.hidden) return void (stages = []);
      place = { i, j };
      stages = stagesOf(problem, own ?? problem);
      names[4].hidden = !v;
      slide.max = String(v ? 4 : 3);
      at = Math.min(at, v ? 4 : 3);
      room = element.clientWidth || 600;
      size = Math.max(6, Math.min(44, Math.floor(room / m), Math.floor(560 / n)));
      cancelAnimationFrame(frame);
      tell();
      draw(stages[at], null, 1);
    },
  };
}

/** @param {Problem} problem @param {Problem} own @returns {Stage[]} */
function stagesOf(problem, own) {
  const { n, m, v, rules } = problem;
  const rows = listOf(n, (i) => rowAt(problem, i));
  const reference = own === problem ? rows : listOf(n, (i) => rowAt(own, i));
  const most = (/** @type {(i: number, j: number) => number} */ of, /** @type {number} */ cols) => {
    let found = 0;
    for (let i = 0; i < n; i++)
      for (let j = 0; j < cols; j++) {
        const x = Math.abs(of(i, j));
        if (x > found && x < Infinity) found = x;
      }
    return found;
  };
  const stage = (
    /** @type {string} */ symbol,
    /** @type {(i: number, j: number) => number} */ at,
    /** @type {(x: number) => number[]} */ colour,
    hides = false,
    cols = m,
  ) => ({
    symbol,
    rows: n,
    cols,
    at,
    colour,
    hidden: (/** @type {number} */ i, /** @type {number} */ j) => hides && rows[i].logits[j] === -Infinity,
  });
  const raw = most((i, j) => reference[i].scores[j], m);
  const logits = most((i, j) => (reference[i].logits[j] === -Infinity ? 0 : reference[i].logits[j]), m);
  const made = [
    stage("S", (i, j) => rows[i].scores[j], signed("weights", raw).at),
    stage("S′", (i, j) => throughRules(rules, rows[i].scores[j], i, j).scaled, signed("weights", logits).at),
    stage("M", (i, j) => rows[i].logits[j], signed("weights", logits).at, true),
    stage("A", (i, j) => rows[i].weights[j], weighed(1).at, true),
  ];
  if (!v) return made;
  const output = rows.map((row) => Float64Array.from({ length: v.width }, (_, c) => outputAt(problem, row, c)[0]));
  return [
    ...made,
    stage(
      "O",
      (i, c) => output[i][c],
      signed(
        "value",
        most((i, c) => output[i][c], v.width),
      ).at,
      false,
      v.width,
    ),
  ];
}
