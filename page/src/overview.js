// Below the answer: the whole model as one picture, from the text to the next word, and below it the chosen head, from its
// queries to what its layer adds. Sizes and numbers are the page's own; every part is a door to its numbers.

import { css, signed } from "./colour.js";
import { h, renew, walking, write } from "./dom.js";
import { listOf, percent, short, spelled, withSign } from "./numbers.js";
import { openStep } from "./section.js";

const FEW = 4; // of more layers each is a column
const STEPS = /^(qkv|scores|scaled|capped|biased|masked|weights|heads|output)$/; // of a head

/**
 * A part of the picture. `kind`: how it is drawn: does it read the residual stream, write to it, come right after the part
 * before? `adds`: to the logit of the answer's first token; `cells`: what its heads do, of which `chosen` is one; `below`: its
 * layer's number, below a column.
 * @typedef {{id: string, name: string, says?: string, kind?: string, adds?: number[], cells?: (number | null)[], chosen?: number, below?: string, go?: (head?: number) => void}} Part
 */

/** Scrolls to an element and gives it the focus. @param {string} what */
function goTo(what) {
  const element = /** @type {HTMLElement | null} */ (document.querySelector(what));
  element?.scrollIntoView({ block: "center" });
  element?.focus({ preventScroll: true });
}

/** From the text to the next word. @param {any} header @param {Place} place @param {Shell} shell @param {any} way      of the record: a run in this page has the same parts @returns {Part[]} */
function partsOf(header, place, shell, way) {
  const { t } = shell;
  const { facts, tokens, why, layers, arrays } = header;
  const { layer: at, head: now } = place.chosen;
  const [wide] = layers.flatMap((/** @type {any} */ each) => arrays[each.arrays.x]?.shape.slice(-1) ?? []);
  const given = facts.way?.choices[0].adds;
  /** A part of the model: its name, its sizes and what it adds. @param {number | null} layer @param {...string} kinds */
  const partOf = (layer, ...kinds) => {
    const is = (/** @type {any} */ part) => part.layer === layer && kinds.includes(part.kind);
    const places = listOf(way?.parts.length ?? 0, (place) => place).filter((place) => is(way.parts[place]));
    const [name, says] = (way?.words[shell.language()].parts[places[0]] ?? "").split(/, |; |，|；/);
    const adds = given && places.length ? [places.reduce((sum, place) => sum + given[place], 0)] : undefined;
    return { name, says, adds, go: given && (() => openStep("way")) };
  };
  const open = (/** @type {number} */ layer, /** @type {number | undefined} */ head) => {
    const best = why ? why.grid[layer].indexOf(Math.max(...why.grid[layer])) : 0;
    place.choose("", { layer, head: head ?? (layer === at ? now : best), key: -1 });
    if (head === undefined) goTo(".front [aria-pressed=true]");
    else openStep("weights");
  };
  const toText = () => goTo(place.live ? "#try-text, #serve-text" : ".passage .token");
  const [word, share] = facts.next?.[0] ?? [];
  const last = partOf(null, "unembedding");
  const middle = layers.map((/** @type {any} */ { number = 0, heads: count }, /** @type {number} */ layer) => {
    const [attention, mlp] = [partOf(number, "attention"), partOf(number, "mlp")];
    const box = {
      ...{ ...attention, id: `layer-${layer}`, name: t("overview attention", { layer: number }) },
      ...{ says: t("overview heads", { count }), kind: "reads writes", chosen: layer === at ? now : -1 },
      cells: why?.grid[layer] ?? Array(count).fill(null),
      go: (/** @type {number | undefined} */ head) => open(layer, head),
    };
    if (layers.length <= FEW) return mlp.name ? [box, { ...mlp, id: `mlp-${layer}`, kind: "reads writes" }] : [box];
    const below = layer % Math.ceil(layers.length / 14) ? "" : String(number);
    return { ...box, below, adds: given && [attention, mlp].map(({ adds }) => adds?.[0] ?? 0) };
  });
  const embedded = {
    name: t("overview embeddings"),
    says: wide ? `${tokens.length} × ${wide}` : "",
    kind: "then writes",
  };
  return [
    { id: "text", name: t("overview text"), says: t("overview tokens", { n: tokens.length }), go: toText },
    { ...partOf(null, "token", "position"), id: "embeddings", ...embedded },
    ...middle.flat(),
    ...(last.name ? [{ ...last, id: "unembedding", kind: "reads", adds: undefined }] : []),
    ...(word
      ? [{ id: "next", name: spelled(word, 14), says: percent(share), kind: "then", go: () => goTo("#next button") }]
      : []),
  ];
}

