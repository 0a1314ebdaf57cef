// The way from the text to one logit: every part of the model with its sizes and what it adds, which sums to the logit.

import { h } from "./dom.js";
import { isolated, short, spelled } from "./numbers.js";

/** @typedef {{layer: number | null, adds: number, heads: number[], bias: number}} Part */

/** With two decimals, so that a reader can add them up; more for what would read as 0. @param {number} x */
const size = (x) => (Math.abs(x) < 0.095 ? short(Math.abs(x)) : Math.abs(x).toFixed(2));
const signed = (/** @type {number} */ x) => (x > 0 ? "+" : x < 0 ? "−" : "") + size(x);

/** The title of the section. @param {import("./story.js").Story} s */
export function wayTitle(s) {
  const { position, text, words } = s.facts.way;
  const named = `${position} ${spelled(s.queryName(position), 20)}`;
  return words[s.shell.language()].title
    .replace("{next}", () => isolated(spelled(text, 20)))
    .replace("{token}", () => isolated(named));
}

/** The parts as bars, one below the other; a head is a button that opens it. @param {import("./story.js").Story} s */
export function wayBody(s) {
  const { parts, logit, words } = s.facts.way;
  const { names, bias, sum, notes } = words[s.shell.language()];
  const most = Math.max(...parts.map((/** @type {Part} */ { adds }) => Math.abs(adds))) || 1;
  let known = "";
  const row = (/** @type {Part} */ part, /** @type {number} */ at) => {
    const [place, what] = names[at];
    const bar = h("span.share", { class: part.adds < 0 ? "share less" : "share", style: share(part.adds, most) });
    const shown = place === known ? "" : place;
    known = place;
    return h(
      "li",
      h("strong", shown),
      h("span", what),
      h("span.track", bar),
      h("span.figures", signed(part.adds)),
      part.heads.length
        ? h("div.heads-of", part.heads.map(head(part)), h("small", `${bias} ${signed(part.bias)}`))
        : null,
    );
  };
  /** @param {Part} part */
  const head = (part) => (/** @type {number} */ adds, /** @type {number} */ number) =>
    h(
      "button",
      {
        onclick: () => open(s, part.layer, number),
        "aria-label": `${names[parts.indexOf(part)][0]}, ${s.t("head")} ${number}: ${signed(adds)}`,
      },
      h("small", number),
      ` ${signed(adds)}`,
    );
  return [
    h(
      "ol.way-parts",
      parts.map(row),
      h(
        "li.total",
        h("strong", "Σ"),
        h("span", sum.replace(/^Σ[,，]?\s*/, "")),
        h("span"),
        h("span.figures", (logit < 0 ? "−" : "") + size(logit)),
      ),
    ),
    notes.map((/** @type {string} */ note) => h("p.aside", note)),
  ];
}

/** A bar from the middle of its track to the right, or to the left where it takes away. @param {number} x @param {number} most */
function share(x, most) {
  const width = (50 * Math.abs(x)) / most;
  return { width: `${Math.max(0.5, width)}%`, "margin-left": `${x < 0 ? 50 - width : 50}%` };
}

/** Shows a head's weights. @param {import("./story.js").Story} s @param {number | null} layer @param {number} head */
function open(s, layer, head) {
  const place = s.page.header.layers.findIndex((/** @type {any} */ each) => each.number === layer);
  s.commit({ layer: place, head, key: -1 });
  /** @type {HTMLElement | null} */ (document.querySelector(".map [data-step=weights]"))?.click(); // the bar may be a new one
}
