// The whole matrix of a small problem, from product to output: one figure whose cells change from step to step.

import { penOn } from "../canvas.js";
import { css, inkOn, rgb, signed, weighed } from "../colour.js";
import { h, isStill, slider } from "../dom.js";
import { fmt, listOf, short } from "../numbers.js";
import { most } from "../story.js";
import { outputAt, rowAt, throughRules } from "./problem.js";

const SIDE = 64; // queries and keys
const LASTS = 300; // milliseconds from step to step
const STEPS = ["product", "scaled", "masked", "softmax", "mixed"];

/** @typedef {{rows: number, cols: number, value: Cell, colour: (x: number) => number[], hidden: Test, symbol: string}} Stage */
/** @typedef {{size: number, wideOf: (stage: Stage) => number}} Sizes      pixels of a cell: its height, and the width in each stage */

/** @param {Say} t @param {(i: number, j: number) => void} choose */
export function scrubber(t, choose) {
  let current = 3;
  /** @type {Stage[]} */
  let stages = [];
  let place = { i: 0, j: 0 };
  let [frame, size, room] = [0, 10, 600];
  const wideOf = (/** @type {Stage} */ stage) =>
    stage.symbol === "O" ? Math.max(4, Math.min(44, Math.floor(room / stage.cols))) : size;
  const canvas = h("canvas");
  const says = h("p.readout");
  const slide = slider("scrub", 0, STEPS.length - 1, go, { "aria-label": t("steps") });
  const names = STEPS.map((name, step) => h("button", { onclick: () => go(step) }, t(`step ${name}`)));
  const pan = h("div.pan", { tabindex: 0, role: "group", "aria-label": t("matrix by step") }, canvas);
  const stops = h("div.stops", names);
  const element = h("div.scrubber", { hidden: true }, h("h3", t("matrix by step")), stops, slide, says, pan);
  canvas.addEventListener("click", ({ offsetX, offsetY }) => {
    const [i, j] = [Math.floor(offsetY / size), Math.floor(offsetX / wideOf(stages[current]))];
    if (i >= 0 && i < stages[current].rows && j >= 0)
      choose(i, current === 4 ? place.j : Math.min(j, stages[0].cols - 1));
  });

  /** @param {number} step */
  function go(step) {
    if (!stages.length) return;
    const from = stages[current];
    current = step;
    tell();
    cancelAnimationFrame(frame);
    if (isStill() || from === stages[current]) return draw(null, 1);
    const start = performance.now();
    const move = (/** @type {number} */ now) => {
      const part = Math.min(1, Math.max(0, (now - start) / LASTS));
      draw(from, part);
      if (part < 1) frame = requestAnimationFrame(move);
    };
    frame = requestAnimationFrame(move);
  }

  function tell() {
    slide.value = String(current);
    slide.setAttribute("aria-valuetext", t(`step ${STEPS[current]}`));
    for (const [step, name] of names.entries()) name.setAttribute("aria-pressed", String(step === current));
    const { i, j } = place;
    const stage = stages[current];
    const col = Math.min(j, stage.cols - 1);
    const value = stage.hidden(i, col) ? t("masked cell") : fmt(stage.value(i, col), 5);
    says.textContent = `${t(`step ${STEPS[current]} says`)} ${stage.symbol}: ${i}, ${col}: ${value}`;
  }

  /** @param {Stage | null} from @param {number} part      of the way from the step before */
  function draw(from, part) {
    const { pen, wide } = drawStage(canvas, stages[current], from, part, { size, wideOf });
    pen.lineWidth = 2;
    pen.strokeStyle = css(rgb("ink"));
    if (current === 4) pen.strokeRect(1, place.i * size + 1, wide - 2, size - 2);
    else pen.strokeRect(place.j * size + 1, place.i * size + 1, size - 2, size - 2);
  }

  /** @param {Problem} problem @param {Problem | null} run      the run's, where the other is a supposition: it keeps the colours comparable @param {number} i @param {number} j */
  function update(problem, run, i, j) {
    const { n, m, v } = problem;
    element.hidden = Math.max(n, m) > SIDE;
    if (element.hidden) return void (stages = []);
    place = { i, j };
    stages = stagesOf(problem, run ?? problem);
    names[4].hidden = !v;
    slide.max = String(v ? 4 : 3);
    current = Math.min(current, v ? 4 : 3);
    room = element.clientWidth || 600;
    size = Math.max(6, Math.min(44, Math.floor(room / m), Math.floor(560 / n)));
    cancelAnimationFrame(frame);
    tell();
    draw(null, 1);
  }

  return { element, update };
}

