// The likeliest next words of the live run, as bars that move from where they were.

import { h } from "../dom.js";
import { likeliest } from "../model/forward.js";
import { percent, spelled } from "../numbers.js";

const WORDS = 8;

/** @param {(word: string) => void} append      called with the word that is clicked */
export function nextWords(append) {
  const element = h("ol.next", { id: "try-next" });

  /** @param {number} id @param {string} word @param {number} logit @param {number} share @param {number | undefined} was */
  function row(id, word, logit, share, was) {
    const bar = h("span.share", { style: { width: `${100 * share}%` } });
    const mark = was === undefined ? null : h("span.was", { style: { left: `${100 * was}%` }, title: percent(was) });
    const name = h("button", { onclick: () => append(word) }, h("bdi", spelled(word)));
    const exact = { "data-id": id, "data-logit": logit };
    return { bar, item: h("li", exact, name, h("span.track", bar, mark), h("span.figures", percent(share))) };
  }

  return {
    element,
    /** @param {Float32Array} logits @param {Float32Array | null} before      probabilities where nothing is changed @param {(id: number) => string} text */
    show(logits, before, text) {
      const old = [...element.querySelectorAll(".share")].map((bar) => /** @type {HTMLElement} */ (bar).style.width);
      const rows = likeliest(logits, WORDS).map(({ id, share }) => row(id, text(id), logits[id], share, before?.[id]));
      element.replaceChildren(...rows.map(({ item }) => item));
      rows.forEach(({ bar }, place) => {
        const to = bar.style.width;
        bar.style.width = old[place] ?? to;
        requestAnimationFrame(() => (bar.style.width = to));
      });
    },
  };
}
