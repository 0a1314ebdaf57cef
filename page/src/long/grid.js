// All heads, layers × heads: of each its picture, or a square coloured by one statistic; below them the caption of one.

import { penOf } from "../canvas.js";
import { css, weighed } from "../colour.js";
import { h } from "../dom.js";
import { fmt } from "../numbers.js";

export const PICTURES = "weights"; // in place of a statistic
const LABELLED = 24; // up to so many heads have their kinds below their pictures
const MANY = 64; // from so many heads on their pictures are small

/** How many heads a run has. @param {any} run @returns {number} */
export const headsOf = (run) =>
  run.layers.reduce((/** @type {number} */ sum, /** @type {any} */ layer) => sum + layer.heads.length, 0);

/** @typedef {ReturnType<typeof import("./thumbnails.js").thumbnails>} Thumbnails */

/**
 * @param {any} run
 * @param {string} statistic
 * @param {import("./source.js").Address} chosen
 * @param {(layer: number, head: number) => void} choose
 * @param {import("../shell.js").Shell} shell
 * @param {Thumbnails} pictures
 */
export function grid(run, statistic, chosen, choose, { t, say, language }, pictures) {
  const pictured = statistic === PICTURES;
  const values = run.layers
    .flatMap((/** @type {any} */ layer) => layer.statistics[statistic] ?? [])
    .filter((/** @type {any} */ x) => x !== null);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const shade = weighed(values.length ? most - least || 1 : 1, "linear");
  const widest = Math.max(...run.layers.map((/** @type {any} */ layer) => layer.heads.length));
  const several = run.layers.length > 1 || run.layers[0].name !== "";
  const count = headsOf(run);
  const labelled = pictured && count <= LABELLED && widest <= 8;
  const caption = h("p.caption", { "aria-hidden": "true" });
  let tellChosen = () => {};
  const rows = run.layers.map((/** @type {any} */ layer, /** @type {number} */ at) => [
    several && h("span.layer", { id: `layer-${at}`, style: { "grid-row": at + 1 } }, layer.name),
    layer.heads.map((/** @type {number} */ number, /** @type {number} */ place) => {
      const value = pictured ? null : layer.statistics[statistic][place];
      const name = several ? t("this head", { layer: layer.name, head: number }) : t("this matrix", { head: number });
      const known = Object.values(layer.statistics).some((values) => values[place] !== null);
      const told = layer.captions[place]?.[language()] ?? t(known ? "no caption" : "unknown");
      const said = `${name}: ${pictured ? told : value === null ? t("unknown") : fmt(value, 3)}`;
      const here = chosen.layer === at && chosen.head === place;
      const tell = () => {
        caption.textContent = said;
      };
      if (here) tellChosen = tell;
      return h(
        !pictured && value === null ? "button.head.unknown" : "button.head",
        {
          style: {
            "grid-area": `${at + 1} / ${place + 2}`,
            ...(value === null ? {} : { background: css(shade.at(value - least)) }),
          },
          title: said,
          "aria-label": said,
          "aria-pressed": here ? "true" : "false",
          tabindex: here ? 0 : -1,
          "data-place": `${at} ${place}`,
          onclick: () => choose(at, place),
          onpointerenter: tell,
          onfocus: () => {
            tell();
            say(said);
          },
        },
        labelled && h("small", { "data-label": labelOf(layer, place, t) }, h("b", number)),
      );
    }),
  ]);
  tellChosen();
  const size = labelled ? "labelled" : count > MANY ? "many" : "some";
  const box = h(
    `div.heads.${size}`,
    {
      style: { "--heads": widest },
      role: "group",
      "aria-label": `${t("every head")}: ${t(statistic)}`,
      onkeydown: walk,
      onpointerleave: () => tellChosen(),
    },
    pictured &&
      run.layers.map((/** @type {any} */ layer, /** @type {number} */ at) =>
        pictures.of(chosen.run, at, layer.heads.length),
      ),
    rows,
  );
  const key = values.length ? legend(shade, fmt(least, 3), fmt(most, 3)) : h("p.note", t("unknown"));
  return h("div.hold", box, pictured ? caption : key);
}

/** A head's kind, and how much of it: "self 60%". @param {any} layer @param {number} place @param {(key: string) => string} t */
function labelOf({ kinds, statistics }, place, t) {
  const kind = kinds?.[place];
  const share = statistics[kind]?.[place];
  return kind ? `${t(`kind ${kind}`)} ${share ? `${Math.round(100 * share)}%` : ""}` : "";
}

/** Scroll the chosen head into its panel's view, and nothing else. @param {HTMLElement} front */
export function showChosen(front) {
  const [box, head] = [front.querySelector(".heads"), front.querySelector('[aria-pressed="true"]')];
  if (!box || !head) return;
  const [around, own] = [box.getBoundingClientRect(), head.getBoundingClientRect()];
  const past = (/** @type {number} */ low, /** @type {number} */ high) => Math.min(0, low) + Math.max(0, high);
  box.scrollTop += past(own.top - around.top - 5, own.bottom - around.bottom + 5);
  box.scrollLeft += past(own.left - around.left - 5, own.right - around.right + 5);
}

/** Arrows go from head to head while one of them has the focus. @param {KeyboardEvent} event */
function walk(event) {
  const steps = /** @type {Record<string, [number, number]>} */ ({
    ArrowLeft: [0, -1],
    ArrowRight: [0, 1],
    ArrowUp: [-1, 0],
    ArrowDown: [1, 0],
  });
  const step = steps[event.key];
  const from = /** @type {HTMLElement} */ (event.target);
  if (!step || !from.dataset.place) return;
  const [layer, head] = from.dataset.place.split(" ").map(Number);
  const to = /** @type {HTMLElement | null} */ (
    from.parentElement?.querySelector(`[data-place="${layer + step[0]} ${head + step[1]}"]`) ?? null
  );
  event.preventDefault();
  event.stopPropagation();
  to?.focus();
}

/** The colours of a scale between its ends. @param {import("../colour.js").Shade} shade @param {string} low @param {string} high @param {...import("../dom.js").Child} more */
export function legend(shade, low, high, ...more) {
  const canvas = /** @type {HTMLCanvasElement} */ (h("canvas.bar-of", { width: 132, height: 10 }));
  const pen = penOf(canvas);
  for (let x = 0; x < 132; x++) {
    pen.fillStyle = css(shade.along(x / 131));
    pen.fillRect(x, 0, 1, 10);
  }
  return h("div.legend", low, canvas, high, more);
}
