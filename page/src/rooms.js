// The rooms of a page: the answer and the map where it has runs, the steps where it has them. All share one place.

import { answerRoom } from "./answer.js";
import { h } from "./dom.js";
import { openLesson } from "./lessons.js";
import { openLong } from "./long/page.js";
import { newPlace } from "./place.js";
import { mostStructured } from "./long/structure.js";
import { openStory } from "./steps.js";

/** @param {Page} page */
export function openRooms(page) {
  const { runs, layers, learning, scale } = page.header;
  if (learning || scale) return openLesson(page);
  const place = newPlace(layers ? chosenBySteps(page.header) : mostStructured(runs));
  const map = runs.length ? openLong(page, place) : null;
  const steps = layers ? openStory(page, place) : null;
  return (/** @type {Shell} */ shell) => {
    const answer = answerRoom(page, shell);
    const [above, below] = [h("div.rooms", answer.element), h("div.steps")];
    shell.main.append(above, below);
    map?.(shell, above, answer);
    steps?.(shell, below);
  };
}

/** What a page with steps shows first. @param {any} header @returns {Chosen} */
function chosenBySteps({ chosen, layers, edited, runs }) {
  const layer = Math.max(
    0,
    layers.findIndex((/** @type {any} */ each) => each.number === chosen.layer),
  );
  const { queries } = layers[layer];
  const run = Math.max(
    0,
    runs.findIndex((/** @type {any} */ each) => each.edited === Boolean(edited)),
  );
  return { run, layer, head: chosen.head, query: chosen.query < 0 ? queries + chosen.query : chosen.query, key: -1 };
}
