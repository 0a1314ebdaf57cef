// The bar of steps, and moving about the page.

import { byId, h } from "./dom.js";
import { listOf, spelled } from "./numbers.js";

/** @typedef {import("./story.js").Story} Story */
/** @typedef {import("./section.js").Section} Section */

/** The bar that stays at the top: links to the steps, and the choice of layer, batch, head and query. @param {Story} s @param {Section[]} sections @param {(id: string) => void} to */
export function stepMap(s, sections, to) {
  const { t, state, page } = s;
  const go = (/** @type {string} */ id) => (/** @type {Event} */ event) => {
    event.preventDefault();
    to(id);
  };
  const links = sections.map(({ id, symbol }) =>
    h(
      "li",
      h(
        "a",
        {
          href: `#step-${id}`,
          onclick: go(id),
          "data-step": id,
          title: t(id === "output" && s.step("concat") ? "layer output" : id),
        },
        symbol,
      ),
    ),
  );
  const pick = (
    /** @type {string} */ name,
    /** @type {number} */ size,
    /** @type {number} */ now,
    /** @type {(i: number) => string} */ label,
  ) => {
    if (size < 2) return null;
    const set = (/** @type {number} */ value) => {
      s.commit({ [name]: value, key: -1 });
      byId(`pick-${name}`)?.focus();
    };
    const options = listOf(size, (i) => h("option", { value: i, selected: i === now }, label(i)));
    return h(
      "label",
      t(name),
      h(
        "select",
        {
          id: `pick-${name}`,
          onchange: (/** @type {Event} */ event) => set(Number(/** @type {HTMLSelectElement} */ (event.target).value)),
        },
        options,
      ),
    );
  };
  const { layers, edited } = page.header;
  const turn = () => {
    s.commit({ edited: !state.edited });
    byId("pick-edited")?.focus();
  };
  return h(
    "nav.map",
    { "aria-label": t("steps") },
    h("ol", links),
    h(
      "div.picks",
      edited
        ? h(
            "label",
            h("input", { type: "checkbox", role: "switch", id: "pick-edited", checked: state.edited, onchange: turn }),
            t("edited"),
          )
        : null,
      pick("layer", layers.length, state.layer, (i) => String(layers[i].number ?? i)),
      pick("batch", s.layer.batch, state.batch, String),
      pick("head", s.layer.heads, state.head, String),
      pick("query", s.head.n, state.query, (i) =>
        page.header.tokens ? `${i} ${spelled(s.queryName(i), 14)}` : String(i),
      ),
    ),
  );
}

/** Marks the step that is being read. @param {HTMLElement} map @param {Section[]} sections */
export function markCurrentStep(map, sections) {
  const observer = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        for (const link of map.querySelectorAll("a"))
          link.toggleAttribute("aria-current", `step-${link.dataset.step}` === target.id);
        const link = /** @type {HTMLElement | null} */ (map.querySelector("[aria-current]"));
        const list = link?.closest("ol");
        if (link && list) list.scrollLeft = link.offsetLeft - list.clientWidth / 2;
      }
    },
    { rootMargin: "-30% 0px -60% 0px" },
  );
  for (const { element } of sections) observer.observe(element);
}

/** Pointing at an axis's letter highlights it wherever it occurs. @param {HTMLElement} main */
export function highlightDimensions(main) {
  let lit = "";
  main.addEventListener("pointerover", (event) => {
    const dim = /** @type {Element} */ (event.target).closest?.("[data-dim]")?.getAttribute("data-dim") ?? "";
    if (dim === lit) return;
    for (const each of main.querySelectorAll("[data-dim]"))
      each.classList.toggle("lit", dim !== "" && each.getAttribute("data-dim") === dim);
    lit = dim;
  });
}

/** The keyboard's shortcuts. @param {Story} s */
export function bindKeys(s) {
  const { shell, state, page, t } = s;
  if (page.header.edited)
    shell.key("e", () => {
      const focused = document.activeElement?.id ?? "";
      s.commit({ edited: !state.edited });
      byId(focused)?.focus();
      shell.say(t(state.edited ? "edited" : "not edited"));
    });
}
