// The steps of the page, what each says, and their tables. A step that the layer lacks is left out.

import { columnHead, h, table, tableRow } from "./dom.js";
import { dimension } from "./matrix.js";
import { fmt, listOf, spelled } from "./numbers.js";
import { most, subscript } from "./story.js";
import { section } from "./section.js";
import { chainOf, chainScenes, inputScenes, layerOutputScenes, outputScenes, scoreScenes } from "./stepscenes.js";
import { waySection } from "./way.js";

/** @typedef {Parameters<typeof section>[1]} Options */

/** The formula of a step, if it has one. @param {Story} s @param {string} name @returns {string[]} */
const formulaOf = (s, name) => [s.step(name)?.formula].filter(Boolean);

/** A section with the title, the sentences and the formula of its step, where it has no others. @param {Story} s @param {string} id @param {string} symbol @param {Partial<Options>} more */
const sectionOf = (s, id, symbol, more) =>
  section(s, { id, symbol, title: s.t(id), says: () => s.words(id), formulas: () => formulaOf(s, id), ...more });

/** @param {Story} s @returns {Section[]} */
export function sectionsOf(s) {
  const { t } = s;
  const whole = s.step("concat");
  const projected = s.named("x");
  const sections = [
    sectionOf(s, "qkv", projected ? "X→QKV" : "QKV", {
      says: () => t(projected ? "project" : "given qkv"),
      formulas: () => (projected ? ["q", "k", "v"].flatMap((name) => formulaOf(s, name)) : []),
      scenes: () => inputScenes(s),
    }),
    sectionOf(s, "one", "q → o", {
      says: () => t("one says", { token: spelled(s.queryName(s.state.query)) }),
      body: () => oneQuery(s),
      ofCell: true,
    }),
    ...weightSections(s),
    sectionOf(s, whole ? "heads" : "output", "O", { scenes: () => outputScenes(s) }),
  ];
  if (whole)
    sections.push(
      sectionOf(s, "output", "U", {
        title: t("layer output"),
        says: () => s.words("layer output"),
        formulas: () => ["concat", "output"].flatMap((name) => formulaOf(s, name)),
        scenes: () => layerOutputScenes(s),
      }),
    );
  if (s.facts.way) sections.push(waySection(s));
  if (!s.facts.live) sections.push(sectionOf(s, "checked", "✓", { body: () => closing(s) })); // they are of the record
  return sections;
}

