// One step of the page: a sentence, the formula, figures, and the computation of the chosen cell written out.

import { drawColours } from "./colour.js";
import { add, columnHead, h, table, tableRow } from "./dom.js";
import { formula } from "./mathml.js";
import { figure } from "./matrix.js";
import { fmt, listOf, spelled } from "./numbers.js";
import { beside } from "./scenes.js";
import { explained } from "./terms.js";
import { lettered, sym } from "./written.js";

const TABLE = 12;

/** Goes to a step; the bar of steps may be a new one. @param {string} step */
export const openStep = (step) =>
  /** @type {HTMLElement | null} */ (document.querySelector(`.map [data-step=${step}]`))?.click();

/**
 * @param {Story} story @param {object} options @param {string} options.id @param {string} options.symbol
 * @param {Child} options.title @param {() => string} options.says @param {() => string[]} [options.formulas]
 * @param {() => Scene[]} [options.scenes]
 * @param {() => Child} [options.body]      in place of figures
 * @param {boolean} [options.ofCell]      the body speaks of the chosen cell
 */
export function section(story, { id, symbol, title, says, formulas, scenes, body, ofCell }) {
  const hold = h("div", { class: body ? null : "hold" });
  const heading = `step-${id}-title`;
  const [said, written] = [h("p.says"), h("div.formulas")];
  const head = h("div.head", h("h2", { id: heading, tabindex: "-1" }, title), said);
  const named = { id: `step-${id}`, "aria-labelledby": heading };
  const element = h("section.step", named, head, written, hold, verdicts(story, id));
  /** @type {(() => void)[]} */
  let updates = [];
  let upToDate = false;
  const updateText = () => {
    said.replaceChildren();
    add(said, explained(says(), story.t));
    written.replaceChildren(...(formulas?.() ?? []).map((text) => h("div", formula(story.translated(text)))));
  };
  const fillBody = () => body && hold.replaceChildren(h("div", body()));
  updateText();
  return {
    ...{ id, symbol, element },
    /** Draws the figures, if they are not up to date. */
    draw() {
      if (upToDate) return;
      upToDate = true;
      const focused = [...hold.querySelectorAll(".figure")].indexOf(/** @type {Element} */ (document.activeElement));
      const parts = (scenes?.() ?? []).map((scene) => interactiveFigure(story, scene));
      updates = parts.map((part) => part.update);
      hold.replaceChildren(...parts.map((part) => part.element));
      fillBody();
      for (const each of updates) each();
      const figures = /** @type {NodeListOf<HTMLElement>} */ (hold.querySelectorAll(".figure"));
      figures[focused]?.focus({ preventScroll: true });
    },
    /** The head's numbers have changed. */
    outdate() {
      upToDate = false;
      updateText();
    },
    /** Another cell is chosen. */
    update() {
      if (!upToDate) return;
      for (const each of updates) each();
      if (ofCell) updateText();
      if (ofCell) fillBody();
    },
  };
}

/** One figure with its colour bars, its written-out cell and its table. @param {Pick<Story, "t" | "shell">} story @param {Scene} scene */
function interactiveFigure({ t, shell }, scene) {
  const written = h("p.written");
  /** @type {Spot | null} */
  let over = null;
  const { blocks } = scene.layout;
  const now = () => over ?? scene.cursor();
  const matrixNow = () => blocks[now().block].m;
  const m = matrixNow();
  const show = () => {
    if (m.rows * m.cols === 0) return;
    drawing.mark(scene.marks(now()));
    written.replaceChildren(h("span", scene.written(now())));
    if (details.open) fill();
  };
  const move = (/** @type {Spot | null} */ place) => {
    if (m.rows * m.cols === 0) return;
    over = place && scene.locate(place);
    show();
    if (over) shell.say(readout(t, matrixNow(), over));
  };
  const pin = (/** @type {Spot} */ place) => {
    if (m.rows * m.cols === 0) return;
    const cell = scene.locate(place);
    over = null;
    scene.pin(cell);
    shell.say(`${t("pinned")}. ${written.textContent}`);
  };
  const label = t("figure", { name: m.symbol, rows: m.rows, cols: m.cols });
  const drawing = figure(scene.layout, { label, cursor: now, move, pin, next: scene.next });
  const hold = h("div.table", { tabindex: 0 }); // scrolls by keyboard
  const fill = () => hold.replaceChildren(windowOf(t, matrixNow(), now()));
  const details = h("details.numbers", { ontoggle: () => details.open && fill() }, h("summary", t("numbers")), hold);
  const bars = [...new Map(blocks.map((each) => [each.m.symbol, each.m])).values()].map((each) => colourBar(each, t));
  const pooled = blocks.some((each) => each.w < each.m.cols || each.h < each.m.rows) && t("pooled");
  const notes = [...(scene.notes ?? []), pooled].map((note) => note && h("span.note", note));
  const caption = h("div.told", written, h("div.bars", bars, notes), details);
  const element = h(blocks.length > 1 ? "figure" : "figure.single", h("div.pan", drawing.element), caption);
  const paint = () => {
    drawing.paint();
    show();
  };
  return { element, update: show, paint };
}

