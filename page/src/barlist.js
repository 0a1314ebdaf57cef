// A list of bars with names, whose lengths and numbers change.

import { h } from "./dom.js";

/** @param {import("./dom.js").Child[]} names @param {(x: number) => string} told */
export function barList(names, told) {
  const rows = names.map((name) => ({ name, bar: h("span.share"), figures: h("span.figures") }));
  return {
    list: h(
      "ol.next",
      rows.map(({ name, bar, figures }) => h("li", h("bdi", name), h("span.track", bar), figures)),
    ),
    set: (/** @type {ArrayLike<number>} */ values, most = 1) =>
      rows.forEach(({ bar, figures }, at) => {
        const x = values[at] ?? 0;
        bar.style.width = `${(100 * x) / most}%`;
        figures.textContent = told(x);
      }),
  };
}
