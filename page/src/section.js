// One step of the page: a sentence, the formula, figures, and the computation of the chosen cell written out.

import { penOf } from "./canvas.js";
import { css } from "./colour.js";
import { add, h } from "./dom.js";
import { beside } from "./layout.js";
import { formula } from "./mathml.js";
import { figure } from "./matrix.js";
import { fmt, listOf, spelled } from "./numbers.js";
import { lettered, sym } from "./written.js";

/** @typedef {import("./dom.js").Child} Child */
/** @typedef {import("./matrix.js").Place} Place */
/** @typedef {import("./story.js").Story} Story */
/**
 * @typedef {object} Scene      one figure of a step; a place is a block and a cell of its matrix, as that is oriented
 * @property {import("./matrix.js").Layout} layout
 * @property {() => Place} cursor      the chosen cell
 * @property {(place: Place) => Place} locate      the result that a cell of the figure belongs to
 * @property {(place: Place) => import("./matrix.js").Mark[]} marks
 * @property {(place: Place) => Child} written
 * @property {(place: Place) => void} pin
 * @property {(block: number, by: number) => number | null} [next]      the result beside this one
 * @property {string[]} [notes]
 */
/**
 * @typedef {object} Section
 * @property {string} id
 * @property {string} symbol
 * @property {HTMLElement} element
 * @property {() => void} draw      draws the figures, if they are not up to date
 * @property {() => boolean} stale      drawn before, and no longer up to date
 * @property {() => void} outdate      the head's numbers have changed
 * @property {() => void} update      another cell is chosen
 */

const TABLE = 12;

/**
 * @param {Story} story
 * @param {object} options
 * @param {string} options.id
 * @param {string} options.symbol
 * @param {Child} options.title
 * @param {() => Child} options.says
 * @param {() => string[]} [options.formulas]
 * @param {() => Scene[]} [options.scenes]
 * @param {() => HTMLElement} [options.controls]      above the figures
 * @param {() => Child} [options.body]      in place of figures
 * @param {boolean} [options.ofCell]      the body speaks of the chosen cell
 * @returns {Section}
 */
export function section(story, { id, symbol, title, says, formulas, scenes, controls, body, ofCell }) {
  const hold = h("div", { class: body ? null : "hold" });
  const heading = `step-${id}-title`;
  const [said, written, panel] = [h("p.says"), h("div.formulas"), h("div")];
  const element = h(
    "section",
    { id: `step-${id}`, class: "step", "aria-labelledby": heading },
    h("div.head", h("h2", { id: heading, tabindex: "-1" }, title), said),
    written,
    panel,
    hold,
    verdicts(story, id),
  );
  /** @type {(() => void)[]} */
  let updates = [];
  let [drawn, upToDate] = [false, false];
  const updateText = () => {
    said.replaceChildren();
    add(said, withRoleColours(says()));
    written.replaceChildren(...(formulas?.() ?? []).map((text) => h("div", formula(story.translated(text), true))));
    if (!panel.contains(document.activeElement)) panel.replaceChildren(...(controls ? [controls()] : [])); // a control in use must not be replaced
  };
  const fillBody = () => body && hold.replaceChildren(h("div", body()));
  const draw = () => {
    if (upToDate) return;
    drawn = upToDate = true;
    const focused = [...hold.querySelectorAll(".figure")].indexOf(/** @type {Element} */ (document.activeElement));
    const parts = (scenes?.() ?? []).map((scene) => interactiveFigure(story, scene));
    updates = parts.map((part) => part.update);
    hold.replaceChildren(...parts.map((part) => part.element));
    fillBody();
    for (const each of updates) each();
    if (focused >= 0)
      /** @type {HTMLElement | undefined} */ (hold.querySelectorAll(".figure")[focused])?.focus({
        preventScroll: true,
      });
  };
  updateText();
  story.whenSeen(element, draw);
  return {
    id,
    symbol,
    element,
    draw,
    stale: () => drawn && !upToDate,
    outdate() {
      upToDate = false;
      updateText();
    },
    update() {
      if (!upToDate) return;
      for (const each of updates) each();
      if (!ofCell) return;
      updateText();
      fillBody();
    },
  };
}

const ROLE_WORDS = /(quer(?:y|ies)|查询)|(keys?(?![a-z])|键)|(values?|(?<!数)值)|(weights?(?!e)|权重)/i;

