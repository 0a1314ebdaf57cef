// A list of bars with names, whose lengths and numbers change.

import { h } from "./dom.js";

/** @param {Child[]} names @param {(x: number) => string} format */
export function barList(names, format) {
  const rows = names.map(() => ({ bar: h("span.share"), figures: h("span.figures") }));
  const items = rows.map(({ bar, figures }, index) => h("li", h("bdi", names[index]), h("span.track", bar), figures));
  return {
    list: h("ol.next", items),
    set: (/** @type {ArrayLike<number>} */ values, most = 1) =>
      rows.forEach(({ bar, figures }, index) => {
        const x = values[index] ?? 0;
        bar.style.width = `${(100 * x) / most}%`;
        figures.textContent = format(x);
      }),
  };
}
