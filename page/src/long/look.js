// One head: its map, its numbers, the text beside it.

import { MASKED } from "../attention.js";
import { add, h } from "../dom.js";
import { fmt, spelled } from "../numbers.js";
import { choice } from "./controls.js";
import { legend, STATISTICS } from "./grid.js";
import { toLink } from "./link.js";
import { precise, readout, strongest, tableHere } from "./lists.js";
import { cellAt, draw, follow, frame, settle, shadeOf, wholeStep, zoom } from "./map.js";
import { passage, shadeText } from "./reading.js";
import { columnOf, rowOf } from "./source.js";
import { surveyOf } from "./survey.js";
import { whenReady } from "./tiles.js";
import { search, tokenAt, tokens, unitName, unitOf, words } from "./units.js";

/** @typedef {import("./map.js").Shown} Shown */
/** @typedef {import("./source.js").Head} Head */

/** @type {Shown | null} */
let shown = null;
let refresh = () => {};
addEventListener("resize", () => refresh());

const nameOf = (/** @type {string[] | null} */ texts, /** @type {number} */ offset) => (/** @type {number} */ at) => texts?.[at + offset] ?? String(at);

/**
 * @param {{page: import("../container.js").Page, state: import("./page.js").State, shell: import("../shell.js").Shell, here: HTMLElement, head: Head, other: Head | null,
 *     heading: HTMLElement, go: (at: import("./source.js").Address) => void, again: () => Promise<void>, failed: (why: unknown) => null}} given
 */
