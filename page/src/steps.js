// The explaining page: from X to the output, one idea at a time. One query first, then the matrices.

import { byId, h } from "./dom.js";
import { isAsRun } from "./head.js";
import { listOf, spelled } from "./numbers.js";
import { oneQuery } from "./onequery.js";
import { closing, opening } from "./opening.js";
import { bentScenes, concatScenes, inputScenes, maskedScenes, mixedScenes, outputScenes, scoreScenes, weightScenes } from "./scenes.js";
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
  return (shell) => {
    watcher?.disconnect();
    waiting = new Map();
    const seen = (/** @type {IntersectionObserverEntry[]} */ entries) => {
      for (const { isIntersecting, target } of entries) if (isIntersecting) {
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
    const map = stepMap(story, sections);
    shell.main.append(map, opening(story), ...sections.map(({ element }) => element));
    const band = ribbon(story);
    if (band) shell.main.append(band);
    for (const [element, draw] of waiting) if (shell.printing() || looked.has(element.id)) draw();
    follow(map, sections);
    lightDimensions(shell.main);
    keys(story);

    /** @param {Partial<State>} change */
    function commit(change) {
      const deep = ["layer", "batch", "head", "what"].some((name) => name in change && change[/** @type {keyof State} */ (name)] !== state[/** @type {keyof State} */ (name)]);
      const query = change.query !== undefined && change.query !== state.query;
      Object.assign(state, change);
      if (deep || query) {
        const focused = document.activeElement?.closest(".step")?.id;
        const inFigure = document.activeElement?.classList.contains("figure");
        shell.redraw();
        if (focused && inFigure) /** @type {HTMLElement | null} */ (document.querySelector(`#${focused} .figure`))?.focus({ preventScroll: true });
      } else for (const { update } of sections) update();
    }
  };
}

/** @param {Story} s @returns {Section[]} */
function sectionsOf(s) {
  const { t } = s;
  const formulaOf = (/** @type {string} */ name) => [s.step(name)?.formula].filter(Boolean);
  const plain = (/** @type {string} */ id, /** @type {string} */ symbol, /** @type {() => import("./section.js").Scene[]} */ scenes, /** @type {any} */ more = {}) =>
    section(s, { id, symbol, title: t(id), says: s.words(id), formulas: formulaOf(id), scenes, ...more });
  const whole = s.step("concat");
  const last = whole ? "heads" : "output";
  const projected = s.named("x");
  const found = [
    section(s, {
      id: "qkv",
      symbol: projected ? "X→QKV" : "QKV",
      title: t("qkv"),
      says: t(projected ? "project" : "given qkv"),
      formulas: projected ? ["q", "k", "v"].flatMap(formulaOf) : [],
      scenes: () => inputScenes(s),
    }),
    section(s, { id: "one", symbol: `q → o`, title: t("one"), says: t("one says", { token: spelled(s.queryName(s.state.query)) }), body: () => oneQuery(s) }),
    plain("scores", "S", () => scoreScenes(s)),
    plain("scaled", "S′", () => bentScenes(s, "scaled"), { before: scaleControl(s) }),
  ];
  for (const [name, symbol] of [["capped", "C"], ["biased", "B"]]) if (s.step(name)) found.push(plain(name, symbol, () => bentScenes(s, name)));
  const masks = s.step("masked") || !isAsRun(s.state.what);
  found.push(
    plain("masked", "M", () => maskedScenes(s), { before: maskControl(s), says: masks ? s.words("masked") : t("nothing masked") }),
    plain("weights", "A", () => weightScenes(s), { before: temperatureControl(s), title: t(s.columns ? "weights columns" : "weights") }),
    plain(last, "O", () => outputScenes(s)),
  );
  if (whole) {
    found.push(plain("concat", "H", () => concatScenes(s)));
    found.push(section(s, { id: "output", symbol: "U", title: t("layer output"), says: s.words("layer output"), formulas: formulaOf("output"), scenes: () => mixedScenes(s) }));
  }
  found.push(section(s, { id: "checked", symbol: "✓", title: t("checked"), says: "", body: () => closing(s) }));
  return found;
}

/** The small map that stays: every step, and whose attention is looked at. @param {Story} s @param {Section[]} sections */
function stepMap(s, sections) {
  const { t, state, page } = s;
  const go = (/** @type {string} */ id) => (/** @type {Event} */ event) => {
    event.preventDefault();
    byId(`step-${id}`)?.scrollIntoView();
    byId(`step-${id}-title`)?.focus({ preventScroll: true });
  };
  const links = sections.map(({ id, symbol }) => h("li", h("a", { href: `#step-${id}`, onclick: go(id), "data-step": id, title: t(id === "output" && s.step("concat") ? "layer output" : id) }, symbol)));
  const pick = (/** @type {string} */ name, /** @type {number} */ size, /** @type {number} */ now, /** @type {(i: number) => string} */ label) => {
    if (size < 2) return null;
    const set = (/** @type {number} */ value) => {
      s.commit(name === "query" ? { query: value, key: -1 } : { [name]: value, key: -1 });
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
