// The explaining page: from X to the output, one idea at a time. One query first, then the matrices.

import { byId, h } from "./dom.js";
import { listOf, spelled } from "./numbers.js";
import { oneQuery } from "./onequery.js";
import { closing, opening } from "./opening.js";
import { beforeMask, bentScenes, concatScenes, inputScenes, insideSoftmax, maskedScenes, mixedScenes, outputScenes, scoreScenes, weightScenes } from "./scenes.js";
import { section } from "./section.js";
import { begin, makeStory } from "./story.js";
import { maskControl, ribbon, scaleControl, temperatureControl } from "./whatif.js";

/** @typedef {import("./story.js").Story} Story */
/** @typedef {import("./story.js").State} State */
/** @typedef {import("./section.js").Section} Section */

/** @param {import("./container.js").Page} page @returns {(shell: import("./shell.js").Shell) => void} */
export function openStory(page) {
  const state = begin(page);
  /** @type {IntersectionObserver | undefined} */
  let watcher;
  /** @type {Map<Element, () => void>} */
  let waiting = new Map();
  /** @type {Set<string>} what has been looked at stays drawn, so that nothing moves when the page is drawn anew */
  const looked = new Set();
  /** @type {Set<Element>} */
  const near = new Set();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let later;
  let goToPlace = () => {};
  let first = true;
  addEventListener("hashchange", () => goToPlace());
  return (shell) => {
    watcher?.disconnect();
    clearTimeout(later);
    waiting = new Map();
    near.clear();
    const seen = (/** @type {IntersectionObserverEntry[]} */ entries) => {
      for (const { isIntersecting, target } of entries) {
        near[isIntersecting ? "add" : "delete"](target);
        if (!isIntersecting) continue;
        looked.add(target.id);
        waiting.get(target)?.();
      }
    };
    watcher = new IntersectionObserver(seen, { rootMargin: "600px" });
    const room = shell.main.clientWidth - 2 * (shell.main.clientWidth < 640 ? 14 : 32);
    const story = makeStory(page, shell, state, room, (element, draw) => {
      waiting.set(element, draw);
      watcher?.observe(element);
    }, commit);
    const sections = sectionsOf(story);
    const map = stepMap(story, sections, go);
    const band = h("div.band");
    shell.main.append(map, opening(story), ...sections.map(({ element }) => element), band);
    const tellBand = () => band.replaceChildren(...[ribbon(story)].flatMap((made) => made ?? []));
    tellBand();
    for (const [element, draw] of waiting) if (shell.printing() || looked.has(element.id)) draw();
    follow(map, sections);
    lightDimensions(shell.main);
    keys(story);
    goToPlace = () => go(location.hash.replace("#step-", ""));
    if (first && location.hash) goToPlace();
    first = false;

    /** To a step. Figures above it have no height until they are drawn, so all are drawn first. @param {string} id */
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
      const differs = (/** @type {(keyof State)[]} */ ...names) => names.some((name) => name in change && change[name] !== state[name]);
      if (differs("layer", "batch")) {
        Object.assign(state, change);
        return shell.redraw();
      }
      const [supposed, other] = [differs("what"), differs("head")];
      const anchor = document.querySelector(".figure:hover") ?? document.activeElement;
      const before = anchor?.getBoundingClientRect().top ?? 0;
      Object.assign(state, change);
      if (supposed || other) story.refresh(supposed);
      story.aim();
      if (supposed || other) for (const { outdate } of sections) outdate();
      for (const { element, draw, update } of sections) {
        update();
        if (near.has(element)) draw();
      }
      tellBand();
      for (const name of /** @type {const} */ (["head", "query"])) {
        const pick = /** @type {HTMLSelectElement | null} */ (byId(`pick-${name}`));
        if (pick) pick.value = String(state[name]);
      }
      for (const [i, token] of [...shell.main.querySelectorAll(".tokens button")].entries()) token.setAttribute("aria-pressed", String(i === state.query));
      const now = (anchor?.isConnected ? anchor : document.querySelector(".figure:hover"))?.getBoundingClientRect().top ?? before;
      if (now !== before) window.scrollBy({ top: now - before, behavior: "instant" }); // what is pointed at stays under the pointer
      clearTimeout(later);
      later = setTimeout(catchUp);
    }

    /** What is out of sight follows, one step at a time. */
    function catchUp() {
      const next = sections.find(({ stale }) => stale());
      next?.draw();
      if (next) later = setTimeout(catchUp);
    }
  };
}

/** The address of a step; a frame without an address has none. @param {string} hash */
function putHash(hash) {
  try {
    history.replaceState(null, "", hash);
  } catch {
    // the page is shown all the same
  }
}