/** Draws the cells of a stage, or of one between two. @param {HTMLCanvasElement} canvas @param {Stage} stage @param {Stage | null} from @param {number} part @param {Sizes} sizes */
function drawStage(canvas, stage, from, part, { size, wideOf }) {
  const between = (/** @type {number} */ before, /** @type {number} */ after) => before + (after - before) * part;
  const cols = between(from?.cols ?? stage.cols, stage.cols);
  const across = between(wideOf(from ?? stage), wideOf(stage));
  const wide = Math.ceil(cols * across);
  const pen = penOn(canvas, wide, stage.rows * size);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  const paper = rgb("hatch-ground");
  const colourOf = (/** @type {Stage} */ s, /** @type {number} */ i, /** @type {number} */ j) =>
    j >= s.cols || s.hidden(i, j) ? paper : s.colour(s.value(i, j));
  for (let i = 0; i < stage.rows; i++)
    for (let j = 0; j < Math.ceil(cols); j++) {
      const to = colourOf(stage, i, j);
      const before = from ? colourOf(from, i, j) : to;
      const colour = to.map((x, c) => between(before[c], x));
      pen.fillStyle = css(colour);
      pen.fillRect(j * across, i * size, across - 0.5, size - 0.5);
      if (Math.min(size, across) < 34 || part < 1 || stage.hidden(i, j)) continue;
      pen.fillStyle = inkOn(colour) === "dark" ? "#000" : "#fff";
      pen.fillText(short(stage.value(i, j)), (j + 0.5) * across, (i + 0.5) * size);
    }
  return { pen, wide };
}

/** @param {Problem} problem @param {Problem} run @returns {Stage[]} */
function stagesOf(problem, run) {
  const { n, m, v, rules } = problem;
  const rows = listOf(n, (i) => rowAt(problem, i));
  const reference = run === problem ? rows : listOf(n, (i) => rowAt(run, i));
  /** @param {string} symbol @param {Cell} value @param {Stage["colour"]} colour @returns {Stage} */
  const stage = (symbol, value, colour, hides = false, cols = m) => {
    const hidden = (/** @type {number} */ i, /** @type {number} */ j) => hides && rows[i].logits[j] === -Infinity;
    return { symbol, rows: n, cols, value, colour, hidden };
  };
  const byScore = signed(
    "weights",
    most(n, m, (i, j) => reference[i].scores[j]),
  ).colour;
  const byLogit = signed(
    "weights",
    most(n, m, (i, j) => reference[i].logits[j]),
  ).colour;
  const stages = [
    stage("S", (i, j) => rows[i].scores[j], byScore),
    stage("S′", (i, j) => throughRules(rules, rows[i].scores[j], i, j).scaled, byLogit),
    stage("M", (i, j) => rows[i].logits[j], byLogit, true),
    stage("A", (i, j) => rows[i].weights[j], weighed(1).colour, true),
  ];
  if (!v) return stages;
  const output = rows.map((row) => Float64Array.from({ length: v.width }, (_, c) => outputAt(problem, row, c)[0]));
  const current = (/** @type {number} */ i, /** @type {number} */ c) => output[i][c];
  return [...stages, stage("O", current, signed("value", most(n, v.width, current)).colour, false, v.width)];
}
