// The page of steps: from X to the output, one step after the other, all drawn from one state; a step is drawn when it
// comes near the view.

import { stepHere, toStep } from "./address.js";
import { byId, h, paper, scrollWithin, select } from "./dom.js";
import { listOf, spelled } from "./numbers.js";
import { load } from "./container.js";
import { isFolded } from "./long/look.js";
import { sectionsOf, sizesOf } from "./stepsections.js";
import { makeStory } from "./story.js";

const SOON = 2 ** 25; // bytes: of a smaller page all layers are unpacked at once

/** @typedef {{story: Story, sections: Section[], map: HTMLElement, redraw: () => void}} Drawn */

/** @param {Page} page @param {Place} place @returns {(shell: Shell, host: HTMLElement) => void} */
export function openStory(page, place) {
  const { runs } = page.header;
  const { layer, head, query, key } = place.chosen;
  /** @type {State} */
  const state = { layer, batch: 0, head, query, key, feature: 0, next: -1, less: -1, version: 0 };
  let visited = false; // then all steps are drawn at once when the page is redrawn, so that nothing moves
  /** @type {Set<Element>} */
  const inView = new Set();
  /** @type {Drawn | null} */
  let drawn = null;
  const goToPlace = (/** @type {ScrollBehavior} */ behavior) =>
    drawn && stepHere() && go(drawn, /** @type {string} */ (stepHere()), behavior);
  addEventListener("hashchange", () => goToPlace("auto"));
  const near = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        inView[isIntersecting ? "add" : "delete"](target);
        visited ||= isIntersecting;
        if (isIntersecting) drawn?.sections.find(({ element }) => element === target)?.draw();
      }
    },
    { rootMargin: "600px" },
  );
  const has = (/** @type {number} */ layer) => Boolean(page.header.layers[layer].arrays.q); // a long text's page has few

  /** Follows the chosen place; `wanted`: also what the steps alone know. @param {Partial<State>} [wanted] */
  const follow = (wanted) => {
    const { run, layer, head, query, key } = place.chosen;
    if (!drawn || !has(layer) || isFolded(drawn.map)) return; // unfolded, they follow what came meanwhile
    const { batch } = runs[run] ?? state;
    const at = query < 0 ? drawn.story.head.n - 1 : query;
    change(drawn, inView, { batch, layer, head, query: at, key, version: page.version, ...wanted });
  };
  const commit = (/** @type {Partial<State>} */ wanted) => {
    const { batch = state.batch, feature = state.feature, ...chosen } = wanted;
    const run = runs.findIndex((each) => each.batch === batch);
    place.choose("steps", { ...chosen, run: Math.max(0, run) });
    follow({ batch, feature });
  };

  return function draw(shell, host) {
    const { arrays, layers } = page.header;
    const size = Object.values(arrays).reduce((sum, { packed }) => sum + packed, 0);
    const wanted = size < SOON ? layers : [layers[state.layer]];
    /** @type {string[]} */
    const names = wanted.flatMap((/** @type {any} */ each) => Object.values(each.arrays));
    const missing = names.filter((name) => !page.array(name));
    if (missing.length) return void Promise.all(missing.map((name) => load(page, name))).then(() => draw(shell, host));
    const first = !drawn;
    Object.assign(state, { version: page.version, query: Math.min(state.query, layers[state.layer].queries - 1) });
    near.disconnect();
    inView.clear();
    const wide = Math.min(paper.printing ? 616 : 1144, shell.main.clientWidth); // the host may be folded
    const story = makeStory(page, shell, state, wide - 2 * (wide < 640 ? 14 : 32), commit);
    const sections = sectionsOf(story);
    const map = stepMap(story, sections, (id) => drawn && go(drawn, id));
    drawn = { story, sections, map, redraw: () => draw(shell, host) };
    host.replaceChildren(map, sizesOf(story), ...sections.map(({ element }) => element));
    for (const { element, draw } of sections) {
      near.observe(element);
      if (paper.printing || visited) draw();
    }
    markCurrentStep(map, sections);
    place.follow("steps", () => follow());
    if (first) goToPlace("instant"); // the browser then keeps it in place while what stands above grows
  };
}

/** Scrolls to a step. Figures above it have no height until they are drawn, so all are drawn first. @param {Drawn} drawn @param {string} id @param {ScrollBehavior} [behavior] */
function go({ sections, map }, id, behavior) {
  const step = byId(`step-${id}`);
  if (!step) return;
  step.closest("details")?.setAttribute("open", "");
  for (const { draw } of sections) draw();
  document.documentElement.style.scrollPaddingTop = `${map.offsetHeight}px`;
  step.scrollIntoView({ behavior });
  byId(`step-${id}-title`)?.focus({ preventScroll: true });
  toStep(id);
}

/** Whether a change is one of any of these. @param {State} state @param {Partial<State>} change @param {...keyof State} names */
const differs = (state, change, ...names) => names.some((name) => name in change && change[name] !== state[name]);

/** @param {Drawn} drawn @param {Set<Element>} inView @param {Partial<State>} wanted */
function change({ story, sections, redraw }, inView, wanted) {
  const { state } = story;
  if (differs(state, wanted, "layer", "batch")) {
    Object.assign(state, wanted);
    const { scrollY } = window;
    redraw();
    return window.scrollTo({ top: scrollY, behavior: "instant" });
  }
  const anew = differs(state, wanted, "version");
  const other = anew || differs(state, wanted, "head");
  if (!other && !differs(state, wanted, "query", "key", "feature")) return;
  Object.assign(state, wanted);
  story.follow(other, anew);
  for (const { element, draw, update, outdate } of sections) {
    if (other) outdate();
    update();
    if (inView.has(element)) draw();
  }
  for (const name of /** @type {const} */ (["head", "query"])) {
    const pick = /** @type {HTMLSelectElement | null} */ (byId(`pick-${name}`));
    if (pick) pick.value = String(state[name]);
  }
}

/** The bar that stays at the top: links to the steps, and the choice of layer, batch, head and query. @param {Story} s @param {Section[]} sections @param {(id: string) => void} to */
function stepMap(s, sections, to) {
  const { t, state, page } = s;
  const { layers, tokens } = page.header;
  const links = sections.map(({ id, symbol, element }) => {
    const title = element.querySelector("h2")?.textContent;
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
    const options = listOf(size, (i) => [i, label(i)]).filter((_, i) => name !== "layer" || layers[i].arrays.q);
    return h("label", t(name), select(`pick-${name}`, options, state[name], set));
  };
  const picks = [
    pick("layer", layers.length, (i) => String(layers[i].number ?? i)),
    pick("batch", s.layer.batch, String),
    pick("head", s.layer.heads, String),
    pick("query", s.head.n, (i) => (tokens ? `${i} ${spelled(s.queryName(i), 14)}` : String(i))),
  ];
  return h("nav.map", { "aria-label": t("steps") }, h("ol", links), h("div.picks", picks));
}

/** Marks the step that is being read. @param {HTMLElement} map @param {Section[]} sections */
function markCurrentStep(map, sections) {
  const mark = (/** @type {IntersectionObserverEntry[]} */ entries) => {
    const read = entries.find(({ isIntersecting }) => isIntersecting)?.target.id;
    if (!read) return;
    for (const link of map.querySelectorAll("a"))
      link.toggleAttribute("aria-current", `step-${link.dataset.step}` === read);
    scrollWithin(map.querySelector("ol"), map.querySelector("[aria-current]"));
  };
  const observer = new IntersectionObserver(mark, { rootMargin: "-30% 0px -60% 0px" });
  for (const { element } of sections) observer.observe(element);
}