/** A sentence with the words query, key, value and weight in their colours. @param {Child} text @returns {Child} */
function withRoleColours(text) {
  if (typeof text !== "string") return text;
  const found = text.match(ROLE_WORDS);
  if (!found) return text;
  const at = /** @type {number} */ (found.index);
  const role = ["query", "key", "value", "weights"][found.slice(1).findIndex(Boolean)];
  return [text.slice(0, at), h(`span.num.role-${role}`, found[0]), withRoleColours(text.slice(at + found[0].length))];
}

/** One figure with its colour bars, its written-out cell and its table. @param {Pick<Story, "t" | "shell">} story @param {Scene} scene */
function interactiveFigure(story, scene) {
  const { t } = story;
  const written = h("p.written");
  /** @type {Place | null} */
  let over = null;
  const now = () => over ?? scene.cursor();
  const matrixNow = () => scene.layout.blocks[now().block].m;
  const show = () => {
    if (m.rows * m.cols === 0) return;
    drawing.mark(scene.marks(now()));
    written.replaceChildren(h("span", scene.written(now())));
    if (table.open) fill();
  };
  const move = (/** @type {Place | null} */ place) => {
    if (m.rows * m.cols === 0) return;
    over = place && scene.locate(place);
    show();
    if (over) story.shell.say(readout(story, matrixNow(), over));
  };
  const pin = (/** @type {Place} */ place) => {
    if (m.rows * m.cols === 0) return;
    const cell = scene.locate(place);
    over = null;
    scene.pin(cell);
    story.shell.say(`${t("pinned")}. ${written.textContent}`);
  };
  const { m } = scene.layout.blocks[now().block];
  const label = t("figure", { name: m.symbol, rows: m.rows, cols: m.cols });
  const drawing = figure(scene.layout, { label, cursor: now, move, pin, next: scene.next ?? (() => null) });
  const hold = h("div.table");
  const fill = () => hold.replaceChildren(windowOf(story, matrixNow(), now()));
  const table = /** @type {HTMLDetailsElement} */ (
    h("details.numbers", { ontoggle: () => table.open && fill() }, h("summary", t("numbers")), hold)
  );
  const bars = [...new Map(scene.layout.blocks.map(({ m: each }) => [each.symbol, each])).values()].map((each) =>
    colourBar(story, each),
  );
  const notes = [...(scene.notes ?? [])];
  if (scene.layout.blocks.some(({ m: each, w, h: tall }) => w < each.cols || tall < each.rows)) notes.push(t("pooled"));
  const caption = h(
    "div.told",
    written,
    h(
      "div.bars",
      bars,
      notes.map((note) => h("span.note", note)),
    ),
    table,
  );
  const element = h(
    "figure",
    { class: scene.layout.blocks.length > 1 ? null : "single" },
    h("div.pan", drawing.element),
    caption,
  );
  const paint = () => {
    drawing.paint();
    show();
  };
  return { element, update: show, paint };
}

/**
 * A figure of matrices that belong to no step; a cell of it stays chosen.
 * @param {Pick<Story, "t" | "shell">} story @param {import("./matrix.js").Matrix[]} list @param {string} between @param {import("./layout.js").Units} units @param {number} room
 */
export function freeFigure(story, list, between, units, room) {
  let place = { block: list.length - 1, row: list[0].rows - 1, col: 0 };
  const made = interactiveFigure(story, {
    layout: beside(list, [between], units, room),
    cursor: () => place,
    locate: (to) => to,
    marks: (to) => [{ ...to, kind: "result" }],
    written({ block, row, col }) {
      const { symbol, role, at, hidden } = list[block];
      const value = hidden?.(row, col) ? story.t("masked cell") : fmt(at(row, col), 4);
      return [sym(symbol[0].toLowerCase(), `${row},${col}`, role), " = ", h("b", value)];
    },
    pin: (to) => void (place = to),
  });
  made.update();
  return made;
}

/** A cell in words, for the live readout. @param {Pick<Story, "t">} story @param {import("./matrix.js").Matrix} m @param {Place} at */
function readout({ t }, m, at) {
  const [i, j] = m.flip ? [at.col, at.row] : [at.row, at.col];
  const value = m.hidden?.(i, j) ? t("masked cell") : fmt(m.at(i, j), 5);
  const name = (/** @type {((i: number) => string) | null | undefined} */ names, /** @type {number} */ place) =>
    `${place} ${names ? spelled(names(place)) : ""}`;
  return t("readout", {
    symbol: m.symbol,
    row: `${t("row")} ${name(m.rowName, i)}`,
    col: `${t("column")} ${name(m.colName, j)}`,
    value,
  });
}

