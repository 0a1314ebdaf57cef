// From a cell of the map down to its arithmetic: q·k, scale, rules, softmax, and the value times the weight, with numbers.

import { h, renew, write } from "./dom.js";
import { LEVELS } from "./long/source.js";
import { fmt, listOf, safe } from "./numbers.js";
import { bold, changed, num, sumOfProducts, sym } from "./written.js";

/** @typedef {[title: string, line: Child]} Line */

const MOST = 4; // numbers of a value that are shown

export function diveRoom(/** @type {Shell} */ { t }) {
  let drawn = "";
  const [lines, says] = [h("ol.lines"), h("p.note")];

  /** The map's cell has moved, or its head's numbers have come. @param {{actual: Head, cell: {i: number, j: number}}} look */
  function show({ cell: { i, j }, actual: head }) {
    const { computing } = head;
    const here = `${Object.values(head.address)} ${head.version} ${i} ${j}`;
    if (drawn === here + Boolean(computing)) return;
    drawn = here + Boolean(computing);
    const about = head.served ? "dive served" : head.exact ? "computing" : "pictured head";
    write(says, computing ? "" : t(about, { levels: LEVELS }));
    const written = computing ? arithmetic(computing, i, j, t) : [];
    renew(
      lines,
      written.map(([name, line]) => h("li", h("small", name), h("p.written", line))),
    );
    if (!computing) head.loading.then(() => drawn.startsWith(here) && show({ cell: { i, j }, actual: head }));
  }

  return { element: h("div.dive", h("h3", t("dive")), says, lines), show };
}

/** @param {NonNullable<Head["computing"]>} head @param {number} i @param {number} j @param {Say} t @returns {Line[]} */
function arithmetic(head, i, j, t) {
  const { rules, scores, capped, biased, masked, logsumexp, visible, m } = head;
  const product = sumOfProducts({
    name: sym("s", `${i},${j}`, "weights"),
    symbols: [sym("q", i, "query"), "·", sym("k", j, "key")],
    terms: listOf(head.dk, (c) => [head.q(i, c), head.k(j, c)]),
    roles: ["query", "key"],
    ...{ total: scores(i, j), t },
  });
  const seen = visible(i, j);
  const sink = rules.sink === -Infinity ? null : [" + e", h("sup", fmt(rules.sink))];
  const count = listOf(m, (key) => masked(i, key)).filter((logit) => logit !== -Infinity).length;
  const sum = [sym("L", i, "weights"), " = ln(", t(`sum over ${rules.over}`, { count }), sink, ") = "];
  const step = (/** @type {string} */ name) => changed(head, name, i, j, t);
  /** @type {[is: boolean, title: string, line: Child][]} */
  const lines = [
    [true, "dive product", product],
    [true, "step scaled", step("scaled")],
    [rules.softcap !== null, "dive cap", step("capped")],
    [seen && biased(i, j) !== capped(i, j), "dive bias", step("biased")],
    [seen && rules.temperature !== 1, "dive temperature", step("masked")],
    [!seen, "dive mask", step("weights")],
    [seen, "dive sum", [sum, bold(logsumexp(i, j))]],
    [seen, "step softmax", step("weights")],
    [seen && !head.dv, "dive value", t("no values")],
  ];
  const there = lines.filter(([is]) => is).map(([, title, line]) => /** @type {Line} */ ([t(title), line]));
  return seen && head.dv ? [...there, ...valueLines(head, i, j, t)] : there;
}

/** The value times the weight, and the output. @param {NonNullable<Head["computing"]>} head @param {number} i @param {number} j @param {Say} t @returns {Line[]} */
function valueLines(head, i, j, t) {
  const { dv, lost, v, output } = head;
  const [weight, share] = [head.weights(i, j), head.bound(i) + lost];
  const vector = (/** @type {(c: number) => [number, number]} */ of) => {
    const numbers = listOf(Math.min(MOST, dv), (c) => [c ? "  " : "", h("span.num.role-value", safe(...of(c)))]);
    return ["[", numbers, dv > MOST ? " …]" : "]"];
  };
  const times = (/** @type {number} */ factor, /** @type {number} */ off) =>
    vector((c) => [factor * v(j, c), Math.abs(factor * v(j, c)) * off]);
  const [a, aj] = [j, "j"].map((key) => sym("a", `${i},${key}`, "weights"));
  const [value, vj] = [j, "j"].map((key) => sym("v", key, "value"));
  const product = [a, "·", value, " = ", num(weight, "weights"), "·", times(1, lost), " = ", times(weight, share)];
  const sum = [sym("o", i, "value"), " = Σ ", aj, "·", vj, " = "];
  return [
    [t("dive value"), product],
    [t("dive output"), [sum, vector((c) => [output(i, c), output(i, dv + c) * share])]],
  ];
}
