// How the page begins: the text and what the model says next, the axes by name, and the whole way drawn to one scale.

import { h, svg } from "./dom.js";
import { fmt, percent, spelled } from "./numbers.js";
import { dimension } from "./matrix.js";

/** @typedef {import("./story.js").Story} Story */

/** @param {Story} s */
export function opening(s) {
  const { facts, title } = s.page.header;
  const explained = facts.text !== undefined;
  return h(
    "section",
    { class: "opening", "aria-labelledby": "opening-title" },
    h("h1", { id: "opening-title" }, s.t(explained ? "title explain" : "title trace")),
    explained ? h("p", { class: "quoted" }, h("bdi", {}, spelled(title, 200))) : null,
    facts.model ? h("p", { class: "model" }, facts.model[s.shell.language()], facts.illustration ? ` — ${s.words("illustration")}` : null) : null,
    explained ? tokens(s) : null,
    facts.next ? next(s, facts.next) : null,
    axes(s),
    way(s),
  );
}

/** @param {Story} s */
function tokens(s) {
  const { tokens } = s.page.header;
  const pick = (/** @type {number} */ query) => () => {
    s.commit({ query, key: -1 });
    document.getElementById(`token-${query}`)?.focus();
  };
  return h(
    "div",
    { class: "block" },
    h("h2", { id: "text-title" }, s.t("text")),
    h(
      "div",
      { class: "tokens", role: "group", "aria-labelledby": "text-title" },
      tokens.map((/** @type {string} */ token, /** @type {number} */ i) =>
        h("button", { type: "button", id: `token-${i}`, "aria-pressed": String(i === s.state.query), onclick: pick(i) }, h("small", {}, i), h("bdi", {}, spelled(token))),
      ),
    ),
  );
}

/** @param {Story} s @param {[string, number][]} choices */
function next(s, choices) {
  const row = (/** @type {[string, number]} */ [token, share]) => {
    const bar = h("span", { class: "share" });
    bar.style.width = `${Math.max(0.5, share * 100)}%`;
    return h("li", {}, h("bdi", {}, spelled(token)), h("span", { class: "track" }, bar), h("span", { class: "figures" }, percent(share)));
  };
  return h("div", { class: "block" }, h("h2", {}, s.t("next")), h("ol", { class: "next" }, choices.map(row)));
}

/** @param {Story} s */
function axes(s) {
  const { layer } = s;
  const group = layer.heads / layer.kv_heads;
  const shown = [["n", s.head.n], ["m", s.head.m], ["d_k", s.head.dk], ["d_v", s.head.dv], ["h", layer.heads]];
  if (s.named("x")) shown.push(["d_model", s.sizes.d_model]);
  return h(
    "div",
    { class: "block" },
    h("h2", {}, s.t("sizes")),
    h("dl", { class: "axes" }, shown.map(([dim, size]) => h("div", { "data-dim": dim }, h("dt", {}, h("var", { class: "dim" }, dimension(String(dim))), ` = ${size}`), h("dd", {}, dim === "h" && group > 1 ? s.t("h shared", { group }) : s.t(String(dim)))))),
  );
}

/** Every matrix on the way, in one scale for all. @param {Story} s */
function way(s) {
  const { n, m, d_k: dk, d_v: dv, d_model: d } = s.sizes;
  const wide = s.sizes["h·d_v"];
  /** @type {[string, string, number, number][][]} */
  const groups = [[["Q", "query", n, dk], ["K", "key", m, dk], ["V", "value", m, dv]], [["S", "weights", n, m]], [["A", "weights", n, m]], [["O", "value", n, dv]]];
  if (s.named("x")) groups.unshift([["X", "plain", n, s.named("x")?.shape[2] ?? d]]);
  if (s.step("concat")) groups.push([["H", "value", n, wide]], [["U", "plain", n, s.named("w_o")?.shape[1] ?? wide]]);
  const room = Math.min(s.room, 1000);
  const across = groups.reduce((sum, group) => sum + Math.max(...group.map((part) => part[3])), 0);
  const high = Math.max(...groups.map((group) => group.reduce((sum, part) => sum + part[2], 0)));
  const gap = room < 560 ? 12 : 30;
  const unit = Math.min((room - gap * groups.length) / across, 240 / high, 22);
  const parts = [];
  let x = 2;
  const tallest = Math.max(...groups.map((group) => group.reduce((sum, part) => sum + Math.max(2, part[2] * unit) + 22, 0)));
  for (const [place, group] of groups.entries()) {
    const height = group.reduce((sum, part) => sum + Math.max(2, part[2] * unit) + 22, 0);
    const width = Math.max(12, ...group.map((part) => part[3] * unit));
    let y = (tallest - height) / 2;
    for (const [symbol, role, rows, cols] of group) {
      const [w, tall] = [Math.max(2, cols * unit), Math.max(2, rows * unit)];
      parts.push(svg("text", { x: x + width / 2, y: y + 13, class: `middle symbol role-${role}` }, symbol));
      parts.push(svg("rect", { x: x + (width - w) / 2, y: y + 18, width: w, height: tall, class: `shape role-${role}` }, svg("title", {}, `${symbol} ${rows}×${cols}`)));
      y += tall + 22;
    }
    x += width + gap;
    if (place < groups.length - 1) parts.push(svg("path", { d: `M${x - gap + 3} ${tallest / 2 + 8}h${gap - 8}m-4 -3l4 3l-4 3`, class: "measure" }));
  }
  const picture = svg("svg", { viewBox: `0 0 ${Math.ceil(x - gap + 4)} ${Math.ceil(tallest + 4)}`, role: "img", "aria-labelledby": "way-title" }, parts);
  picture.style.width = `${Math.ceil(x - gap + 4)}px`;
  return h("div", { class: "block way" }, h("h2", { id: "way-title" }, s.t("way")), picture, h("p", { class: "aside" }, s.t("sides")));
}

/** What every step costs, and how page and run agree. @param {Story} s */
export function closing(s) {
  const { t } = s;
  const { facts } = s.page.header;
  const L = s.named("logsumexp");
  const lines = [];
  if (facts.check) lines.push(facts.check[s.shell.language()]);
  if (L) {
    let off = 0;
    const at = (s.state.batch * s.layer.heads + s.head.number) * s.head.n;
    for (let i = 0; i < s.head.n; i++) {
      const [a, b] = [s.head.logsumexp(i), L.data[at + i]];
      if (a !== b) off = Math.max(off, Math.abs(a - b));
    }
    lines.push(t("page check", { x: fmt(off, 2) }));
  }
  const row = (/** @type {any} */ step) => h("tr", {}, h("th", { scope: "row" }, step.symbol), h("td", {}, step.shape.join("×")), h("td", {}, step.multiply_adds.toLocaleString("en")), h("td", {}, step.bytes.toLocaleString("en")));
  const heads = ["step column", "shape column", "adds column", "bytes column"].map((name) => h("th", { scope: "col" }, t(name)));
  return [
    h("ul", { class: "checks" }, lines.map((line) => h("li", {}, line))),
    h("h3", {}, t("cost")),
    h("div", { class: "pan" }, h("table", { class: "cost" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, s.layer.steps.map(row)))),
    h("p", { class: "aside" }, t("offline")),
  ];
}