export async function look({ page, state, shell, here, head, other, heading, go, again, failed }) {
  const { t, say } = shell;
  const keep = () => toLink(state);
  const run = page.header.runs[state.at.run];
  const runs = page.header.runs;
  const layer = run.layers[state.at.layer];
  const queries = /** @type {string[] | null} */ (run.tokens);
  const keys = /** @type {string[] | null} */ (layer.cross ? run.sources : run.tokens);
  const offset = layer.cross ? 0 : layer.rules.query_offset[0];
  const rowTexts = queries && queries.slice(offset, offset + head.n);
  const canWords = Boolean(queries && keys);
  if (!canWords) state.words = false;
  const s = /** @type {Shown} */ ({
    head, other: other && other.n === head.n && other.m === head.m ? other : null, wide: {},
    rows: state.words ? words(/** @type {string[]} */ (rowTexts)) : tokens(head.n), cols: state.words ? words(/** @type {string[]} */ (keys)) : tokens(head.m),
    rule: state.rule, scale: state.scale, aside: state.aside, whole: 1, high: 1, inView: state.inView ?? head.n * head.m > 2 ** 20, view: { y: 0, x: 0, step: 1 }, cell: { i: 0, j: 0, pinned: state.pinned }, row: null, column: null,
    rowName: nameOf(queries, offset), colName: nameOf(keys, 0),
  }); // fmt: one description of what is shown
  s.cell.i = unitOf(s.rows, state.query);
  s.cell.j = unitOf(s.cols, Math.max(0, state.key));
  shown = s;
  const canvas = /** @type {HTMLCanvasElement} */ (h("canvas"));
  const box = h("div.map-of", { tabindex: 0, role: "group", "aria-label": t("map", { n: head.n, m: head.m }) }, canvas);
  const said = h("p.readout", { id: "readout" });
  const where = h("p.where");
  const scaleBar = h("div");
  const lists = h("div.lists");
  const text = h("div.text");
  const table = h("details.numbers", h("summary", t("table here")));
  table.addEventListener("toggle", () => drawTable());
  const nature = head.served ? t("served head") : head.exact ? t("exact head", { dtype: head.stored }) : t("pictured head", { levels: 80 });
  const facts = STATISTICS.filter((name) => layer.statistics[name][state.at.head] !== null).map((name) => `${t(name)} ${precise(layer.statistics[name][state.at.head], 3)}`);
  here.replaceChildren(
    heading,
    h("p.says", facts.join(" · ")),
    h("p.note", nature, layer.note && ` · ${layer.note}`),
    controls(),
    h("div.looking", h("div.left", box, where, scaleBar, said, table), h("div.right", lists, text)),
  );
  settleView(s, box, state.view);
  listen(canvas, box);
  refresh = () => redraw(canvas, where);
  drawText();
  redraw(canvas, where);
  performance.mark("clearhead picture");
  if (state.key < 0) s.cell.j = unitOf(s.cols, await strongestKey(head, state.query));
  await moved(0);
  surveyOf(head).then(async (found) => {
    const minus = s.other && (await surveyOf(s.other));
    s.whole = (minus ? Math.max(found.largest, minus.largest) : s.aside ? found.aside : found.largest) || 1;
    if (shown !== s) return;
    redraw(canvas, where);
    paintText();
  });
  if (head.n * head.m > 2 ** 20)
    head.wide().then((wide) => {
      s.wide = wide;
      if (shown === s) redraw(canvas, where);
    });
  whenReady(() => shown === s && requestAnimationFrame(() => redraw(canvas, where)));

  function controls() {
    const set = (/** @type {string} */ name) => (/** @type {any} */ value) => {
      /** @type {any} */ (state)[name] = value;
      const id = document.activeElement?.id;
      again().then(() => id && document.getElementById(id)?.focus());
    };
    const others = runs.flatMap((/** @type {any} */ run, /** @type {number} */ r) =>
      run.layers.flatMap((/** @type {any} */ each, /** @type {number} */ l) =>
        each.queries === layer.queries && each.keys === layer.keys
          ? each.heads.map((/** @type {number} */ name, /** @type {number} */ at) => [`${r} ${l} ${at}`, `${runs.length > 1 ? `${run.name || r} · ` : ""}${each.name ? `${each.name}.` : ""}${name}`])
          : [],
      ),
    );
    const address = state.other ? `${state.other.run} ${state.other.layer} ${state.other.head}` : "";
    const check = (/** @type {string} */ name, /** @type {string} */ label, /** @type {boolean} */ on) =>
      h("label", h("input", { type: "checkbox", id: name, checked: on, onchange: (/** @type {Event} */ event) => set(name)(/** @type {HTMLInputElement} */ (event.target).checked) }), ` ${label}`);
    const link = h("button", { onclick: async () => {
      keep();
      await navigator.clipboard?.writeText(location.href).then(() => (link.textContent = t("copied")), () => {});
    } }, t("link"));
    const near = (/** @type {string} */ name, /** @type {string} */ sign, /** @type {number} */ factor) => h("button", { title: t(name), "aria-label": t(name), onclick: () => nearer(factor) }, sign);
    return h(
      "div.picks.controls",
      h("span.zooms", near("nearer", "+", 0.5), near("farther", "−", 2), near("whole", "⤢", 0)),
      choice(t("pixel"), "rule", [["most", t("most")], ["mean", t("mean")]], state.rule, set("rule")),
      choice(t("scale"), "scale", [["sqrt", t("sqrt")], ["linear", t("linear")], ["log", t("log")]], state.scale, set("scale")),
      choice(t("up to"), "inView", [["", t("largest here")], ["1", t("largest in view")]], s.inView ? "1" : "", (value) => set("inView")(value === "1")),
      check("aside", t("first aside"), state.aside),
      canWords && check("words", t("as words"), state.words),
      choice(t("compare"), "other", [["", t("no other")], ...others], address, (value) => {
        const [run, l, at] = value.split(" ").map(Number);
        set("other")(value ? { run, layer: l, head: at } : null);
      }),
      link,
      state.words && h("small", t("words rule")),
    );
  }

  /** @param {HTMLCanvasElement} target @param {HTMLElement} sentence */
  function redraw(target, sentence) {
    const how = draw(target, s);
    const shade = shadeOf(s);
    scaleBar.replaceChildren(legend(shade, fmt(shade.low, 2), fmt(shade.high, 2), h("span", h("i.hatched"), t("masked cell"))));
    state.view = s.view;
    const { view } = s;
    const ends = [Math.min(s.rows.count, Math.ceil(view.y + how.frame.high * view.step)) - 1, Math.min(s.cols.count, Math.ceil(view.x + how.frame.side * view.step)) - 1];
    const size = how.level < 0 ? [Math.ceil(head.n / how.pixels[0]), Math.ceil(head.m / how.pixels[1])] : [2 ** how.level, 2 ** how.level];
    const single = how.level === 0 || (how.level < 0 && size[0] * size[1] === 1);
    const pooled = single ? t("single") : t(how.level < 0 ? "stretched" : "many", { rows: size[0], cols: size[1], rule: t(s.rule) });
    sentence.textContent = `${t("where", { i0: Math.floor(view.y), i1: ends[0], n: s.rows.count, j0: Math.floor(view.x), j1: ends[1], m: s.cols.count })} · ${pooled}${how.missing ? ` · ${t("computing")}` : ""}`;
    box.dataset.missing = String(how.missing);
  }

  /** @param {number} factor      0: the whole */
  function nearer(factor) {
    const f = frame(box.clientWidth, s);
    if (factor) zoom(s, f, factor, s.cell.i + 0.5, s.cell.j + 0.5);
    else Object.assign(s.view, { y: 0, x: 0, step: wholeStep(s, f.side) });
    refresh();
    keep();
  }

  /** After the cell moved: its row and column, the readout, the lists, the text. @param {number} wait */
  async function moved(wait) {
    const { cell } = s;
    state.query = tokenAt(s.rows, cell.i);
    state.key = tokenAt(s.cols, cell.j);
    state.pinned = cell.pinned;
    const at = `${cell.i} ${cell.j}`;
    if (wait) await new Promise((then) => setTimeout(then, wait));
    if (shown !== s || at !== `${cell.i} ${cell.j}`) return;
    const [row, column] = await Promise.all([unitRow(cell.i), unitColumn(cell.j)]).catch((why) => (failed(why), [null, null]));
    if (shown !== s || at !== `${cell.i} ${cell.j}`) return;
    s.row = row;
    s.column = column;
    refresh();
    said.textContent = readout(s, t) + (s.other ? ` · ${t("difference")} ${await minus()}` : "");
    say(said.textContent);
    const label = (/** @type {import("./units.js").Units} */ u, /** @type {(token: number) => string} */ name, /** @type {number} */ unit) => `${unit} “${spelled(unitName(u, name, unit), 16)}”`;
    lists.replaceChildren();
    add(lists, [
      strongest(t("query looks", { name: label(s.rows, s.rowName, cell.i) }), row, s.colName, (token) => jump(cell.i, unitOf(s.cols, token)), "query"),
      strongest(t("key seen", { name: label(s.cols, s.colName, cell.j) }), column, s.rowName, (token) => jump(unitOf(s.rows, token), cell.j), "key"),
    ]);
    paintText();
    drawTable();
    keep();
  }

  async function minus() {
    if (!s.other) return "";
    const line = await rowOf(s.other, tokenAt(s.rows, s.cell.i));
    const key = tokenAt(s.cols, s.cell.j);
    return line && s.row ? fmt(Math.max(0, s.row[key]) - Math.max(0, line[key]), 4) : "?";
  }

  /** A unit's row, by token: the mean over its queries. @param {number} unit */
  async function unitRow(unit) {
    return joined(await Promise.all(tokensOf(s.rows, unit).map((i) => rowOf(head, i))), true);
  }

  /** A unit's column, by token: the sum over its keys. @param {number} unit */
  async function unitColumn(unit) {
    return joined(await Promise.all(tokensOf(s.cols, unit).map((j) => columnOf(head, j))), false);
  }

  /** @param {number} i @param {number} j */
  function jump(i, j) {
    Object.assign(s.cell, { i, j });
    follow(s, frame(box.clientWidth, s));
    refresh();
    moved(0);
  }

  /** @param {number} rows @param {number} cols */
  function step(rows, cols) {
    const { i, j } = s.cell;
    jump(Math.max(0, Math.min(s.rows.count - 1, i + rows)), Math.max(0, Math.min(s.cols.count - 1, j + cols)));
  }

  function drawText() {
    text.replaceChildren();
    const texts = keys;
    if (!texts) return;
    const { reading } = state;
    const modes = /** @type {[string, string][]} */ ([["received", t("by received")], ...(head.exact ? [["query", t("by query")], ["key", t("by key")]] : [])]);
    if (!head.received && !head.exact) return;
    const field = /** @type {HTMLInputElement} */ (h("input", { type: "search", id: "search", placeholder: `${t("search")}  /`, "aria-label": t("search"), value: reading.word, onkeydown: (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter") find(field.value, event.shiftKey ? -1 : 1, count);
      else if (event.key === "Escape") field.blur();
    } }));
    const count = h("small", { role: "status" }, reading.said);
    add(text, [
      h("div.picks", choice(t("text shaded"), "by", modes, reading.by, (value) => ((reading.by = /** @type {any} */ (value)), paintText())), choice(t("click picks"), "picks", [["query", t("query")], ["key", t("key")]], reading.picks, (value) => (reading.picks = /** @type {any} */ (value))), h("span", field, count)),
      passage(texts, reading, (token) => choose(token), () => (drawText(), paintText()), t),
    ]);
  }

  /** A token of the text becomes the query or the key. @param {number} token */
  function choose(token) {
    const row = token - offset;
    if (state.reading.picks === "query" && !layer.cross && row >= 0 && row < head.n) jump(unitOf(s.rows, row), s.cell.j);
    else jump(s.cell.i, unitOf(s.cols, token));
  }

  /** @param {string} word @param {number} way @param {HTMLElement} count */
  function find(word, way, count) {
    const { reading } = state;
    if (word !== reading.word) Object.assign(reading, { word, found: search(/** @type {string[]} */ (keys), word) });
    const { found } = reading;
    const now = state.reading.picks === "query" && !layer.cross ? state.query + offset : state.key;
    const next = way > 0 ? found.find((at) => at > now) ?? found[0] : found.findLast((at) => at < now) ?? found.at(-1);
    reading.said = next === undefined ? t("not found") : t("found", { at: found.indexOf(next) + 1, of: found.length });
    count.textContent = reading.said;
    if (next === undefined) return;
    choose(next);
    reading.start = Math.max(0, next - 300);
    drawText();
    paintText();
    const again = /** @type {HTMLInputElement | null} */ (document.getElementById("search"));
    again?.focus();
    text.querySelector(`[data-token="${next}"]`)?.scrollIntoView({ block: "nearest" });
  }

  async function paintText() {
    const { by } = state.reading;
    const values = by === "received" ? (await surveyOf(head)).received : by === "query" ? s.row : s.column && (layer.cross ? null : spread(s.column, offset, head.m));
    const passageBox = /** @type {HTMLElement | null} */ (text.querySelector(".passage"));
    if (passageBox) shadeText(passageBox, values, { query: layer.cross ? -1 : state.query + offset, key: state.key, aside: s.aside ? head.first : -1 });
  }

  async function drawTable() {
    if (!(/** @type {HTMLDetailsElement} */ (table).open) || !head.exact) return;
    const made = await tableHere(s, t, unitRow);
    table.replaceChildren(/** @type {Node} */ (table.firstChild), made);
  }

  /** @param {HTMLCanvasElement} target @param {HTMLElement} holder */
  function listen(target, holder) {
    const place = (/** @type {PointerEvent | WheelEvent | MouseEvent} */ event) => {
      const r = target.getBoundingClientRect();
      return cellAt(s, frame(holder.clientWidth, s), event.clientX - r.left, event.clientY - r.top);
    };
    /** @type {{x: number, y: number, moved: boolean} | null} */
    let drag = null;
    target.addEventListener("pointerdown", (event) => (drag = { x: event.clientX, y: event.clientY, moved: false }));
    addEventListener("pointerup", () => setTimeout(() => (drag = null)));
    target.addEventListener("pointermove", (event) => {
      if (drag && event.buttons) {
        const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
        if (!drag.moved && Math.hypot(dx, dy) < 4) return;
        Object.assign(drag, { x: event.clientX, y: event.clientY, moved: true });
        s.view.x -= dx * s.view.step;
        s.view.y -= dy * s.view.step;
        settle(s, frame(holder.clientWidth, s));
        requestAnimationFrame(() => refresh());
        return;
      }
      const cell = place(event);
      if (!cell || s.cell.pinned || (cell.i === s.cell.i && cell.j === s.cell.j)) return;
      Object.assign(s.cell, { i: cell.i, j: cell.j });
      moved(head.n * head.m > 2 ** 22 ? 60 : 0);
    });
    target.addEventListener("click", (event) => {
      const cell = place(event);
      if (!cell || drag?.moved) return;
      const same = cell.i === s.cell.i && cell.j === s.cell.j;
      Object.assign(s.cell, { i: cell.i, j: cell.j, pinned: !(same && s.cell.pinned) });
      moved(0);
    });
    target.addEventListener("dblclick", () => nearer(0.25));
    target.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== holder) return;
      const cell = place(event);
      if (!cell) return;
      event.preventDefault();
      zoom(s, frame(holder.clientWidth, s), 2 ** (event.deltaY / 200), cell.row, cell.col);
      refresh();
    }, { passive: false });
  }

  for (const [key, rows, cols] of /** @type {[string, number, number][]} */ ([["ArrowUp", -1, 0], ["ArrowDown", 1, 0], ["ArrowLeft", 0, -1], ["ArrowRight", 0, 1]])) {
    shell.key(key, (event) => step(rows * (event.shiftKey ? 10 : 1), cols * (event.shiftKey ? 10 : 1)));
  }
  shell.key("Enter", () => ((s.cell.pinned = true), moved(0)));
  shell.key("Escape", () => ((s.cell.pinned = false), moved(0)));
  for (const key of ["+", "="]) shell.key(key, () => nearer(0.5));
  for (const key of ["-", "−"]) shell.key(key, () => nearer(2));
  shell.key("0", () => nearer(0));
  shell.key("/", () => document.getElementById("search")?.focus());
  shell.key("[", () => go({ ...state.at, head: state.at.head - 1 }));
  shell.key("]", () => go({ ...state.at, head: state.at.head + 1 }));
  shell.key("{", () => go({ ...state.at, layer: state.at.layer - 1 }));
  shell.key("}", () => go({ ...state.at, layer: state.at.layer + 1 }));
}

