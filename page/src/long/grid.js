// All heads, layers × heads: of each its picture, or a square coloured by one statistic; below them the caption of one.

import { thenOf } from "../causes.js";
import { css, drawColours, signed, weighed } from "../colour.js";
import { ARROWS, h, scrollWithin } from "../dom.js";
import { bare, fmt, listOf, short, withSign } from "../numbers.js";

export const PICTURES = "weights"; // in place of a statistic
export const OFF = "off"; // likewise: what a run without the head changes, where the page says what made the answer
const LABELLED = 24; // up to so many heads have their kinds below their pictures
const MANY = 64; // from so many heads on their pictures are small

/** How many heads a run has. @param {Header["runs"][0]} run */
export const headsOf = (run) => run.layers.reduce((sum, layer) => sum + layer.heads.length, 0);

/** A head as it is called on this page. @param {Layer[]} layers @param {number} layer @param {number} head @param {Say} t */
export function nameOfHead(layers, layer, head, t) {
  const { name, heads } = layers[layer];
  if (layers.length > 1 || name !== "") return t("this head", { layer: name, head: heads[head] });
  return t("this matrix", { head: heads[head] });
}

/** Of an explained run what each head attends to in the row that answers. @param {Page} page @returns {{query: number, heads: [number, number][][][]} | undefined} */
export const looksOf = ({ header: { facts } }) => facts?.looks;

/** What a head does where the answer is said, and over the whole text. @param {Page} page @param {number} run @param {number} layer @param {number} head @param {Shell} shell */
export function captionOf(page, run, layer, head, { t, language }) {
  const { tokens, layers } = page.header.runs[run];
  const { captions, statistics } = layers[layer];
  const known = Object.values(statistics).some((each) => each[head] !== null);
  const usual = captions[head]?.[language()] ?? t(known ? "no caption" : "unknown");
  const looks = looksOf(page);
  if (!looks?.heads[layer][head].length || !tokens) return usual;
  const name = (/** @type {number} */ token) => bare(tokens[token], 14);
  const keys = looks.heads[layer][head].map(([key, weight]) => `${name(key)} ${Math.round(100 * weight)}%`).join(", ");
  return t(captions[head] ? "looks" : "looks here", { query: name(looks.query), keys, usual });
}

/**
 * @param {Page} page @param {string} statistic @param {Address} chosen
 * @param {(layer: number, head: number) => void} choose @param {Shell} shell
 * @param {ReturnType<typeof import("./thumbnails.js").thumbnails>} pictures
 * @param {Answer} said      where a head's caption stands, and what is done where one is pointed at, or none any more
 */