/** The steps of the chosen head. @param {any} header @param {Place} place @param {Say} t @returns {Part[]} */
function stepsOf({ layers }, { chosen }, t) {
  const { queries, keys, steps } = layers[chosen.layer];
  const sizes = /** @type {Record<string, number>} */ ({ queries, keys });
  return steps.flatMap((/** @type {any} */ { name, formula, shape, axes }) => {
    const id = name === "q" ? "qkv" : name;
    if (!STEPS.test(id)) return [];
    const size = axes.map((/** @type {string} */ axis, /** @type {number} */ at) => sizes[axis] ?? shape[at]);
    const ofHead = size
      .filter((/** @type {number} */ _, /** @type {number} */ at) => !/heads$/.test(axes[at]))
      .join(" × ");
    const scale = name === "scaled" && formula.split(" = ")[1].replace("S/", "÷ ");
    const says = id === "qkv" ? `3 × (${ofHead})` : scale || ofHead;
    const title = t(/^(capped|biased)$/.test(id) ? id : `stop ${id}`).replace("^O", "ᴼ");
    return { id: `step-${id}`, name: title, says, kind: id === "qkv" ? "" : "then", go: () => openStep(id) };
  });
}

/** @param {Part} part @param {number} most      of what parts add @param {Shade} tint */
function drawn({ id, name, says, kind = "", go, adds = [], cells, chosen, below }, most, tint) {
  const column = below !== undefined;
  const told = [name, says, ...adds.map((value) => withSign(value, short))].filter(Boolean).join(", ");
  const squares = cells?.map((value, head) => {
    const style = { background: value === null ? null : css(tint.colour(value)) };
    return h(head === chosen ? "i.now" : "i", { style, onclick: () => go?.(head) });
  });
  const bars = adds.map((value) =>
    h(value < 0 ? "b.less" : "b", {
      style: { [column ? "height" : "width"]: `${((column ? 50 : 100) * Math.abs(value)) / most}%` },
    }),
  );
  const words = column ? below : [name, !cells && says && h("small", says)];
  const act = go && { tabindex: -1, onclick: () => go() };
  return h(
    "li",
    { class: column ? "column" : `box ${kind}`, "data-part": id },
    h(go ? "button.door" : "span.door", { ...act, title: told, "aria-label": column && told }, words),
    squares && h("div.cells", squares),
    bars.length > 0 && h("div.adds", bars, !column && h("small", withSign(adds[0], short))),
  );
}

/** @param {Page} page @param {Place} place @param {Child} tour      what begins it */
export function overviewRoom({ header }, place, tour) {
  const way = header.facts?.way;
  const [title, how, inside, model, head] = [h("h2", { id: "overview" }), h("p.note"), h("h3"), h("ol"), h("ol")];
  const doors = () => [...host.querySelectorAll("button")];
  const onkeydown = walking((from, down, right) => doors()[doors().indexOf(from) + down + right]);
  const named = { role: "group", "aria-labelledby": "overview", onkeydown };
  const host = h("div.picture", named, model, inside, head);
  /** @type {Map<string, {key: string, element: HTMLElement}>} */
  const known = new Map();
  /** @type {Shell} */
  let shell;
  const draw = () => {
    const { t } = shell;
    const { facts, why, layers } = header;
    const parts = facts?.text === undefined ? [] : partsOf(header, place, shell, way);
    const most = Math.max(...parts.flatMap(({ adds = [] }) => adds.map(Math.abs))) || 1;
    const tint = signed("contributions", Math.max(0, ...(why?.grid ?? []).flat().map(Math.abs)) || 1, true);
    const focused = document.activeElement?.closest("[data-part]")?.getAttribute("data-part");
    write(title, t(parts.length ? "overview" : "overview head"));
    write(how, t(facts?.way ? "overview how" : "overview plain", { token: spelled(way?.choices[0].text ?? "") }));
    const { layer, head: of } = place.chosen;
    write(inside, t("overview inside", { layer: layers[layer].number ?? layer, head: of }));
    /** One that is the same again stays. @param {Part} part */
    const once = (part) => {
      const key = JSON.stringify([part, most, tint.high]);
      if (known.get(part.id)?.key !== key) known.set(part.id, { key, element: drawn(part, most, tint) });
      return /** @type {HTMLElement} */ (known.get(part.id)?.element);
    };
    const made = parts.map(once);
    const columns = made.filter((each) => each.className === "column");
    const style = { "flex-basis": `${26 * columns.length}px` };
    if (columns.length) made.splice(2, columns.length, h("li.columns", { style }, h("ol", columns)));
    renew(model, made);
    renew(head, stepsOf(header, place, t).map(once));
    const again = doors().find((door) => door.parentElement?.dataset.part === focused);
    (again ?? doors().find(({ tabIndex }) => !tabIndex) ?? doors()[0])?.setAttribute("tabindex", "0");
    again?.focus({ preventScroll: true });
  };
  return {
    element: h("section.overview", { "aria-labelledby": "overview" }, h("div.headed", title, how, tour), host),
    draw(/** @type {Shell} */ now) {
      shell = now;
      known.clear(); // the theme may be another
      place.follow("overview", draw);
      draw();
    },
  };
}
