// The map in its box, with what is said of it: the scale, the part that is in view, and what a pixel is.

import { toLink } from "../address.js";
import { h, write } from "../dom.js";
import { fmt } from "../numbers.js";
import { shadeOf } from "./coloured.js";
import { legend } from "./grid.js";
import { draw } from "./map.js";
import { endOf, frame, settle, showWhole, zoom } from "./view.js";

/** @param {Look} look */
export const frameOf = (look) => frame(look.parts.box.clientWidth, look);

/** Whether nobody sees an element, since what it is in is folded. @param {Element} element */
export const isFolded = (element) => Boolean(element.closest("details:not([open])"));

/** Draw the map again. @param {Look} look */
export function refresh(look) {
  look.parts.box.dataset.missing = "0";
  if (isFolded(look.parts.box)) return;
  const { parts, head, queries, keys, view, state } = look;
  const { t } = look.shell;
  const f = frameOf(look);
  settle(look, f);
  const { rows, cols, stretched, missing } = draw(parts.canvas, look, f);
  state.view = view;
  const shade = shadeOf(look);
  const hatched = Boolean(head.layer.masked);
  const swatches = [
    hatched && h("span", h("i.hatched"), t("masked cell")),
    look.nonfinite && h("span", h("i.nonfinite"), t("nonfinite")),
  ];
  const ends = t("ends here", {
    which: t(look.inView ? "queries in view" : "all queries"),
    what: t(`shows ${head.shows}`),
  });
  const [low, high] = [shade.low ? `≤ ${fmt(shade.low, 3)}` : "0", `≥ ${fmt(shade.high, 3)}`];
  const said = [low, high, look.nonfinite, ends, head.shows, hatched].join(" ");
  if (parts.scale.dataset.said !== said)
    parts.scale.replaceChildren(legend(shade, low, high, swatches, h("span.note", ends)));
  parts.scale.dataset.said = said;
  const end = endOf(look, f);
  const where = t("where", {
    i0: Math.floor(view.y),
    i1: Math.ceil(end.y) - 1,
    n: queries,
    j0: Math.floor(view.x),
    j1: Math.ceil(end.x) - 1,
    m: keys,
  });
  const pixel =
    rows * cols === 1
      ? head.shows === "weights" && t("single")
      : (stretched ? t("stretched") : "") + t("many", { rows, cols });
  write(parts.where, [where, pixel, missing && t("computing")].filter(Boolean).join(" · "));
  parts.box.dataset.missing = String(missing);
}

/** Around the chosen cell. @param {Look} look @param {number} factor      of what a pixel covers; 0: the whole */
export function nearer(look, factor) {
  const { cell } = look;
  const f = frameOf(look);
  if (factor) zoom(look, f, factor, cell.i + 0.5, cell.j + 0.5);
  else showWhole(look, f);
  refresh(look);
  toLink(look.state);
}