/** From the scores to the weights. @param {Story} s */
function weightSections(s) {
  /** The symbol of what goes into the mask, or into the softmax, as the formulas have it. @param {number} at */
  const plainly = (at) => chainOf(s).at(at)?.symbol.replace("′", "'");
  const softened = (/** @type {string} */ text) => text.replace(/(softmax\(\[?)[A-Z]'?/, `$1${plainly(-2)}`);
  /** @type {Record<string, Partial<Options>>} */
  const own = {
    scores: { scenes: () => scoreScenes(s) },
    scaled: { says: () => s.words(formulaOf(s, "scaled")[0].includes("√") ? "scaled" : "scaled by") },
    masked: {
      says: () => (s.hidden ? s.words("masked") : s.t("nothing masked")),
      formulas: () => [`M = ${plainly(-3)}${s.hidden ? ", -∞ where forbidden" : ""}`],
    },
    weights: {
      title: s.t(s.columns ? "weights columns" : "weights"),
      says() {
        const { over, sink } = s.head.rules;
        if (over !== "rows") return s.t(`over ${over} says`);
        return s.words(sink === -Infinity ? "weights" : "weights with sink");
      },
      formulas: () => formulaOf(s, "weights").map(softened),
    },
  };
  return chainOf(s).map(({ name, symbol }) =>
    sectionOf(s, name, symbol, { scenes: () => chainScenes(s, name), ...own[name] }),
  );
}

const KEYS = 10;

/** The dimensions, above the steps. @param {Story} s */
export function sizesOf({ head: { n, m, dk, dv }, layer, named, sizes, t }) {
  const group = layer.heads / layer.kv_heads;
  const shown = { n, m, d_k: dk, d_v: dv, h: layer.heads, ...(named("x") && { d_model: sizes.d_model }) };
  const lines = Object.entries(shown).map(([dim, size]) => {
    const says = dim === "h" && group > 1 ? t("h shared", { group }) : t(dim);
    return h("div", h("dt", h("var.dim", dimension(dim)), ` = ${size}`), h("dd", says));
  });
  const block = h("div.block", h("h2", t("sizes")), h("dl.axes", lines));
  return h("section.opening", { "aria-label": t("sizes") }, block);
}

/** One query from start to end: a row for each key with its score and weight, and the weighted sum. @param {Story} s */
function oneQuery(s) {
  const { head, t } = s;
  const i = s.state.query;
  if (i < 0) return null; // no query at all
  const keys = listOf(head.m, (j) => j);
  const byWeight = (/** @type {number} */ a, /** @type {number} */ b) =>
    head.weights(i, b) - head.weights(i, a) || a - b;
  const order = head.m > KEYS ? keys.filter((j) => head.visible(i, j)).sort(byWeight) : keys;
  const [shown, rest] = [order.slice(0, KEYS), order.slice(KEYS)];
  /** What keys get, and what they add. @param {number[]} keys */
  const cells = (keys) => {
    const weight = keys.reduce((sum, j) => sum + head.weights(i, j), 0);
    const mix = listOf(Math.min(2, head.dv), (c) =>
      keys.reduce((sum, j) => sum + head.weights(i, j) * head.v(j, c), 0),
    );
    const bar = h("span.track", h("span.share", { style: { width: `${weight * 100}%` } }));
    const vector = `[${mix.map((x) => fmt(x, 2)).join(" ")}${head.dv > 2 ? " …" : ""}]`;
    return [h("td.weight", h("span.figures", fmt(weight)), keys.length === 1 && bar), h("td.mix", h("small", vector))];
  };
  const row = (/** @type {number} */ j) => {
    const seen = head.visible(i, j);
    const name = [s.page.header.tokens && h("small", j), h("bdi", spelled(s.keyName(j), 14))];
    const masked = ["−∞", h("td.weight", h("i.hatched"), t("masked cell")), ""];
    const made = tableRow(h("button", { onclick: () => s.commit({ key: j }) }, name), [
      fmt(head.scores(i, j)),
      ...(seen ? [fmt(head.masked(i, j)), ...cells([j])] : masked),
    ]);
    if (!seen || j === s.state.key) made.className = seen ? "now" : "hidden";
    return made;
  };
  const more = rest.length ? tableRow(t("more keys", { count: rest.length }), ["", "", ...cells(rest)]) : null;
  const last = tableRow(["Σ = o", h("sub", i)], ["", "", ...cells(order)]);
  last.className = "total";
  const heads = [
    ["key", t("key column")],
    ["weights", `q${subscript(i)}·k`],
    ["weights", t("seen by softmax")],
    ["weights", t("weight column")],
    ["value", "a·v"],
  ].map(([role, name]) => h("th", { scope: "col", class: `role-${role}` }, name));
  return h("div.pan", table("table.one", heads, [shown.map(row), more, last]));
}

/** The cost of every step, and how far the page's numbers differ from the run's. @param {Story} s */
function closing(s) {
  const { t, facts } = s;
  const { n, number, logsumexp } = s.head;
  const run = s.named("logsumexp")?.data.subarray((s.state.batch * s.layer.heads + number) * n);
  const off = (/** @type {number} */ i) => (logsumexp(i) === run?.[i] ? 0 : logsumexp(i) - Number(run?.[i]));
  const said = [facts.check, facts.kept].map((each) => each?.[s.shell.language()]);
  const lines = [...said, run && t("page check", { x: fmt(most(n, 1, off), 2) })];
  const row = (/** @type {any} */ { symbol, shape, multiply_adds: adds, bytes }) =>
    tableRow(symbol, [shape.join("×"), adds.toLocaleString("en"), bytes.toLocaleString("en")]);
  const heads = ["step", "shape", "adds", "bytes"].map((name) => columnHead(t(`${name} column`)));
  const costs = table("table.cost", heads, s.layer.steps.map(row));
  const items = lines.filter(Boolean).map((line) => h("li", line));
  return [h("ul.checks", items), h("h3", t("cost")), h("div.pan", costs)];
}
