// The way from the text to one logit: the residual stream as a line, and along it a box for every part of the model with
// its sizes and what it adds. The numbers add up to the logit.

import { byId, h, select } from "./dom.js";
import { filled, isolated, short, spelled, withSign } from "./numbers.js";
import { openStep, section } from "./section.js";

const MOST_LAYERS = 4; // of more than these, each is folded

/** @typedef {{id: number, text: string, logit: number, adds: number[], heads: number[][], bias: number[]}} Choice */

/** With two decimals, so that a reader can add them up; more for what would read as 0. @param {number} size */
const plain = (size) => (size < 0.095 ? short(size) : size.toFixed(2));
const number = (/** @type {number} */ x) => (x < 0 ? "−" : "") + plain(Math.abs(x));
const signed = (/** @type {number} */ x) => withSign(x, plain);

/** Shows the way to another token. @param {number} id */
export function showWay(id) {
  openStep("way"); // which draws it
  const pick = /** @type {HTMLSelectElement} */ (byId("pick-next"));
  pick.value = String(id);
  pick.dispatchEvent(new Event("change"));
}

/** @param {Story} s @returns {Section} */
export function waySection(s) {
  const { words: both, position } = s.facts.way;
  /** @type {Choice[]} */
  const choices = s.facts.way.choices;
  const words = both[s.shell.language()];
  const [title, body] = [h("span"), h("div")];
  const named = (/** @type {Choice} */ { text }) => isolated(spelled(text, 20));
  const draw = () => {
    const chosen = choices.find(({ id }) => id === s.state.next) ?? choices[0];
    const other = choices.find((each) => each.id === s.state.less && each !== chosen);
    const token = isolated(`${position} ${spelled(s.queryName(position), 20)}`);
    const texts = { next: named(chosen), other: other ? named(other) : "", token };
    /** @param {"next" | "less"} name @param {Choice | undefined} now @param {(number | string)[][]} options */
    const pick = (name, now, options) =>
      select(`pick-${name}`, options, now?.id ?? NaN, (value, control) => {
        const focused = document.activeElement === control;
        s.state[name] = Number(value);
        draw();
        if (focused) byId(`pick-${name}`)?.focus({ preventScroll: true });
      });
    const options = choices.map(({ id, text }) => [id, spelled(text, 20)]);
    const others = options.filter(([id]) => id !== chosen.id);
    const opened = [...body.querySelectorAll("details")].map((each) => each.open);
    title.replaceChildren(filled(other ? words.minus : words.title, texts));
    const less = pick("less", other, [[-1, words.nothing], ...others]);
    const picks = [h("label", words.of, pick("next", chosen, options)), h("label", words.less, less)];
    const notes = words.notes.map((/** @type {string} */ note) => [note, h("br")]);
    const constant = h("p.aside", words.constant);
    body.replaceChildren(h("div.picks", picks), constant, wayOf(s, words, texts, chosen, other, opened));
    body.append(h("p.aside", notes));
  };
  draw();
  return section(s, { id: "way", symbol: "Σ", title, says: () => "", body: () => body });
}

/**
 * The parts of the model, each with what it adds and the sum so far.
 * @param {Story} s @param {any} words @param {Record<string, string>} texts @param {Choice} chosen
 * @param {Choice | undefined} other      whose way is subtracted
 * @param {boolean[]} opened      which layers were open, if they were drawn before
 */
function wayOf(s, words, texts, chosen, other, opened) {
  /** @type {{kind: string, layer: number | null}[]} */
  const parts = s.facts.way.parts;
  const adds = chosen.adds.map((x, index) => x - (other?.adds[index] ?? 0));
  let sum = 0;
  const sums = adds.map((x) => (sum += x));
  const groups = layersOf(parts);
  const totals = groups.map((group) => group.reduce((total, index) => total + adds[index], 0));
  const most = Math.max(...[...adds, ...totals].map(Math.abs)) || 1;
  const figures = (/** @type {number} */ x, /** @type {number} */ after) => [
    h("span.track", h(x < 0 ? "span.share.less" : "span.share", { style: share(x, most) })),
    h("span.figures", signed(x)),
    h("span.figures", number(after)),
  ];
  const box = (/** @type {string | null} */ name) => name && h("small.box", name);
  const row = (/** @type {number} */ index) => {
    const { kind, layer } = parts[index];
    const [read, wrote] = words.norms[index];
    const heads = chosen.heads[index].map((x, head) => x - (other?.heads[index][head] ?? 0));
    const buttons = heads.map((x, head) => {
      const label = `${words.layers[Number(layer)]}, ${s.t("head")} ${head}: ${signed(x)}`;
      const onclick = () => openHead(s, layer, head);
      return h("button", { onclick, "aria-label": label }, h("small", head), ` ${signed(x)}`);
    });
    const bias = h("small", `${words.bias} ${signed(chosen.bias[index] - (other?.bias[index] ?? 0))}`);
    return h(
      "li",
      { class: `part ${kind}` },
      h("span.boxes", [box(read), h("span.box", words.parts[index]), box(wrote)]),
      figures(adds[index], sums[index]),
      heads.length ? h("div.heads-of", buttons, bias) : null,
    );
  };
  const folded = groups.filter(([index]) => parts[index].layer !== null).length > MOST_LAYERS;
  const layerOf = (/** @type {number[]} */ group, /** @type {number} */ place) => {
    const name = h("strong", words.layers[Number(parts[group[0]].layer)]);
    const summary = h("summary.part", name, figures(totals[place], sums[Number(group.at(-1))]));
    const open = opened.length ? opened.shift() : !folded;
    return h("li", h("details", { open }, summary, h("ol", group.map(row))));
  };
  const heads = [h("span"), h("small.figures", words.adds), h("small.figures", words.sums)];
  const logit = filled(words.logit + (other ? " − {other}" : ""), texts);
  const total = h("span.figures", number(chosen.logit - (other?.logit ?? 0)));
  const rows = groups.map((group, place) => (parts[group[0]].layer === null ? row(group[0]) : layerOf(group, place)));
  const first = h("li.part", h("small", filled(words.stream, texts)), heads);
  return h("ol.way-parts", first, rows, h("li.part.total", h("span", logit), total));
}

/** Places of parts: alone, or with the others of their layer. @param {{layer: number | null}[]} parts */
function layersOf(parts) {
  /** @type {number[][]} */
  const groups = [];
  for (const [index, { layer }] of parts.entries()) {
    const last = groups.at(-1);
    if (last && layer !== null && parts[last[0]].layer === layer) last.push(index);
    else groups.push([index]);
  }
  return groups;
}

/** A bar from the middle of its track to the right, or to the left where it takes away. @param {number} x @param {number} most */
function share(x, most) {
  const width = (50 * Math.abs(x)) / most;
  return { width: `${Math.max(0.5, width)}%`, "margin-left": `${x < 0 ? 50 - width : 50}%` };
}

/** Shows a head's weights. @param {Story} s @param {number | null} layer @param {number} head */
function openHead(s, layer, head) {
  const place = s.page.header.layers.findIndex((/** @type {any} */ each) => each.number === layer);
  s.commit({ layer: place, head, key: -1 });
  openStep("weights");
}