/** @param {Story} s @returns {Section[]} */
function sectionsOf(s) {
  const { t } = s;
  const formulaOf = (/** @type {string} */ name) => [s.step(name)?.formula].filter(Boolean);
  const plainly = (/** @type {string} */ symbol) => symbol.replace("′", "'");
  const plain = (/** @type {string} */ id, /** @type {string} */ symbol, /** @type {() => import("./section.js").Scene[]} */ scenes, /** @type {any} */ more = {}) =>
    section(s, { id, symbol, title: t(id), says: () => s.words(id), formulas: () => formulaOf(id), scenes, ...more });
  const whole = s.step("concat");
  const last = whole ? "heads" : "output";
  const projected = s.named("x");
  const found = [
    section(s, {
      id: "qkv",
      symbol: projected ? "X→QKV" : "QKV",
      title: t("qkv"),
      says: () => t(projected ? "project" : "given qkv"),
      formulas: () => (projected ? ["q", "k", "v"].flatMap(formulaOf) : []),
      scenes: () => inputScenes(s),
    }),
    section(s, { id: "one", symbol: `q → o`, title: t("one"), says: () => t("one says", { token: spelled(s.queryName(s.state.query)) }), body: () => oneQuery(s), ofCell: true }),
    plain("scores", "S", () => scoreScenes(s)),
    plain("scaled", "S′", () => bentScenes(s, "scaled"), { controls: () => scaleControl(s), says: () => (s.state.what.scale ? s.words(formulaOf("scaled")[0].includes("√") ? "scaled" : "scaled by") : t("what if scale")), formulas: () => (s.state.what.scale ? formulaOf("scaled") : ["S' = S"]) }),
  ];
  for (const [name, symbol] of [["capped", "C"], ["biased", "B"]]) if (s.step(name)) found.push(plain(name, symbol, () => bentScenes(s, name)));
  const masking = () => (s.hidden ? [s.state.what.causal === null && s.state.what.window === null && s.step("masked")?.formula || `M = ${plainly(beforeMask(s))}, -∞ where forbidden`] : []);
  const softmax = () => formulaOf("weights").map((text) => text.replace(/(softmax\(\[?)[A-Z]'?/, (/** @type {string} */ _, /** @type {string} */ start) => start + plainly(insideSoftmax(s))));
  found.push(
    plain("masked", "M", () => maskedScenes(s), { controls: () => maskControl(s), says: () => (s.hidden ? s.words("masked") : t("nothing masked")), formulas: masking }),
    plain("weights", "A", () => weightScenes(s), { controls: () => temperatureControl(s), title: t(s.columns ? "weights columns" : "weights"), says: () => s.words(s.head.rules.sink === -Infinity ? "weights" : "weights with sink"), formulas: softmax }),
    plain(last, "O", () => outputScenes(s)),
  );
  if (whole) {
    found.push(plain("concat", "H", () => concatScenes(s)));
    found.push(section(s, { id: "output", symbol: "U", title: t("layer output"), says: () => s.words("layer output"), formulas: () => formulaOf("output"), scenes: () => mixedScenes(s) }));
  }
  found.push(section(s, { id: "checked", symbol: "✓", title: t("checked"), says: () => "", body: () => closing(s) }));
  return found;
}

/** The small map that stays: every step, and whose attention is looked at. @param {Story} s @param {Section[]} sections @param {(id: string) => void} to */
function stepMap(s, sections, to) {
  const { t, state, page } = s;
  const go = (/** @type {string} */ id) => (/** @type {Event} */ event) => {
    event.preventDefault();
    to(id);
  };
  const links = sections.map(({ id, symbol }) => h("li", h("a", { href: `#step-${id}`, onclick: go(id), "data-step": id, title: t(id === "output" && s.step("concat") ? "layer output" : id) }, symbol)));
  const pick = (/** @type {string} */ name, /** @type {number} */ size, /** @type {number} */ now, /** @type {(i: number) => string} */ label) => {
    if (size < 2) return null;
    const set = (/** @type {number} */ value) => {
      s.commit({ [name]: value, key: -1 });
      byId(`pick-${name}`)?.focus();
    };
    const options = listOf(size, (i) => h("option", { value: i, selected: i === now }, label(i)));
    return h("label", t(name), h("select", { id: `pick-${name}`, onchange: (/** @type {Event} */ event) => set(Number(/** @type {HTMLSelectElement} */ (event.target).value)) }, options));
  };
  const { layers } = page.header;
  return h("nav.map", { "aria-label": t("steps") },
    h("ol", links),
    h("div.picks",
      pick("layer", layers.length, state.layer, (i) => String(layers[i].number ?? i)),
      pick("batch", s.layer.batch, state.batch, String),
      pick("head", s.layer.heads, state.head, String),
      pick("query", s.head.n, state.query, (i) => (page.header.tokens ? `${i} ${spelled(s.queryName(i), 14)}` : String(i))),
    ),
  );
}

/** Marks the step that is being read. @param {HTMLElement} map @param {Section[]} sections */
function follow(map, sections) {
  const watcher = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      for (const link of map.querySelectorAll("a")) link.toggleAttribute("aria-current", `step-${link.dataset.step}` === target.id);
      const link = /** @type {HTMLElement | null} */ (map.querySelector("[aria-current]"));
      const list = link?.closest("ol");
      if (link && list) list.scrollLeft = link.offsetLeft - list.clientWidth / 2;
    }
  }, { rootMargin: "-30% 0px -60% 0px" });
  for (const { element } of sections) watcher.observe(element);
}

/** Pointing at an axis' letter lights it wherever it occurs. @param {HTMLElement} main */
function lightDimensions(main) {
  let lit = "";
  main.addEventListener("pointerover", (event) => {
    const dim = /** @type {Element} */ (event.target).closest?.("[data-dim]")?.getAttribute("data-dim") ?? "";
    if (dim === lit) return;
    for (const each of main.querySelectorAll("[data-dim]")) each.classList.toggle("lit", dim !== "" && each.getAttribute("data-dim") === dim);
    lit = dim;
  });
}

/** @param {Story} s */
function keys(s) {
  const { shell, state, page, t } = s;
  const { layers } = page.header;
  const turn = (/** @type {string} */ key, /** @type {"head" | "layer"} */ name, /** @type {number} */ by, /** @type {number} */ size) =>
    shell.key(key, () => {
      s.commit({ [name]: (state[name] + by + size) % size, key: -1 });
      shell.say(`${t("layer")} ${layers[state.layer].number ?? state.layer}, ${t("head")} ${state.head}`);
    });
  turn("[", "head", -1, s.layer.heads);
  turn("]", "head", 1, s.layer.heads);
  turn("{", "layer", -1, layers.length);
  turn("}", "layer", 1, layers.length);
  shell.key("/", () => byId("pick-query")?.focus());
}
