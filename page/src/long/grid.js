// All heads, layers × heads: of each its picture, framed by what it did for the answer; below them the caption of one.

import { thenOf } from "../causes.js";
import { css, inkOn, signed } from "../colour.js";
import { h, scrollWithin, walking } from "../dom.js";
import { bare, short, withSign } from "../numbers.js";

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
 * @param {Page} page @param {Chosen} chosen @param {(layer: number, head: number) => void} choose @param {Shell} shell
 * @param {ReturnType<typeof import("./thumbnails.js").thumbnails>} pictures
 * @param {Answer} said      where a head's caption stands, and what is done where one is pointed at, or none any more
 */
export function grid(page, chosen, choose, shell, pictures, said) {
  const { t, say } = shell;
  const { why } = page.header;
  const { layers } = page.header.runs[chosen.run];
  const effects = layers.map(
    ({ statistics, heads }, index) => why?.grid[index] ?? statistics.effect ?? heads.map(() => null),
  );
  const tint = signed("contributions", Math.max(...effects.flat().map(Math.abs)), true);
  const widest = Math.max(...layers.map((layer) => layer.heads.length));
  const count = headsOf(page.header.runs[chosen.run]);
  const labelled = count <= LABELLED && widest <= 8;
  const wordsOf = (/** @type {number} */ index, /** @type {number} */ place) => {
    const effect = effects[index][place];
    const number = why?.ran ? thenOf(why, -effect) : withSign(effect, short);
    const name = nameOfHead(layers, index, place, t) + (effect === null ? "" : ` (${number})`);
    return `${name}: ${captionOf(page, chosen.run, index, place, shell)}`;
  };
  const button = (/** @type {number} */ index, /** @type {number} */ place) => {
    const [words, effect] = [wordsOf(index, place), effects[index][place]];
    const here = chosen.layer === index && chosen.head === place;
    const colour = effect === null ? null : tint.colour(effect);
    const attributes = {
      style: {
        "grid-area": `${index + 1} / ${place + 2}`,
        ...(colour && { "--did": css(colour), color: inkOn(colour) === "dark" ? "#000" : "#fff" }),
      },
      title: words,
      "aria-label": words,
      "aria-pressed": String(here),
      tabindex: here ? 0 : -1,
      "data-place": `${index} ${place}`,
      onclick: () => choose(index, place),
      onpointerenter: () => said.show(index, place),
      onfocus: () => (said.show(index, place), say(words)),
    };
    const label = { "data-label": labelOf(layers[index], place, t) };
    return h("button.head", attributes, labelled && h("small", label, h("b", layers[index].heads[place])));
  };
  const several = layers.length > 1 || layers[0].name !== "";
  const rows = layers.map(({ name, heads }, index) => [
    several && h("span.layer", { style: { "grid-area": `${index + 1} / 1` } }, name),
    heads.map((_, place) => button(index, place)),
  ]);
  const attributes = {
    style: { "--heads": widest },
    role: "group",
    "aria-label": t("every head"),
    onkeydown: walk,
    onpointerleave: () => said.show(),
  };
  const strips = layers.map(({ heads }, index) => pictures.of(chosen.run, index, heads.length));
  const size = labelled ? "labelled" : count > MANY ? "many" : "some";
  return { element: h("div.hold", h(`div.heads.${size}`, attributes, strips, rows), said.caption), wordsOf };
}

/** A head's kind, and how much of it: "self 60%". @param {any} layer @param {number} place @param {(key: string) => string} t */
function labelOf({ kinds, statistics }, place, t) {
  const kind = kinds?.[place];
  const share = statistics[kind]?.[place];
  return kind ? `${t(`kind ${kind}`)} ${share ? `${Math.round(100 * share)}%` : ""}` : "";
}

/** Scroll the chosen head into its panel's view, and nothing else. @param {HTMLElement} front */
export const showChosen = (front) =>
  scrollWithin(front.querySelector(".heads"), front.querySelector('[aria-pressed="true"]'));

/** From head to head. */
const walk = walking((from, down, right) => {
  const [layer, head] = from.dataset.place.split(" ").map(Number);
  return from.parentElement.querySelector(`[data-place="${layer + down} ${head + right}"]`);
});