export function grid(page, statistic, chosen, choose, shell, pictures, said) {
  const { t, say } = shell;
  const { why } = page.header;
  const { layers } = page.header.runs[chosen.run];
  const pictured = statistic === PICTURES;
  const valuesOf = (/** @type {number} */ layer) =>
    statistic === OFF ? why.grid[layer] : (layers[layer].statistics[statistic] ?? []);
  const values = layers.flatMap((_, index) => valuesOf(index)).filter((x) => x !== null);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const shade = weighed(values.length ? most - least || 1 : 1, "linear");
  const tint = signed("contributions", Math.max(most, -least), "sqrt");
  const widest = Math.max(...layers.map((layer) => layer.heads.length));
  const count = headsOf(page.header.runs[chosen.run]);
  const labelled = pictured && count <= LABELLED && widest <= 8;
  const wordsOf = (/** @type {number} */ index, /** @type {number} */ place) => {
    const value = valuesOf(index)[place] ?? null;
    const number =
      value === null
        ? t("unknown")
        : statistic !== OFF
          ? fmt(value, 3)
          : why.ran
            ? thenOf(why, -value)
            : withSign(value, short);
    const name = nameOfHead(layers, index, place, t) + (pictured ? "" : ` (${number})`);
    return `${name}: ${captionOf(page, chosen.run, index, place, shell)}`;
  };
  const button = (/** @type {number} */ index, /** @type {number} */ place) => {
    const layer = layers[index];
    const value = pictured ? null : valuesOf(index)[place];
    const words = wordsOf(index, place);
    const here = chosen.layer === index && chosen.head === place;
    const colour = value === null ? null : statistic === OFF ? tint.colour(value) : shade.colour(value - least);
    const attributes = {
      style: { "grid-area": placeOf(index, place, !pictured), ...(colour && { background: css(colour) }) },
      title: words,
      "aria-label": words,
      "aria-pressed": String(here),
      tabindex: here ? 0 : -1,
      "data-place": `${index} ${place}`,
      onclick: () => choose(index, place),
      onpointerenter: () => said.show(index, place),
      onfocus: () => (said.show(index, place), say(words)),
    };
    const label = labelled && h("small", { "data-label": labelOf(layer, place, t) }, h("b", layer.heads[place]));
    return h(!pictured && value === null ? "button.head.unknown" : "button.head", attributes, label);
  };
  const several = layers.length > 1 || layers[0].name !== "";
  const every = pictured ? 1 : Math.ceil(layers.length / 16);
  const rows = layers.map((layer, index) => [
    several &&
      h("span.layer", { style: { "grid-area": placeOf(index, -1, !pictured) } }, index % every === 0 && layer.name),
    layer.heads.map((_, place) => button(index, place)),
  ]);
  const beside = Math.ceil(widest / 16);
  const side = (/** @type {number} */ head) =>
    h("span.layer", { style: { "grid-area": placeOf(-1, head, true) } }, head % beside === 0 && head);
  const sides = pictured ? [] : listOf(widest, side);
  const attributes = {
    style: { "--heads": pictured ? widest : layers.length, "--rows": widest },
    role: "group",
    "aria-label": `${t("every head")}: ${t(statistic)}`,
    onkeydown: walk(!pictured),
    onpointerleave: () => said.show(),
  };
  const strips = pictured && layers.map((layer, index) => pictures.of(chosen.run, index, layer.heads.length));
  const size = pictured ? (labelled ? "labelled" : count > MANY ? "many" : "some") : "squares";
  const key = !pictured && statistic !== OFF && legend(shade, fmt(least, 3), fmt(most, 3));
  return {
    element: h("div.hold", h(`div.heads.${size}`, attributes, strips, sides, rows), said.caption, key),
    wordsOf,
  };
}

/** Where a head stands: layers down and heads across, or the other way round; head −1: the layer's name. @param {number} layer @param {number} head @param {boolean} across */
const placeOf = (layer, head, across) => (across ? `${head + 2} / ${layer + 2}` : `${layer + 1} / ${head + 2}`);

/** A head's kind, and how much of it: "self 60%". @param {any} layer @param {number} place @param {(key: string) => string} t */
function labelOf({ kinds, statistics }, place, t) {
  const kind = kinds?.[place];
  const share = statistics[kind]?.[place];
  return kind ? `${t(`kind ${kind}`)} ${share ? `${Math.round(100 * share)}%` : ""}` : "";
}

/** Scroll the chosen head into its panel's view, and nothing else. @param {HTMLElement} front */
export const showChosen = (front) =>
  scrollWithin(front.querySelector(".heads"), front.querySelector('[aria-pressed="true"]'));

/** Arrows go from head to head while one of them has the focus. @param {boolean} across */
const walk = (across) => (/** @type {KeyboardEvent} */ event) => {
  const step = ARROWS[event.key];
  const from = /** @type {HTMLElement} */ (event.target);
  if (!step || !from.dataset.place) return;
  const [layer, head] = from.dataset.place.split(" ").map(Number);
  const [layers, heads] = across ? [step[1], step[0]] : step;
  const to = from.parentElement?.querySelector(`[data-place="${layer + layers} ${head + heads}"]`);
  event.preventDefault();
  event.stopPropagation();
  /** @type {HTMLElement | null | undefined} */ (to)?.focus();
};

/** The colours of a scale between its ends. @param {Shade} shade @param {string} low @param {string} high @param {...Child} more */
export function legend(shade, low, high, ...more) {
  const canvas = h("canvas.bar-of", { width: 132, height: 10 });
  drawColours(canvas, (x) => shade.along(x / 131));
  return h("div.legend", low, canvas, high, more);
}
