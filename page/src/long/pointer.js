// The pointer on the map: resting on a cell chooses it, a click pins it, dragging and the wheel move the view.

import { moved } from "./cell.js";
import { frameOf, nearer, refresh } from "./mapbox.js";
import { cellAt, settle, zoom } from "./view.js";

/** @typedef {import("./shown.js").Look} Look */

const DRAGGED = 4; // pixels: less is a click
const SLOW = 2 ** 22; // weights: the rows of a larger head wait until the pointer rests

/** @param {Look} look */
export function listen(look) {
  const { parts: { canvas, box }, cell, head } = look;
  const under = (/** @type {MouseEvent} */ event) => {
    const { left, top } = canvas.getBoundingClientRect();
    return cellAt(look, frameOf(look), event.clientX - left, event.clientY - top);
  };
  const isChosen = (/** @type {{i: number, j: number}} */ { i, j }) => i === cell.i && j === cell.j;
  const dragged = listenToDrag(look);
  canvas.addEventListener("pointermove", (event) => {
    if (dragged(event)) return;
    const found = under(event);
    if (!found || cell.pinned || isChosen(found)) return;
    Object.assign(cell, { i: found.i, j: found.j });
    moved(look, head.n * head.m > SLOW ? 60 : 0);
  });
  canvas.addEventListener("click", (event) => {
    const found = under(event);
    if (!found || dragged(event)) return;
    Object.assign(cell, { i: found.i, j: found.j, pinned: !(isChosen(found) && cell.pinned) });
    moved(look);
  });
  canvas.addEventListener("dblclick", () => nearer(look, 0.25));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== box) return;
    const found = under(event);
    if (!found) return;
    event.preventDefault();
    zoom(look, frameOf(look), 2 ** (event.deltaY / 200), found.y, found.x);
    refresh(look);
  }, { passive: false });
}

/** Follows a drag; what is returned says whether an event belongs to one. @param {Look} look */
function listenToDrag(look) {
  const { canvas } = look.parts;
  /** @type {{x: number, y: number, moved: boolean} | null} */
  let drag = null;
  canvas.addEventListener("pointerdown", ({ clientX: x, clientY: y }) => {
    drag = { x, y, moved: false };
    addEventListener("pointerup", () => setTimeout(() => (drag = null)), { once: true });
  });
  canvas.addEventListener("pointermove", ({ buttons, clientX: x, clientY: y }) => {
    if (!drag || !buttons) return;
    const [right, down] = [x - drag.x, y - drag.y];
    if (!drag.moved && Math.hypot(right, down) < DRAGGED) return;
    drag = { x, y, moved: true };
    look.view.x -= right * look.view.step;
    look.view.y -= down * look.view.step;
    settle(look, frameOf(look));
    requestAnimationFrame(() => refresh(look));
  });
  return (/** @type {MouseEvent} */ { type, buttons }) => drag !== null && (type === "click" ? drag.moved : buttons > 0);
}