/** The key that a query looks at most. @param {Head} head @param {number} query */
async function strongestKey(head, query) {
  const row = await rowOf(head, query);
  return row ? Math.max(0, row.indexOf(row.reduce((most, a) => Math.max(most, a), MASKED))) : 0;
}

/** The view from before, where it fits this head; else the whole. @param {Shown} s @param {HTMLElement} box @param {import("./map.js").View | null} before */
function settleView(s, box, before) {
  const f = frame(box.clientWidth, s);
  s.view = before ?? { y: 0, x: 0, step: wholeStep(s, f.side) };
  settle(s, f);
}

/** @param {import("./units.js").Units} u @param {number} unit */
const tokensOf = (u, unit) => Array.from({ length: tokenAt(u, unit + 1) - tokenAt(u, unit) }, (_, at) => tokenAt(u, unit) + at);

/** The sum or mean of lines, MASKED where all are. @param {(Float32Array | null)[]} lines @param {boolean} mean */
function joined(lines, mean) {
  const [first] = lines;
  if (!first || lines.length === 1) return first ?? null;
  return first.map((_, at) => {
    const seen = lines.map((line) => /** @type {Float32Array} */ (line)[at]).filter((a) => a !== MASKED);
    return seen.length ? seen.reduce((a, b) => a + b, 0) / (mean ? lines.length : 1) : MASKED;
  });
}

/** Values by query, as values by key. @param {Float32Array} values @param {number} offset @param {number} length */
function spread(values, offset, length) {
  const all = new Float32Array(length);
  for (let at = 0; at < values.length; at++) if (at + offset >= 0 && at + offset < length) all[at + offset] = values[at];
  return all;
}
