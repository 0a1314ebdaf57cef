// Keyboard shortcuts of the long view.

import { ARROWS } from "../dom.js";
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
  for (const key of ["Enter", "Escape"])
    shell.key(key, () => {
      cell.pinned = key === "Enter";
      moved(look);
    });
  for (const [key, factor] of Object.entries({ "+": 0.5, "=": 0.5, "-": 2, "−": 2, 0: 0 }))
    shell.key(key, () => nearer(look, factor));
  for (const [key, [layers, heads]] of Object.entries({ "[": [0, -1], "]": [0, 1], "{": [-1, 0], "}": [1, 0] }))
    shell.key(key, () => {
      const { run, layer, head } = state.address;
      pick({ run, layer: layer + layers, head: head + heads });
    });
}
