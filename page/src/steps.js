// The page of steps: from X to the output, one step after the other, all drawn from one state.

import { causes } from "./causes.js";
import { byId, h } from "./dom.js";
import { opening } from "./opening.js";
import { bindKeys, highlightDimensions, markCurrentStep, stepMap } from "./stepmap.js";
import { sectionsOf } from "./stepsections.js";
import { begin, makeStory } from "./story.js";
import { ribbon } from "./whatif.js";

/** @typedef {import("./story.js").State} State */

const RESTS = 120; // milliseconds after which the steps follow a pointer on the map

/** @param {import("./container.js").Page} page @param {import("./place.js").Place} place @returns {(shell: import("./shell.js").Shell, host: HTMLElement) => void} */
export function openStory(page, place) {
  const { runs } = page.header;
  const state = begin(page, place);
  const runOf = () =>
    Math.max(
      0,
      runs.findIndex((/** @type {any} */ run) => run.edited === state.edited && run.batch === state.batch),
    );
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
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let resting;
  let goToPlace = () => {};
  let first = true;
  addEventListener("hashchange", () => goToPlace());
  return function draw(shell, host) {
    observer?.disconnect();
    clearTimeout(later);
    clearTimeout(resting);
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
    const room = host.clientWidth - 2 * (host.clientWidth < 640 ? 14 : 32);
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
    const why = causes(story);
    const own = sectionsOf(story);
    const sections = [...why, ...own];
    byId("causes")?.replaceChildren(...why.map(({ element }) => element));
    const map = stepMap(story, sections, go);
    const band = h("div.band");
    host.replaceChildren(map, opening(story), ...own.map(({ element }) => element), band);
    const updateBand = () => band.replaceChildren(...[ribbon(story)].flatMap((made) => made ?? []));
    updateBand();
    for (const [element, draw] of waiting) if (shell.printing() || visited.has(element.id)) draw();
    markCurrentStep(map, sections);
    highlightDimensions(host);
    bindKeys(story);
    place.follow("steps", ({ chosen: { run, layer, head, query, key }, what }) => {
      const { edited, batch } = runs[run] ?? state;
      const wanted = { edited, batch, layer, head, query: query < 0 ? story.head.n - 1 : query, key, what };
      const onlyCell = edited === state.edited && batch === state.batch && layer === state.layer && head === state.head;
      clearTimeout(resting);
      if (onlyCell && what === state.what) resting = setTimeout(() => change(wanted), RESTS);
      else change(wanted);
    });
    goToPlace = () => location.hash.startsWith("#step-") && go(location.hash.replace("#step-", ""));
    if (first && location.hash) {
      const followed = new ResizeObserver(() => goToPlace()); // the rooms above are drawn later, and push the steps down
      if (host.previousElementSibling) followed.observe(host.previousElementSibling);
      for (const act of ["wheel", "pointerdown", "keydown"])
        addEventListener(act, () => followed.disconnect(), { once: true });
    }
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

    /** @param {Partial<State>} wanted */
    function commit(wanted) {
      const { what } = state;
      clearTimeout(resting); // what the pointer meant on the map is older than this
      change(wanted);
      const { layer, head, query, key } = state;
      place.choose("steps", { run: runOf(), layer, head, query, key });
      if (state.what !== what) place.suppose("steps", state.what);
    }

    /** @param {Partial<State>} change */
    function change(change) {
      const differs = (/** @type {(keyof State)[]} */ ...names) =>
        names.some((name) => name in change && change[name] !== state[name]);
      if (differs("layer", "batch", "edited")) {
        Object.assign(state, change);
        const { scrollY } = window;
        draw(shell, host);
        return window.scrollTo({ top: scrollY, behavior: "instant" });
      }
      const [supposed, otherHead] = [differs("what"), differs("head")];
      if (!supposed && !otherHead && !differs("query", "key", "feature")) return;
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
