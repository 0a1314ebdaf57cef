// The pointer on the map: hovering chooses a cell, a click pins it; dragging, pinching and the wheel move the view.

import { frameOf, moved, nearer, refresh } from "./look.js";
import { cellAt, settle, zoom } from "./view.js";

const DRAGGED = 4; // pixels: less is a click
const SLOW = 2 ** 22; // weights: in a larger head, rows are computed only when the pointer rests

export function listen(/** @type {Look} */ look) {
  const { chosen, head, state, place } = look;
  const { canvas, box } = look.parts;
  const under = (/** @type {MouseEvent} */ event) => {
    const { left, top } = canvas.getBoundingClientRect();
    return cellAt(look, frameOf(look), event.clientX - left, event.clientY - top);
  };
  /** A cell becomes the chosen one; says whether it was that already. @param {{i: number, j: number}} spot */
  const take = ({ i, j }) => {
    const was = i === chosen.query && j === chosen.key;
    state.quiet = false;
    place.choose("map", { query: i, key: j });
    return was;
  };
  const dragged = listenToDrag(look);
  canvas.addEventListener("pointermove", (event) => {
    if (dragged(event)) return;
    const spot = under(event);
    if (spot && !state.pinned && !take(spot)) moved(look, head.n * head.m > SLOW ? 60 : 0);
  });
  canvas.addEventListener("click", (event) => {
    const spot = under(event);
    if (!spot || dragged(event)) return;
    state.pinned = !(take(spot) && state.pinned);
    moved(look);
  });
  canvas.addEventListener("dblclick", () => (place.live ? place.live.cut() : nearer(look, 0.25)));
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== box) return;
      const spot = under(event);
      if (!spot) return;
      event.preventDefault();
      zoom(look, frameOf(look), 2 ** (event.deltaY / 200), spot.y, spot.x);
      refresh(look);
    },
    { passive: false },
  );
}

/** Drags and pinches the view. Returns a function that tells whether an event belongs to a drag. @param {Look} look */
function listenToDrag(look) {
  const { canvas } = look.parts;
  /** @type {Map<number, {x: number, y: number}>} */
  const down = new Map();
  let dragging = false;
  const mean = (/** @type {"x" | "y"} */ axis) => [...down.values()].reduce((sum, at) => sum + at[axis], 0) / down.size;
  const middle = () => ({ x: mean("x"), y: mean("y") });
  const spread = () => {
    const [a, b] = down.values();
    return b ? Math.hypot(a.x - b.x, a.y - b.y) : 0;
  };
  canvas.addEventListener("pointerdown", ({ pointerId, clientX: x, clientY: y }) => {
    if (!down.size) dragging = false;
    down.set(pointerId, { x, y });
    canvas.setPointerCapture(pointerId);
  });
  const up = (/** @type {PointerEvent} */ { pointerId }) => void setTimeout(() => down.delete(pointerId));
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointermove", ({ pointerId, buttons, clientX: x, clientY: y }) => {
    const from = down.get(pointerId);
    if (!from || !buttons) return;
    if (!dragging && Math.hypot(x - from.x, y - from.y) < DRAGGED) return;
    dragging = true;
    const [before, wide] = [middle(), spread()];
    down.set(pointerId, { x, y });
    const after = middle();
    const f = frameOf(look);
    look.view.x -= (after.x - before.x) * look.view.step;
    look.view.y -= (after.y - before.y) * look.view.step;
    const { left, top } = canvas.getBoundingClientRect();
    const spot = wide && cellAt(look, f, after.x - left, after.y - top);
    if (spot) zoom(look, f, wide / Math.max(1, spread()), spot.y, spot.x);
    else settle(look, f);
    requestAnimationFrame(() => refresh(look));
  });
  return (/** @type {MouseEvent} */ { type, buttons }) => down.size > 0 && (type === "click" ? dragging : buttons > 0);
}
