// The top of the steps: the dimensions; and their end.

import { columnHead, h, table, tableRow } from "./dom.js";
import { fmt } from "./numbers.js";
import { dimension } from "./matrixframe.js";

/** @param {Story} s */
export function opening({ head: { n, m, dk, dv }, layer, named, sizes, t }) {
  const group = layer.heads / layer.kv_heads;
  const shown = { n, m, d_k: dk, d_v: dv, h: layer.heads, ...(named("x") && { d_model: sizes.d_model }) };
  const lines = Object.entries(shown).map(([dim, size]) => {
    const says = dim === "h" && group > 1 ? t("h shared", { group }) : t(dim);
    return h("div", h("dt", h("var.dim", dimension(dim)), ` = ${size}`), h("dd", says));
  });
  const block = h("div.block", h("h2", t("sizes")), h("dl.axes", lines));
  return h("section.opening", { "aria-label": t("sizes") }, block);
}

/** The cost of every step, and how far the page's numbers differ from the run's. @param {Story} s */
export function closing(s) {
  const { t, facts } = s;
  const lines = [];
  for (const each of [facts.check, facts.kept]) if (each) lines.push(each[s.shell.language()]);
  /** The largest difference between the page's numbers and the run's. @param {string} words @param {string} name @param {number} from @param {number} size @param {(at: number) => number} value */
  const compare = (words, name, from, size, value) => {
    const run = s.named(name);
    if (!run) return;
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
