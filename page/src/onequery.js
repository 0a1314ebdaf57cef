// One query from start to end, as a table: a row for each key with its score and weight, and the weighted sum.

import { drawColours } from "./canvas.js";
import { signed } from "./colour.js";
import { h, table, tableRow } from "./dom.js";
import { fmt, listOf, spelled } from "./numbers.js";
import { most, subscript } from "./story.js";

const KEYS = 10;

/** @param {Story} s */
export function oneQuery(s) {
  const { head, t } = s;
  const i = s.state.query;
  if (i < 0) return null; // no query at all
  const order = keysInOrder(head, i);
  const [shown, rest] = [order.slice(0, KEYS), order.slice(KEYS)];
  const strip = stripOf(head, i, shown);
  const sum = (/** @type {number[]} */ keys) => keys.reduce((total, j) => total + head.weights(i, j), 0);
  const mix = (/** @type {number[]} */ keys, /** @type {number} */ c) =>
    keys.reduce((total, j) => total + head.weights(i, j) * head.v(j, c), 0);
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
        ? [fmt(head.masked(i, j)), h("td.weight", h("span.figures", fmt(a)), bar), strip((c) => a * head.v(j, c))]
        : masked),
    ]);
    if (!seen || j === s.state.key) made.className = seen ? "now" : "hidden";
    return made;
  };
  const total = (/** @type {Child} */ name, /** @type {number} */ weight, /** @type {(c: number) => number} */ value) =>
    tableRow(name, ["", "", h("td.weight", h("span.figures", fmt(weight))), strip(value)]);
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

/** The keys in order; of many only those that the query sees, those with the largest weights first. @param {StepHead} head @param {number} i */
function keysInOrder(head, i) {
  const keys = listOf(head.m, (j) => j);
  if (head.m <= KEYS) return keys;
  return keys.filter((j) => head.visible(i, j)).sort((a, b) => head.weights(i, b) - head.weights(i, a) || a - b);
}

/** Draws vectors as strips, on the scale of the output and of what the shown keys add. @param {StepHead} head @param {number} i @param {number[]} shown */
function stripOf(head, i, shown) {
  const largest = (/** @type {number} */ c) =>
    Math.max(Math.abs(head.output(i, c)), ...shown.map((j) => head.weights(i, j) * Math.abs(head.v(j, c))));
  const shade = signed(
    "value",
    most(1, head.dv, (_, c) => largest(c)),
  );
  return (/** @type {(c: number) => number} */ value) => {
    const canvas = h("canvas.strip", { width: head.dv, height: 1 });
    drawColours(canvas, (c) => shade.colour(value(c)));
    const first = listOf(Math.min(2, head.dv), (c) => fmt(value(c), 3)).join(" ");
    return h("td.mix", canvas, h("small", `[${first}${head.dv > 2 ? " …" : ""}]`));
  };
}
