// One query from start to end, as a table: a row for each key with its score and weight, and the weighted sum.

import { penOf } from "./canvas.js";
import { css, signed } from "./colour.js";
import { h } from "./dom.js";
import { fmt, listOf, spelled } from "./numbers.js";
import { most, subscript } from "./story.js";

/** @typedef {import("./story.js").Story} Story */

const KEYS = 10;

/** @param {Story} s */
export function oneQuery(s) {
  const { head, t } = s;
  const i = s.state.query;
  if (i < 0) return null; // no query at all
  const keys = listOf(head.m, (j) => j);
  const all = head.m <= KEYS;
  const order = all
    ? keys
    : keys.filter((j) => head.visible(i, j)).sort((a, b) => head.weights(i, b) - head.weights(i, a) || a - b);
  const shown = order.slice(0, KEYS);
  const rest = order.slice(KEYS);
  const shade = signed(
    "value",
    most(1, head.dv, (_, c) =>
      Math.max(Math.abs(head.output(i, c)), ...shown.map((j) => head.weights(i, j) * Math.abs(head.v(j, c)))),
    ),
  );
  const strip = (/** @type {(c: number) => number} */ at) => {
    const canvas = /** @type {HTMLCanvasElement} */ (h("canvas.strip", { width: head.dv, height: 1 }));
    const pen = penOf(canvas);
    for (let c = 0; c < head.dv; c++) {
      pen.fillStyle = css(shade.at(at(c)));
      pen.fillRect(c, 0, 1, 1);
    }
    const first = listOf(Math.min(2, head.dv), (c) => fmt(at(c), 3)).join(" ");
    return [canvas, h("small", `[${first}${head.dv > 2 ? " …" : ""}]`)];
  };
  const row = (/** @type {number} */ j) => {
    const seen = head.visible(i, j);
    const a = head.weights(i, j);
    const bar = h("span.share");
    bar.style.width = `${a * 100}%`;
    return h(
      "tr",
      { class: seen ? (j === s.state.key ? "now" : null) : "hidden" },
      h(
        "th",
        { scope: "row" },
        h(
          "button",
          { onclick: () => s.commit({ key: j }) },
          s.page.header.tokens ? h("small", j) : null,
          h("bdi", spelled(s.keyName(j), 14)),
        ),
      ),
      h("td", fmt(head.scores(i, j))),
      seen
        ? [
            h("td", fmt(head.masked(i, j))),
            h("td.weight", h("span.figures", fmt(a)), h("span.track", bar)),
            h(
              "td.mix",
              strip((c) => a * head.v(j, c)),
            ),
          ]
        : [h("td", "−∞"), h("td.weight", h("i.hatched"), t("masked cell")), h("td.mix", "")],
    );
  };
  const more = rest.length
    ? h(
        "tr",
        h("th", { scope: "row" }, t("more keys", { count: rest.length })),
        h("td"),
        h("td"),
        h("td.weight", h("span.figures", fmt(rest.reduce((sum, j) => sum + head.weights(i, j), 0)))),
        h(
          "td.mix",
          strip((c) => rest.reduce((sum, j) => sum + head.weights(i, j) * head.v(j, c), 0)),
        ),
      )
    : null;
  const sum = order.reduce((total, j) => total + head.weights(i, j), 0);
  const last = h(
    "tr.total",
    h("th", { scope: "row" }, "Σ = o", h("sub", i)),
    h("td"),
    h("td"),
    h("td.weight", h("span.figures", fmt(sum))),
    h(
      "td.mix",
      strip((c) => head.output(i, c)),
    ),
  );
  const column = (/** @type {string} */ role, /** @type {any} */ ...parts) =>
    h("th", { scope: "col", class: `role-${role}` }, parts);
  return h(
    "div.pan",
    h(
      "table.one",
      h(
        "thead",
        h(
          "tr",
          column("key", t("key column")),
          column("weights", `q${subscript(i)}·k`),
          column("weights", s.t("seen by softmax")),
          column("weights", t("weight column")),
          column("value", "a·v"),
        ),
      ),
      h("tbody", shown.map(row), more, last),
    ),
  );
}
