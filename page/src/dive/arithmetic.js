// The chosen weight written out with its numbers: q·k, scale, rules, softmax, and the value times the weight.

import { h } from "../dom.js";
import { fmt, safe, within, listOf } from "../numbers.js";
import { num, sumOfProducts, sym } from "../written.js";
import { cell, outputAt, throughRules } from "./problem.js";

/** @typedef {import("../dom.js").Child} Child */

const MOST = 4; // numbers of a value that are shown

/**
 * @param {import("./problem.js").Problem} problem
 * @param {import("./problem.js").Row} row
 * @param {number} i
 * @param {number} j
 * @param {number | null} bound      how far the weight may be from the run's, as a share of it; null under a supposition
 * @param {boolean} known      whether the run's v is known, though the page may not have it
 * @param {(key: string, values?: any) => string} t
 * @returns {[string, Child][]} a heading and a line for each step
 */
export function arithmetic(problem, row, i, j, bound, known, t) {
  const { q, k, v, rules } = problem;
  const score = row.scores[j];
  const at = `${i},${j}`;
  const through = throughRules(rules, score, i, j);
  const terms = listOf(q.width, (c) => /** @type {[number, number]} */ ([cell(q, i, c), cell(k, j, c)]));
  /** @type {[string, Child][]} */
  const lines = [
    [
      t("dive product"),
      sumOfProducts({
        name: sym("s", at, "weights"),
        symbols: [sym("q", i, "query"), "·", sym("k", j, "key")],
        terms,
        roles: ["query", "key"],
        total: score,
        more: (count, sum) => t("more", { count, sum }),
      }),
    ],
  ];
  const root = Math.abs(rules.scale * Math.sqrt(q.width) - 1) < 1e-6;
  lines.push([
    t("step scaled"),
    [
      num(score),
      root ? [" / √", String(q.width)] : [" · ", fmt(rules.scale, 5)],
      " = ",
      h("b", fmt(through.scaled, 5)),
    ],
  ]);
  if (rules.softcap !== null)
    lines.push([
      t("dive cap"),
      [`${fmt(rules.softcap)}·tanh(${fmt(through.scaled)} / ${fmt(rules.softcap)}) = `, h("b", fmt(through.capped, 5))],
    ]);
  if (through.biased !== through.capped && through.visible)
    lines.push([
      t("dive bias"),
      [
        num(through.capped),
        through.biased < through.capped ? " − " : " + ",
        num(Math.abs(through.biased - through.capped)),
        " = ",
        h("b", fmt(through.biased, 5)),
      ],
    ]);
  if (rules.temperature !== 1 && through.visible)
    lines.push([
      t("dive temperature"),
      [num(through.biased), " / ", fmt(rules.temperature), " = ", h("b", fmt(row.logits[j], 5))],
    ]);
  if (!through.visible) return [...lines, [t("dive mask"), [t("masked cell"), ": ", sym("a", at, "weights"), " = 0"]]];
  const L = sym("L", i, "weights");
  const sink = rules.sink === -Infinity ? null : [" + e", h("sup", fmt(rules.sink))];
  lines.push([
    t("dive sum"),
    [L, " = ln(", t("sum over keys", { count: row.seen }), sink, ") = ", h("b", fmt(row.L, 5))],
  ]);
  const weight = row.weights[j];
  const off = bound === null ? null : weight * bound;
  lines.push([
    t("step softmax"),
    [
      sym("a", at, "weights"),
      " = e",
      h("sup", `${fmt(row.logits[j], 5)} − ${fmt(row.L, 5).replace("−", "(−")}${row.L < 0 ? ")" : ""}`),
      " = ",
      h("b", off === null ? fmt(weight, 5) : within(weight, off)),
    ],
  ]);
  if (!v) return [...lines, [t("dive value"), t(known ? "values left out" : "no values")]];
  const share = bound === null ? 0 : bound + problem.vLost;
  const shown = listOf(Math.min(MOST, v.width), (c) => c);
  const vector = (/** @type {(c: number) => [number, number]} */ of) => [
    "[",
    shown.map((c) => [c ? "  " : "", h("span.num.role-value", safe(...of(c)))]),
    v.width > MOST ? " …]" : "]",
  ];
  lines.push([
    t("dive value"),
    [
      sym("a", at, "weights"),
      "·",
      sym("v", j, "value"),
      " = ",
      num(weight, "weights"),
      "·",
      vector((c) => [cell(v, j, c), Math.abs(cell(v, j, c)) * problem.vLost]),
      " = ",
      vector((c) => [weight * cell(v, j, c), Math.abs(weight * cell(v, j, c)) * share]),
    ],
  ]);
  lines.push([
    t("dive output"),
    [
      sym("o", i, "value"),
      " = Σ ",
      sym("a", `${i},j`, "weights"),
      "·",
      sym("v", "j", "value"),
      " = ",
      vector((c) => outputAt(problem, row, c, share)),
    ],
  ]);
  return lines;
}
