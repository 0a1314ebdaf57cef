// The page of steps: from X to the output, one step after the other, all drawn from one state.

import { stepHere, toStep } from "./address.js";
import { byId } from "./dom.js";
import { opening } from "./opening.js";
import { load } from "./packed.js";
import { markCurrentStep, stepMap } from "./stepmap.js";
import { sectionsOf } from "./stepsections.js";
import { begin, makeStory } from "./story.js";
import { watchSteps } from "./stepwatch.js";

const SOON = 2 ** 25; // bytes: of a smaller page all layers are unpacked at once
const RESTS = 120; // milliseconds after which the steps follow a pointer on the map

/** @typedef {{story: Story, sections: Section[], map: HTMLElement, redraw: () => void}} Drawn */

/** @param {Page} page @param {Place} place @returns {(shell: Shell, host: HTMLElement) => void} */
export function openStory(page, place) {
  const { runs } = page.header;
  const state = begin(place);
  const watch = watchSteps();
  /** @type {Drawn | null} */
  let drawn = null;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let resting;
  const goToPlace = () => drawn && stepHere() && go(drawn, /** @type {string} */ (stepHere()));
  addEventListener("hashchange", goToPlace);

  const has = (/** @type {number} */ layer) => Boolean(page.header.layers[layer].arrays.q); // a long text's page has few

  /** What the pointer meant on the map is older than this. @param {Partial<State>} wanted */
  const commit = (wanted) => {
    const { layer: to = state.layer, head: by = state.head } = wanted;
    if (!has(to)) return place.choose("", { layer: to, head: by, key: -1 });
    clearTimeout(resting);
    if (drawn) change(drawn, watch, wanted);
    const { layer, head, query, key, batch } = state;
    const run = runs.findIndex((/** @type {any} */ each) => each.batch === batch);
    place.choose("steps", { run: Math.max(0, run), layer, head, query, key });
  };
  const follow = (/** @type {Place} */ { chosen: { run, layer, head, query, key } }) => {
    if (!drawn || !has(layer)) return;
    const shown = drawn;
    const { batch } = runs[run] ?? state;
    const wanted = {
      batch,
      layer,
      head,
      query: query < 0 ? shown.story.head.n - 1 : query,
      key,
      version: page.version,
    };
    clearTimeout(resting);
    const elsewhere = differs(state, wanted, "batch", "layer", "head", "version");
    if (elsewhere) change(shown, watch, wanted);
    else resting = setTimeout(() => change(shown, watch, wanted), RESTS);
  };

  return function draw(shell, host) {
    const { arrays, layers } = page.header;
    const size = Object.values(arrays).reduce((sum, { packed = 0 }) => sum + packed, 0);
    const wanted = size < SOON ? layers : [layers[state.layer]];
    const claimed = Object.keys(arrays).filter((name) => name.startsWith("claimed."));
    const names = [...wanted.flatMap((/** @type {any} */ each) => Object.values(each.arrays)), ...claimed];
    const missing = names.filter((name) => arrays[name].packed !== undefined && !page.known(name));
    if (missing.length) return void Promise.all(missing.map((name) => load(page, name))).then(() => draw(shell, host));
    const first = !drawn;
    Object.assign(state, { version: page.version, query: Math.min(state.query, layers[state.layer].queries - 1) });
    clearTimeout(resting);
    watch.restart();
    const wide = Math.min(1144, shell.main.clientWidth); // the host may be folded
    const room = wide - 2 * (wide < 640 ? 14 : 32);
    const story = makeStory(page, shell, state, room, watch.whenSeen, commit);
    const sections = sectionsOf(story);
    const map = stepMap(story, sections, (id) => drawn && go(drawn, id));
    drawn = { story, sections, map, redraw: () => draw(shell, host) };
    host.replaceChildren(map, opening(story), ...sections.map(({ element }) => element));
    watch.drawVisited(shell.printing());
    markCurrentStep(map, sections);
    place.follow("steps", follow);
    if (first && location.hash) followUntilUsed([...shell.main.children], goToPlace);
  };
}

/** Goes to the address's step again whenever what stands above it grows, until the reader does something. @param {Element[]} above @param {() => void} go */
function followUntilUsed(above, go) {
  const observer = new ResizeObserver(() => go());
  for (const each of above) observer.observe(each);
  for (const act of ["wheel", "pointerdown", "keydown"])
    addEventListener(act, () => observer.disconnect(), { once: true });
}

/** Scrolls to a step. Figures above it have no height until they are drawn, so all are drawn first. @param {Drawn} drawn @param {string} id */
function go({ sections, map }, id) {
  const step = byId(`step-${id}`);
  if (!step) return;
  step.closest("details")?.setAttribute("open", "");
  for (const { draw } of sections) draw();
  document.documentElement.style.scrollPaddingTop = `${map.offsetHeight}px`;
  step.scrollIntoView();
  byId(`step-${id}-title`)?.focus({ preventScroll: true });
  toStep(id);
}

/** Whether a change is one of any of these. @param {State} state @param {Partial<State>} change @param {...keyof State} names */
const differs = (state, change, ...names) => names.some((name) => name in change && change[name] !== state[name]);

/** @param {Drawn} drawn @param {ReturnType<typeof watchSteps>} watch @param {Partial<State>} wanted */
function change(drawn, watch, wanted) {
  const { story, sections } = drawn;
  const { state } = story;
  if (differs(state, wanted, "layer", "batch")) {
    Object.assign(state, wanted);
    const { scrollY } = window;
    drawn.redraw();
    return window.scrollTo({ top: scrollY, behavior: "instant" });
  }
  const [anew, otherHead] = [differs(state, wanted, "version"), differs(state, wanted, "head")];
  if (!anew && !otherHead && !differs(state, wanted, "query", "key", "feature")) return;
  const anchor = document.querySelector(".figure:hover") ?? document.activeElement;
  const before = anchor?.getBoundingClientRect().top ?? 0;
  Object.assign(state, wanted);
  if (anew || otherHead) story.refresh(anew);
  story.chooseKey();
  if (anew || otherHead) for (const { outdate } of sections) outdate();
  for (const { element, draw, update } of sections) {
    update();
    if (watch.inView.has(element)) draw();
  }
  for (const name of /** @type {const} */ (["head", "query"])) {
    const pick = /** @type {HTMLSelectElement | null} */ (byId(`pick-${name}`));
    if (pick) pick.value = String(state[name]);
  }
  const moved = anchor?.isConnected ? anchor : document.querySelector(".figure:hover");
  const now = moved?.getBoundingClientRect().top ?? before;
  if (now !== before) window.scrollBy({ top: now - before, behavior: "instant" }); // so that the figure under the pointer stays there
}
