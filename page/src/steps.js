// The page of steps: from X to the output, one step after the other, all drawn from one state.

import { causes } from "./causes.js";
import { byId, h } from "./dom.js";
import { opening } from "./opening.js";
import { bindKeys, highlightDimensions, markCurrentStep, stepMap } from "./stepmap.js";
import { sectionsOf } from "./stepsections.js";
import { begin, makeStory } from "./story.js";
import { ribbon } from "./whatif.js";

/** @typedef {import("./story.js").State} State */

/** @param {import("./container.js").Page} page @returns {(shell: import("./shell.js").Shell) => void} */
export function openStory(page) {
  const state = begin(page);
  /** @type {IntersectionObserver | undefined} */
  let observer;
  /** @type {Map<Element, () => void>} */
  let waiting = new Map();
  /** @type {Set<string>} steps that have been in view: they are drawn at once when the page is redrawn, so that nothing moves */
  const visited = new Set();
  /** @type {Set<Element>} */
  const inView = new Set();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let later;
  let goToPlace = () => {};
  let first = true;
  addEventListener("hashchange", () => goToPlace());
  return (shell) => {
    observer?.disconnect();
    clearTimeout(later);
    waiting = new Map();
    inView.clear();
    const onIntersection = (/** @type {IntersectionObserverEntry[]} */ entries) => {
      for (const { isIntersecting, target } of entries) {
        inView[isIntersecting ? "add" : "delete"](target);
        if (!isIntersecting) continue;
        visited.add(target.id);
        waiting.get(target)?.();
      }
    };
    observer = new IntersectionObserver(onIntersection, { rootMargin: "600px" });
    const room = shell.main.clientWidth - 2 * (shell.main.clientWidth < 640 ? 14 : 32);
    const story = makeStory(
      page,
      shell,
      state,
      room,
      (element, draw) => {
        waiting.set(element, draw);
        observer?.observe(element);
      },
      commit,
    );
    const sections = [...causes(story), ...sectionsOf(story)];
    const map = stepMap(story, sections, go);
    const band = h("div.band");
    shell.main.append(map, opening(story), ...sections.map(({ element }) => element), band);
    const updateBand = () => band.replaceChildren(...[ribbon(story)].flatMap((made) => made ?? []));
    updateBand();
    for (const [element, draw] of waiting) if (shell.printing() || visited.has(element.id)) draw();
    markCurrentStep(map, sections);
    highlightDimensions(shell.main);
    bindKeys(story);
    goToPlace = () => go(location.hash.replace("#step-", ""));
    if (first && location.hash) goToPlace();
    first = false;

    /** Scrolls to a step. Figures above it have no height until they are drawn, so all are drawn first. @param {string} id */
    function go(id) {
      const step = byId(`step-${id}`);
      if (!step) return;
      for (const { draw } of sections) draw();
      document.documentElement.style.scrollPaddingTop = `${map.offsetHeight}px`;
      step.scrollIntoView();
      byId(`step-${id}-title`)?.focus({ preventScroll: true });
      putHash(`#step-${id}`);
    }

    /** @param {Partial<State>} change */
    function commit(change) {
      const differs = (/** @type {(keyof State)[]} */ ...names) =>
        names.some((name) => name in change && change[name] !== state[name]);
      if (differs("layer", "batch", "edited")) {
        Object.assign(state, change);
        return shell.redraw();
      }
      const [supposed, otherHead] = [differs("what"), differs("head")];
      const anchor = document.querySelector(".figure:hover") ?? document.activeElement;
      const before = anchor?.getBoundingClientRect().top ?? 0;
      Object.assign(state, change);
      if (supposed || otherHead) story.refresh(supposed);
      story.chooseKey();
      if (supposed || otherHead) for (const { outdate } of sections) outdate();
      for (const { element, draw, update } of sections) {
        update();
        if (inView.has(element)) draw();
      }
      updateBand();
      for (const name of /** @type {const} */ (["head", "query"])) {
        const pick = /** @type {HTMLSelectElement | null} */ (byId(`pick-${name}`));
        if (pick) pick.value = String(state[name]);
      }
      for (const [i, token] of [...shell.main.querySelectorAll(".tokens button")].entries())
        token.setAttribute("aria-pressed", String(i === state.query));
      const now =
        (anchor?.isConnected ? anchor : document.querySelector(".figure:hover"))?.getBoundingClientRect().top ?? before;
      if (now !== before) window.scrollBy({ top: now - before, behavior: "instant" }); // so that the figure under the pointer stays there
      clearTimeout(later);
      later = setTimeout(redrawRest);
    }

    /** Redraws the steps that are out of view, one at a time. */
    function redrawRest() {
      const next = sections.find(({ stale }) => stale());
      next?.draw();
      if (next) later = setTimeout(redrawRest);
    }
  };
}

/** Puts a step into the page's address, where the page has one. @param {string} hash */
function putHash(hash) {
  try {
    history.replaceState(null, "", hash);
  } catch {
    // a frame without an address: nothing to do
  }
}