/** A colour bar, with the values at its ends and its middle. @param {Pick<Story, "t">} story @param {import("./matrix.js").Matrix} m */
function colourBar(story, m) {
  const { shade } = m;
  const [wide, high] = [120, 10];
  const canvas = /** @type {HTMLCanvasElement} */ (h("canvas", { width: wide, height: 1 }));
  const pen = penOf(canvas);
  for (let x = 0; x < wide; x++) {
    const value = shade.low + ((x + 0.5) / wide) * (shade.high - shade.low);
    pen.fillStyle = css(shade.at(value));
    pen.fillRect(x, 0, 1, 1);
  }
  canvas.style.height = `${high}px`;
  const middle = (shade.low + shade.high) / 2;
  const ends = [shade.low, middle, shade.high].map((value) => h("span", fmt(value, 3)));
  return h(
    "span.colourbar",
    h("var", { class: `role-${m.role}` }, lettered(m.symbol)),
    h("span.scale", canvas, h("span.ends", ends)),
    shade.kind === "sqrt" ? h("span.note", story.t("by root")) : null,
    m.hidden ? h("span.note", h("i.hatched"), story.t("masked cell")) : null,
  );
}

/** The numbers around the chosen cell as a table. @param {Pick<Story, "t">} story @param {import("./matrix.js").Matrix} m @param {{row: number, col: number}} at */
function windowOf(story, m, at) {
  const [row, col] = m.flip ? [at.col, at.row] : [at.row, at.col];
  const from = (/** @type {number} */ place, /** @type {number} */ size) =>
    Math.max(0, Math.min(place - TABLE / 2, size - TABLE));
  const [i0, j0] = [from(row, m.rows), from(col, m.cols)];
  const rows = listOf(Math.min(TABLE, m.rows), (i) => i0 + i);
  const cols = listOf(Math.min(TABLE, m.cols), (j) => j0 + j);
  const name = (/** @type {((i: number) => string) | null | undefined} */ names, /** @type {number} */ i) =>
    names ? `${i} ${spelled(names(i), 12)}` : String(i);
  const caption = story.t("window", {
    i0,
    i1: i0 + rows.length - 1,
    n: m.rows,
    j0,
    j1: j0 + cols.length - 1,
    m: m.cols,
  });
  return h(
    "table",
    h("caption", caption),
    h(
      "thead",
      h(
        "tr",
        h("th", lettered(m.symbol)),
        cols.map((j) => h("th", { scope: "col" }, h("bdi", name(m.colName, j)))),
      ),
    ),
    h(
      "tbody",
      rows.map((i) =>
        h(
          "tr",
          h("th", { scope: "row" }, h("bdi", name(m.rowName, i))),
          cols.map((j) => h("td", m.hidden?.(i, j) ? story.t("masked cell") : fmt(m.at(i, j), 5))),
        ),
      ),
    ),
  );
}

/** Whether the numbers that a traced file claims for this step are right. @param {Story} story @param {string} id @returns {Child} */
function verdicts(story, id) {
  const { page, shell } = story;
  const found = page.header.claims.filter(
    (/** @type {any} */ claim) => claim.name === id || (id === "heads" && claim.name === "output"),
  );
  return found.map((/** @type {any} */ claim) => {
    const name = `claimed.${claim.name}`;
    const array = page.has(name) ? page.array(name) : null;
    const [rows, cols] = array ? array.shape.slice(-2) : [0, 0];
    const cells =
      array && rows * cols <= 400
        ? listOf(rows, (i) =>
            h(
              "tr",
              listOf(cols, (j) => h("td", fmt(array.data[i * cols + j], 5))),
            ),
          )
        : [];
    return h(
      "div",
      { class: claim.right ? "verdict right" : "verdict wrong" },
      h("p", claim.text[shell.language()], claim.mistake ? h("strong", ` ${claim.mistake[shell.language()]}`) : null),
      cells.length ? h("table", h("caption", story.t("claimed")), h("tbody", cells)) : null,
    );
  });
}
