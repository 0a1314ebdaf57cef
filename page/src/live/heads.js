// Every head of the live run as a small picture: a click chooses one, a double click switches it off or on.

import { h } from "../dom.js";
import { picture } from "./map.js";
import { has } from "./state.js";

/**
 * @param {Say} t @param {number} layers @param {number} heads
 * @param {(place: [number, number]) => void} choose @param {(place: [number, number]) => void} turn
 */
export function headPictures(t, layers, heads, choose, turn) {
  const tiles = Array.from({ length: layers * heads }, (_, index) => {
    const place = /** @type {[number, number]} */ ([Math.floor(index / heads), index % heads]);
    const canvas = h("canvas");
    const acts = { onclick: () => choose(place), ondblclick: () => turn(place) };
    return { place, canvas, button: h("button.try-head", acts, canvas, h("small", place.join("."))) };
  });
  return {
    element: h(
      "div.try-heads",
      { style: { "--heads": heads } },
      tiles.map(({ button }) => button),
    ),
    /** @param {Attention[][]} attention @param {number} n @param {[number, number]} chosen @param {[number, number][]} off */
    show(attention, n, chosen, off) {
      for (const { place, canvas, button } of tiles) {
        const [layer, head] = place;
        const isOff = has(off, place);
        picture(canvas, attention[layer][head], n);
        button.setAttribute("aria-pressed", String(has([chosen], place)));
        button.setAttribute("aria-label", t("try head", { layer, head }) + (isOff ? `, ${t("try is off")}` : ""));
        button.classList.toggle("off", isOff);
      }
    },
  };
}
