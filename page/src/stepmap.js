// The bar of steps, and moving about the page.

import { byId, h, select } from "./dom.js";
import { listOf, spelled } from "./numbers.js";

/** Goes to a step; the bar of steps may be a new one. @param {string} step */
export function openStep(step) {
  const link = /** @type {HTMLElement | null} */ (document.querySelector(`.map [data-step=${step}]`));
  link?.click();
}

/** The bar that stays at the top: links to the steps, and the choice of layer, batch, head and query. @param {Story} s @param {Section[]} sections @param {(id: string) => void} to */
export function stepMap(s, sections, to) {
  const { t, state, page } = s;
  const { layers, tokens } = page.header;
  const links = sections.map(({ id, symbol }) => {
    const title = t(id === "output" && s.step("concat") ? "layer output" : id);
    const onclick = (/** @type {Event} */ event) => {
      event.preventDefault();
      to(id);
    };
    return h("li", h("a", { href: `#step-${id}`, onclick, "data-step": id, title }, symbol));
  });
  /** @param {"layer" | "batch" | "head" | "query"} name @param {number} size @param {(i: number) => string} label */
  const pick = (name, size, label) => {
    if (size < 2) return null;
    const set = (/** @type {string} */ value) => {
      s.commit({ [name]: Number(value), key: -1 });
      byId(`pick-${name}`)?.focus();
    };
    const there = listOf(size, (i) => i).filter((i) => name !== "layer" || layers[i].arrays.q);
    const options = there.map((i) => [i, label(i)]);
    return h("label", t(name), select(`pick-${name}`, options, state[name], set));
  };
  return h(
    "nav.map",
    { "aria-label": t("steps") },
    h("ol", links),
    h(
      "div.picks",
      pick("layer", layers.length, (i) => String(layers[i].number ?? i)),
      pick("batch", s.layer.batch, String),
      pick("head", s.layer.heads, String),
      pick("query", s.head.n, (i) => (tokens ? `${i} ${spelled(s.queryName(i), 14)}` : String(i))),
    ),
  );
}

/** Marks the step that is being read. @param {HTMLElement} map @param {Section[]} sections */
export function markCurrentStep(map, sections) {
  const mark = (/** @type {IntersectionObserverEntry[]} */ entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      for (const link of map.querySelectorAll("a"))
        link.toggleAttribute("aria-current", `step-${link.dataset.step}` === target.id);
      const link = /** @type {HTMLElement | null} */ (map.querySelector("[aria-current]"));
      const list = link?.closest("ol");
      if (link && list) list.scrollLeft = link.offsetLeft - list.clientWidth / 2;
    }
  };
  const observer = new IntersectionObserver(mark, { rootMargin: "-30% 0px -60% 0px" });
  for (const { element } of sections) observer.observe(element);
}
