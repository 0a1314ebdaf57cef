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
  const last = whole ? "heads" : "output";
  const projected = s.named("x");
  const sections = [
    sectionOf(s, "qkv", projected ? "X→QKV" : "QKV", {
      says: () => t(projected ? "project" : "given qkv"),
      formulas: () => (projected ? ["q", "k", "v"].flatMap((name) => formulaOf(s, name)) : []),
      scenes: () => inputScenes(s),
    }),
    sectionOf(s, "one", "q → o", {
      says: () => t("one says", { token: spelled(s.queryName(s.state.query)) }),
      formulas: undefined,
      body: () => oneQuery(s),
      ofCell: true,
    }),
    ...weightSections(s),
    sectionOf(s, last, "O", { says: () => s.words(last), scenes: () => outputScenes(s) }),
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
  const checked = () => sectionOf(s, "checked", "✓", { says: () => "", formulas: undefined, body: () => closing(s) });
  return s.facts.live ? sections : [...sections, checked()]; // the costs and the checks are of the record
}

/** From the scores to the weights. @param {Story} s */
function weightSections(s) {
  const chain = chainOf(s);
  const plainly = (/** @type {number} */ at) => chain[at].symbol.replace("′", "'"); // as the formulas have it
  const softened = (/** @type {string} */ text) =>
    text.replace(/(softmax\(\[?)[A-Z]'?/, `$1${plainly(chain.length - 2)}`);
  /** @type {Record<string, Partial<Options>>} */
  const own = {
    scores: { scenes: () => scoreScenes(s) },
    scaled: { says: () => s.words(formulaOf(s, "scaled")[0].includes("√") ? "scaled" : "scaled by") },
    masked: {
      says: () => (s.hidden ? s.words("masked") : s.t("nothing masked")),
      formulas: () => [`M = ${plainly(chain.length - 3)}${s.hidden ? ", -∞ where forbidden" : ""}`],
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
  return chain.map(({ name, symbol }) =>
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
  const order = keysInOrder(head, i);
  const [shown, rest] = [order.slice(0, KEYS), order.slice(KEYS)];
  const sum = (/** @type {number[]} */ keys) => keys.reduce((total, j) => total + head.weights(i, j), 0);
  const mix = (/** @type {number[]} */ keys, /** @type {number} */ c) =>
    keys.reduce((total, j) => total + head.weights(i, j) * head.v(j, c), 0);
  const vector = (/** @type {(c: number) => number} */ value) => {
    const first = listOf(Math.min(3, head.dv), (c) => fmt(value(c), 3)).join(" ");
    return h("td.mix", h("small", `[${first}${head.dv > 3 ? " …" : ""}]`));
  };
  const row = (/** @type {number} */ j) => {
    const seen = head.visible(i, j);
    const a = head.weights(i, j);
    const number = s.page.header.tokens ? h("small", j) : null;
    const name = h("bdi", spelled(s.keyName(j), 14));
    const bar = h("span.track", h("span.share", { style: { width: `${a * 100}%` } }));
    const masked = [h("td", "−∞"), h("td.weight", h("i.hatched"), t("masked cell")), h("td.mix", "")];
    const made = tableRow(h("button", { onclick: () => s.commit({ key: j }) }, number, name), [
      fmt(head.scores(i, j)),
      ...(seen
        ? [fmt(head.masked(i, j)), h("td.weight", h("span.figures", fmt(a)), bar), vector((c) => a * head.v(j, c))]
        : masked),
    ]);
    if (!seen || j === s.state.key) made.className = seen ? "now" : "hidden";
    return made;
  };
  const total = (/** @type {Child} */ name, /** @type {number} */ weight, /** @type {(c: number) => number} */ value) =>
    tableRow(name, ["", "", h("td.weight", h("span.figures", fmt(weight))), vector(value)]);
  const more = rest.length ? total(t("more keys", { count: rest.length }), sum(rest), (c) => mix(rest, c)) : null;
  const last = total(["Σ = o", h("sub", i)], sum(order), (c) => head.output(i, c));
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

/** The keys in order; of many only those that the query sees, those with the largest weights first. @param {Story["head"]} head @param {number} i */
function keysInOrder(head, i) {
  const keys = listOf(head.m, (j) => j);
  if (head.m <= KEYS) return keys;
  return keys.filter((j) => head.visible(i, j)).sort((a, b) => head.weights(i, b) - head.weights(i, a) || a - b);
}

/** The cost of every step, and how far the page's numbers differ from the run's. @param {Story} s */
function closing(s) {
  const { t, facts } = s;
  const { n, number, logsumexp } = s.head;
  /** The largest difference between the page's numbers and the run's. @param {string} words @param {string} name @param {number} from @param {number} size @param {(at: number) => number} value */
  const compared = (words, name, from, size, value) => {
    const run = s.named(name)?.data;
    const differs = (/** @type {number} */ at) =>
      run && value(at) !== run[from + at] ? Math.abs(value(at) - run[from + at]) : 0;
    return run && t(words, { x: fmt(most(size, 1, differs), 2) });
  };
  const wide = s.named("w_o")?.shape[1] ?? 0;
  const lines = [
    ...[facts.check, facts.kept].map((each) => each?.[s.shell.language()]),
    compared("page check", "logsumexp", (s.state.batch * s.layer.heads + number) * n, n, logsumexp),
    wide &&
      compared("output check", "output", s.state.batch * n * wide, n * wide, (at) =>
        s.layerOutput(Math.floor(at / wide), at % wide),
      ),
  ];
  const row = (/** @type {any} */ { symbol, shape, multiply_adds: adds, bytes }) =>
    tableRow(symbol, [shape.join("×"), adds.toLocaleString("en"), bytes.toLocaleString("en")]);
  const heads = ["step", "shape", "adds", "bytes"].map((name) => columnHead(t(`${name} column`)));
  const costs = table("table.cost", heads, s.layer.steps.map(row));
  const items = lines.filter(Boolean).map((line) => h("li", line));
  return [h("ul.checks", items), h("h3", t("cost")), h("div.pan", costs)];
}
