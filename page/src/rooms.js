// The rooms of a page: the answer and the map where it has runs, the steps where it has them. All share one place.

import { answerRoom } from "./answer.js";
import { causesRoom, wordsOf } from "./causes.js";
import { h } from "./dom.js";
import { openLesson } from "./lessons.js";
import { liveRoom } from "./live/room.js";
import { openLong } from "./long/page.js";
import { newPlace } from "./place.js";
import { mostStructured } from "./long/structure.js";
import { openStory } from "./steps.js";

/** @param {Page} page */
export function openRooms(page) {
  const { runs, layers, learning, live } = page.header;
  if (learning) return openLesson(page);
  const place = newPlace(layers ? chosenBySteps(page.header) : mostStructured(runs));
  const map = runs.length ? openLong(page, place) : null;
  const steps = layers ? openStory(page, place) : null;
  const typed = live ? liveRoom(page) : null;
  /** @type {Record<string, boolean>} */
  const opened = { map: location.hash.startsWith("#at=") }; // a link leads to a place on the map
  return (/** @type {Shell} */ shell) => {
    const [answer, words] = [answerRoom(page, shell), wordsOf(page, shell)];
    const running = typed?.(shell) ?? "";
    const [below, inner, whose] = [h("div.steps"), h("div.rooms"), h("b")];
    if (!page.header.why) {
      inner.append(answer.element);
      shell.main.append(inner, running, below);
    } else {
      const fold = (/** @type {string} */ name, /** @type {Child} */ title, /** @type {Child} */ body) => {
        const ontoggle = (/** @type {any} */ { target }) => {
          if (!shell.printing()) opened[name] = target.open;
          dispatchEvent(new Event("resize")); // the map measures its room
        };
        return h("details.fold", { open: opened[name] || shell.printing(), ontoggle }, h("summary", title), body);
      };
      const causes = causesRoom(page, shell, place, answer, (name) => (whose.textContent = name));
      const all = h(
        "div.caused",
        answer.element,
        causes,
        fold("map", whose, inner),
        fold("steps", words.steps, below),
        running,
      );
      shell.main.append(all);
    }
    map?.(shell, inner, answer);
    steps?.(shell, below);
  };
}

/** What a page with steps shows first. @param {any} header @returns {Chosen} */
function chosenBySteps({ chosen, layers }) {
  const layer = Math.max(
    0,
    layers.findIndex((/** @type {any} */ { number }) => number === chosen.layer),
  );
  const query = chosen.query + (chosen.query < 0 ? layers[layer].queries : 0);
  return { run: 0, layer, head: chosen.head, query, key: -1 };
}
