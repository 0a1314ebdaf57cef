// The top of the steps: the dimensions, and all steps drawn to one scale; and their end.

import { columnHead, h, svg, table, tableRow } from "./dom.js";
import { isAsRun } from "./head.js";
import { fmt } from "./numbers.js";
import { dimension } from "./matrixframe.js";

/** @param {Story} s */
export const opening = (s) => h("section.opening", { "aria-label": s.t("sizes") }, axes(s), way(s));

/** @param {Story} s */
function axes(s) {
  const { layer } = s;
  const group = layer.heads / layer.kv_heads;
  const shown = /** @type {[string, number][]} */ ([
    ["n", s.head.n],
    ["m", s.head.m],
    ["d_k", s.head.dk],
    ["d_v", s.head.dv],
    ["h", layer.heads],
  ]);
  if (s.named("x")) shown.push(["d_model", s.sizes.d_model]);
  const lines = shown.map(([dim, size]) => {
    const says = dim === "h" && group > 1 ? s.t("h shared", { group }) : s.t(dim);
    return h("div", { "data-dim": dim }, h("dt", h("var.dim", dimension(dim)), ` = ${size}`), h("dd", says));
  });
  return h("div.block", h("h2", s.t("sizes")), h("dl.axes", lines));
}

/** All matrices from X to the output, on one scale. @param {Story} s */
function way(s) {
  const { n, m, d_k: dk, d_v: dv, "h·d_v": joined } = s.sizes;
  /** @type {[string, string, number, number][][]} */
  const groups = [
    [
      ["Q", "query", n, dk],
      ["K", "key", m, dk],
      ["V", "value", m, dv],
    ],
    [["S", "weights", n, m]],
    [["A", "weights", n, m]],
    [["O", "value", n, dv]],
  ];
  const x = s.named("x");
  if (x) groups.unshift([["X", "plain", n, x.shape[2]]]);
  if (s.step("concat"))
    groups.push([["H", "value", n, joined]], [["U", "plain", n, s.named("w_o")?.shape[1] ?? joined]]);
  const shapes = groups.map((group) =>
    group.map(([symbol, role, ...size]) => {
      const [high, wide] = s.columns ? size.toReversed() : size;
      return { symbol, role, w: wide, h: high };
    }),
  );
  const [label, gap] = [28, s.room < 560 ? 12 : 30];
  const sum = (/** @type {number[]} */ list) => list.reduce((total, each) => total + each, 0);
  const across = sum(shapes.map((group) => Math.max(...group.map(({ w }) => w))));
  const high = Math.max(...shapes.map((group) => sum(group.map(({ h: tall }) => tall))));
  const unit = Math.min((Math.min(s.room, 1000) - gap * groups.length) / across, 240 / high, 22);
  const size = (/** @type {number} */ steps) => Math.max(2, steps * unit);
  const heights = shapes.map((group) => sum(group.map(({ h: tall }) => size(tall) + label)));
  const tallest = Math.max(...heights);
  const parts = [];
  let left = 2;
  for (const [place, group] of shapes.entries()) {
    const width = Math.max(12, ...group.map(({ w }) => size(w)));
    let top = (tallest - heights[place]) / 2;
    if (place)
      parts.push(
        svg("path", { d: `M${left - gap + 4} ${tallest / 2 + 10}h${gap - 8}m-4 -3l4 3l-4 3`, class: "measure" }),
      );
    for (const { symbol, role, w, h: tall } of group) {
      const box = { x: left + (width - size(w)) / 2, y: top + 21, width: size(w), height: size(tall) };
      parts.push(svg("text", { x: left + width / 2, y: top + 15, class: `middle symbol role-${role}` }, symbol));
      parts.push(svg("rect", { ...box, class: `shape role-${role}` }));
      top += size(tall) + label;
    }
    left += width + gap;
  }
  const wide = Math.ceil(left - gap + 2);
  const viewBox = `0 0 ${wide} ${Math.ceil(tallest + 2)}`;
  const picture = svg("svg", { viewBox, width: wide, role: "img", "aria-labelledby": "way-title" }, parts);
  return h("div.block.way", h("h2", { id: "way-title" }, s.t("way")), picture, h("p.aside", s.t("sides")));
}

/** The cost of every step, and how far the page's numbers differ from the run's. @param {Story} s */
export function closing(s) {
  const { t, facts } = s;
  const lines = [];
  for (const each of [facts.check, facts.kept]) if (each) lines.push(each[s.shell.language()]);
  /** The largest difference between the page's numbers and the run's. @param {string} words @param {string} name @param {number} from @param {number} size @param {(at: number) => number} value */
  const compare = (words, name, from, size, value) => {
    const run = s.named(name);
    if (!run || !isAsRun(s.state.what)) return;
    let off = 0;
    for (let i = 0; i < size; i++)
      if (value(i) !== run.data[from + i]) off = Math.max(off, Math.abs(value(i) - run.data[from + i]));
    lines.push(t(words, { x: fmt(off, 2) }));
  };
  const { n, number, logsumexp } = s.head;
  compare("page check", "logsumexp", (s.state.batch * s.layer.heads + number) * n, n, logsumexp);
  const mixed = s.named("w_o") && s.layerOutput();
  if (mixed) compare("output check", "output", s.state.batch * mixed.length, mixed.length, (i) => mixed[i]);
  const row = (/** @type {any} */ { symbol, shape, multiply_adds: adds, bytes }) =>
    tableRow(symbol, [shape.join("×"), adds.toLocaleString("en"), bytes.toLocaleString("en")]);
  const heads = ["step", "shape", "adds", "bytes"].map((name) => columnHead(t(`${name} column`)));
  const items = lines.map((line) => h("li", line));
  const costs = table("table.cost", heads, s.layer.steps.map(row));
  return [h("ul.checks", items), h("h3", t("cost")), h("div.pan", costs)];
}
