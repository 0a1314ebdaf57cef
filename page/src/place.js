// The chosen place and what is supposed, shared by all rooms of the page.

import { asRun } from "./head.js";

/** @typedef {{run: number, layer: number, head: number, query: number, key: number}} Chosen      places in the document; query −1: the last, key −1: the one with the query's largest weight */
/** @typedef {import("./head.js").WhatIf} WhatIf */
/**
 * @typedef {object} Place
 * @property {Chosen} chosen
 * @property {WhatIf} what
 * @property {(room: string, follow: (place: Place) => void) => void} follow      a room follows all changes that it did not make itself
 * @property {(from: string, change: Partial<Chosen>) => void} choose
 * @property {(from: string, what: WhatIf) => void} suppose
 */

/** @param {Chosen} chosen @returns {Place} */
export function newPlace(chosen) {
  /** @type {Map<string, (place: Place) => void>} */
  const rooms = new Map();
  const place = /** @type {Place} */ ({
    chosen,
    what: asRun(),
    follow: (room, follow) => void rooms.set(room, follow),
    choose(from, change) {
      const differs = Object.entries(change).some(
        ([name, value]) => chosen[/** @type {keyof Chosen} */ (name)] !== value,
      );
      Object.assign(chosen, change);
      if (differs) tell(from);
    },
    suppose(from, what) {
      place.what = what;
      tell(from);
    },
  });
  const tell = (/** @type {string} */ from) => {
    for (const [room, follow] of rooms) if (room !== from) follow(place);
  };
  return place;
}