/**
 * A figure of matrices that belong to no step; a cell of it stays chosen.
 * @param {Pick<Story, "t" | "shell">} story @param {Matrix[]} list @param {string} between @param {AxisUnits} units @param {number} room
 */
export function freeFigure(story, list, between, units, room) {
  let place = { block: list.length - 1, row: list[0].rows - 1, col: 0 };
  const made = interactiveFigure(story, {
    layout: beside(list, between, units, room),
    cursor: () => place,
    locate: (to) => to,
    marks: (to) => [{ ...to, kind: "result" }],
    written({ block, row, col }) {
      const { symbol, role } = list[block];
      const number = h("b", valueOf(story.t, list[block], row, col, 4));
      return [sym(symbol[0].toLowerCase(), `${row},${col}`, role), " = ", number];
    },
    pin: (to) => void (place = to),
  });
  made.update();
  return made;
}

/** @param {Say} t @param {Pick<Matrix, "value" | "hidden">} m @param {number} i @param {number} j @param {number} [digits] */
const valueOf = (t, { value, hidden }, i, j, digits = 5) =>
  hidden?.(i, j) ? t("masked cell") : fmt(value(i, j), digits);

/** A cell's indices, from a place in its matrix as that is oriented. @param {Pick<Matrix, "flip">} m @param {{row: number, col: number}} spot */
const indices = ({ flip }, { row, col }) => (flip ? [col, row] : [row, col]);

/** A cell in words, for screen readers. @param {Say} t @param {Matrix} m @param {Spot} spot */
function readout(t, m, spot) {
  const [i, j] = indices(m, spot);
  const name = (/** @type {string} */ axis, /** @type {Matrix["rowName"]} */ names, /** @type {number} */ place) =>
    `${t(axis)} ${place} ${names ? spelled(names(place)) : ""}`;
  const [row, col] = [name("row", m.rowName, i), name("column", m.colName, j)];
  return t("readout", { symbol: m.symbol, row, col, value: valueOf(t, m, i, j) });
}

/** A colour bar, with the values at its ends and its middle. @param {Matrix} m @param {Say} t */
function colourBar({ shade, role, symbol, hidden }, t) {
  const { low, high } = shade;
  const canvas = h("canvas", { width: 120, height: 1, style: { height: "10px" } });
  drawColours(canvas, (x) => shade.colour(low + ((x + 0.5) / 120) * (high - low)));
  const ends = [low, (low + high) / 2, high].map((value) => h("span", fmt(value, 3)));
  return h(
    "span.colourbar",
    h("var", { class: `role-${role}` }, lettered(symbol)),
    h("span.scale", canvas, h("span.ends", ends)),
    !low && h("span.note", t("by root")),
    hidden && h("span.note", h("i.hatched"), t("masked cell")),
  );
}

/** The numbers around the chosen cell as a table. @param {Say} t @param {Pick<Matrix, "symbol" | "rows" | "cols" | "value" | "hidden" | "rowName" | "colName" | "flip">} m @param {{row: number, col: number}} spot */
export function windowOf(t, m, spot) {
  const around = (/** @type {number} */ place, /** @type {number} */ size) => {
    const first = Math.max(0, Math.min(place - TABLE / 2, size - TABLE));
    return listOf(Math.min(TABLE, size), (index) => first + index);
  };
  const [row, col] = indices(m, spot);
  const [rows, cols] = [around(row, m.rows), around(col, m.cols)];
  const name = (/** @type {Matrix["rowName"]} */ names, /** @type {number} */ i) =>
    h("bdi", names ? `${i} ${spelled(names(i), 12)}` : i);
  const cells = (/** @type {number} */ i) => cols.map((j) => valueOf(t, m, i, j));
  const ends = { i0: rows[0], i1: rows.at(-1), n: m.rows, j0: cols[0], j1: cols.at(-1), m: m.cols };
  const heads = [h("th", lettered(m.symbol)), ...cols.map((j) => columnHead(name(m.colName, j)))];
  const lines = rows.map((i) => tableRow(name(m.rowName, i), cells(i)));
  return table("table", heads, lines, t("window", ends));
}

/** Whether the numbers that a traced file claims for this step are right. @param {Story} story @param {string} id @returns {Child} */
function verdicts({ page, shell }, id) {
  const language = shell.language();
  const ofStep = (/** @type {any} */ { name }) => name === id || (id === "output" && name === "concat");
  return page.header.claims.filter(ofStep).map((/** @type {any} */ { right, text, mistake }) => {
    const said = h("p", text[language], mistake && h("strong", ` ${mistake[language]}`));
    return h(right ? "div.verdict.right" : "div.verdict.wrong", said);
  });
}
