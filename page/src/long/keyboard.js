// Keyboard shortcuts of the long view.

import { ARROWS, byId } from "../dom.js";
import { moved, step } from "./cell.js";
import { nearer } from "./mapbox.js";

/** @param {Look} look */
export function bindKeys(look) {
  const { shell, cell, state, pick } = look;
  const { box } = look.parts;
  /** Whether the map is in view: elsewhere the arrows scroll. */
  const inView = () => box.getBoundingClientRect().bottom > 0 && box.getBoundingClientRect().top < innerHeight;
  for (const [key, [down, right]] of Object.entries(ARROWS))
    shell.key(key, ({ shiftKey }) => {
      if (!inView()) return false;
      const far = shiftKey ? 10 : 1;
      step(look, far * down, far * right);
    });
  for (const [key, pinned] of /** @type {[string, boolean][]} */ ([
    ["Enter", true],
    ["Escape", false],
  ]))
    shell.key(key, () => {
      cell.pinned = pinned;
      moved(look);
    });
  for (const [keys, factor] of /** @type {[string, number][]} */ ([
    ["+=", 0.5],
    ["-−", 2],
    ["0", 0],
  ]))
    for (const key of keys) shell.key(key, () => nearer(look, factor));
  for (const [key, layers, heads] of /** @type {[string, number, number][]} */ ([
    ["[", 0, -1],
    ["]", 0, 1],
    ["{", -1, 0],
    ["}", 1, 0],
  ]))
    shell.key(key, () =>
      pick({ ...state.address, layer: state.address.layer + layers, head: state.address.head + heads }),
    );
  shell.key("/", () => (byId("search") ?? byId("pick-query"))?.focus());
}
