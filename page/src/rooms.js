// The rooms of a page: the answer and the map where it has runs, the steps where it has them. All share one place.

import { parts } from "./address.js";
import { answerRoom } from "./answer.js";
import { causesRoom, wordsOf } from "./causes.js";
import { add, h, paper } from "./dom.js";
import { openLesson } from "./lessons.js";
import { liveBar } from "./live/bar.js";
import { openLive } from "./live/room.js";
import { openServed } from "./live/served.js";
import { nameOfHead } from "./long/grid.js";
import { openLong } from "./long/page.js";
import { overviewRoom } from "./overview.js";
import { filled } from "./numbers.js";
import { mostStructured, newPlace } from "./place.js";
import { openStory } from "./steps.js";
import { openTour } from "./tour.js";

/** @param {Page} page @param {(page: Page, place: Place) => Live} [served]      what runs the model where the page does not hold it
 * @returns {(shell: Shell) => void} */
export function openRooms(page, served) {
  const { header } = page;
  const { runs, layers, learning, why } = header;
  if (learning) return openLesson(page);
  if (header.serve) return openServed(page, openRooms);
  const place = newPlace(layers ? chosenBySteps(header) : mostStructured(runs));
  const steps = layers ? openStory(page, place) : null;
  const map = runs.length ? openLong(page, place) : null; // which goes where the address says
  const open = served ?? (header.live && openLive);
  /** @type {Live | null} */
  const live = open ? (place.live = open(page, place)) : null;
  /** @type {Record<string, boolean>} */
  const opened = { map: parts().has("at") }; // a link leads to a place on the map
  const tour = header.facts?.text === undefined || !layers ? null : openTour(page, place);
  return (/** @type {Shell} */ shell) => {
    const answer = answerRoom(page, shell, live, live && (live.bar?.(shell) ?? liveBar(page, place, live, shell)));
    const overview = layers && overviewRoom(page, place, tour?.start);
    const [below, inner, whose, causes] = [h("div.steps"), h("div.rooms"), h("b"), h("div.causes")];
    const front = h("section.front");
    const fold = (/** @type {string} */ name, /** @type {Child} */ title, /** @type {Child} */ body) => {
      const ontoggle = (/** @type {any} */ { target }) => {
        if (!paper.printing) opened[name] = target.open;
        dispatchEvent(new Event("resize")); // the map measures its room
        place.again();
      };
      return h("details.fold", { open: opened[name] || paper.printing, ontoggle }, h("summary", title), body);
    };
    const follow = () => {
      const { layer, head } = place.chosen;
      const { map } = wordsOf(page, shell);
      const name = map ? `${runs[0].layers[layer].name}.${head}` : nameOfHead(runs[0].layers, layer, head, shell.t);
      whose.textContent = map ? filled(map, { head: name }) : name;
      answer.show();
    };
    if (why) place.follow("causes", follow);
    const draw = () => {
      if (header.why) {
        const [carried, folded] = causesRoom(page, shell, place, answer);
        causes.replaceChildren(carried, front, folded);
      } else if (why) causes.replaceChildren(front);
      map?.(shell, inner, answer, front);
      steps?.(shell, below);
      overview?.draw(shell);
      tour?.draw(shell);
      if (why) follow();
    };
    if (why) {
      const folded = [fold("map", whose, inner), fold("steps", wordsOf(page, shell).steps, below)];
      shell.main.append(h("div.caused", answer.element, overview?.element, causes, folded));
    } else {
      add(inner, [answer.element, overview?.element, front]);
      shell.main.append(inner, below);
    }
    draw();
    place.again();
    if (!live) return;
    live.redraw = () => {
      answer.fill();
      causes.classList.remove("stale");
      draw();
    };
    live.outdate = (on) => on && causes.classList.add("stale");
    live.update();
  };
}

/** What a page with steps shows first. @param {any} header @returns {Chosen} */
function chosenBySteps({ chosen, layers }) {
  const at = layers.findIndex((/** @type {any} */ { number }) => number === chosen.layer);
  const layer = Math.max(0, at);
  const query = chosen.query + (chosen.query < 0 ? layers[layer].queries : 0);
  return { run: 0, layer, head: chosen.head, query, key: -1 };
}
