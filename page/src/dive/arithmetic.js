// The chosen weight written out with its numbers: q·k, scale, rules, softmax, and the value times the weight.

import { h } from "../dom.js";
import { fmt, safe, within, listOf } from "../numbers.js";
import { num, sumOfProducts, sym } from "../written.js";
import { cell, outputAt, throughRules } from "./problem.js";

const MOST = 4; // numbers of a value that are shown

/**
 * A heading and a line for each step.
 * @param {Problem} problem @param {Row} row @param {number} i @param {number} j
 * @param {number | null} bound      how far the weight may be from the run's, as a share of it; null where nothing is known
 * @param {Say} t @returns {[string, Child][]}
 */
export function arithmetic(problem, row, i, j, bound, t) {
  const { rules, v } = problem;
  const through = throughRules(rules, row.scores[j], i, j);
  const weightOf = sym("a", `${i},${j}`, "weights");
  const lines = logitLines(problem, row, through, i, j, t);
  if (!through.visible) return [...lines, [t("dive mask"), [t("masked cell"), ": ", weightOf, " = 0"]]];
  const sink = rules.sink === -Infinity ? null : [" + e", h("sup", fmt(rules.sink))];
  const sum = [
    sym("L", i, "weights"),
    " = ln(",
    t(`sum over ${rules.over}`, { count: row.seen }),
    sink,
    ") = ",
    bold(row.L),
  ];
  const weight = row.weights[j];
  const power = `${fmt(row.logits[j], 5)} − ${fmt(row.L, 5).replace("−", "(−")}${row.L < 0 ? ")" : ""}`;
  const value = h("b", bound === null ? fmt(weight, 5) : within(weight, weight * bound));
  lines.push([t("dive sum"), sum], [t("step softmax"), [weightOf, " = e", h("sup", power), " = ", value]]);
  const share = bound === null ? 0 : bound + problem.vLost;
  const values = v ? valueLines(problem, v, row, i, j, share, t) : null;
  return [...lines, ...(values ?? [[t("dive value"), t("no values")]])];
}

const bold = (/** @type {number} */ x) => h("b", fmt(x, 5));

/** From the product to the logit. @param {Problem} problem @param {Row} row @param {ReturnType<typeof throughRules>} through @param {number} i @param {number} j @param {Say} t @returns {[string, Child][]} */
function logitLines({ q, k, rules }, row, through, i, j, t) {
  const total = row.scores[j];
  const { scaled, capped, biased, visible } = through;
  const product = sumOfProducts({
    name: sym("s", `${i},${j}`, "weights"),
    symbols: [sym("q", i, "query"), "·", sym("k", j, "key")],
    terms: listOf(q.width, (c) => [cell(q, i, c), cell(k, j, c)]),
    roles: ["query", "key"],
    total,
    more: (count, sum) => t("more", { count, sum }),
  });
  const root = Math.abs(rules.scale * Math.sqrt(q.width) - 1) < 1e-6;
  const by = root ? [" / √", String(q.width)] : [" · ", fmt(rules.scale, 5)];
  const cap = fmt(rules.softcap ?? 0);
  const bias = [num(capped), biased < capped ? " − " : " + ", num(Math.abs(biased - capped))];
  const heat = [num(biased), " / ", fmt(rules.temperature)];
  /** @type {[boolean, string, Child, number][]} */
  const steps = [
    [true, "step scaled", [num(total), by], scaled],
    [rules.softcap !== null, "dive cap", `${cap}·tanh(${fmt(scaled)} / ${cap})`, capped],
    [visible && biased !== capped, "dive bias", bias, biased],
    [visible && rules.temperature !== 1, "dive temperature", heat, row.logits[j]],
  ];
  const lines = steps.filter(([there]) => there);
  return [[t("dive product"), product], ...lines.map(([, name, line, x]) => lineOf(t(name), line, x))];
}

/** @param {string} name @param {Child} line @param {number} x @returns {[string, Child]} */
const lineOf = (name, line, x) => [name, [line, " = ", bold(x)]];

/** The value times the weight, and the output. @param {Problem} problem @param {Rows} v @param {Row} row @param {number} i @param {number} j @param {number} share      how far a weight times a value may be off @param {Say} t @returns {[string, Child][]} */
function valueLines(problem, v, row, i, j, share, t) {
  const weight = row.weights[j];
  const shown = listOf(Math.min(MOST, v.width), (c) => c);
  const vector = (/** @type {(c: number) => [number, number]} */ of) => {
    const numbers = shown.map((c) => [c ? "  " : "", h("span.num.role-value", safe(...of(c)))]);
    return ["[", numbers, v.width > MOST ? " …]" : "]"];
  };
  const times = (/** @type {number} */ factor, /** @type {number} */ off) =>
    vector((c) => [factor * cell(v, j, c), Math.abs(factor * cell(v, j, c)) * off]);
  const [a, aj] = [j, "j"].map((key) => sym("a", `${i},${key}`, "weights"));
  const [value, vj] = [j, "j"].map((key) => sym("v", key, "value"));
  const product = [a, "·", value, " = ", num(weight, "weights"), "·", times(1, problem.vLost)];
  const output = [sym("o", i, "value"), " = Σ ", aj, "·", vj, " = ", vector((c) => outputAt(problem, row, c, share))];
  return [
    [t("dive value"), [product, " = ", times(weight, share)]],
    [t("dive output"), output],
  ];
}
