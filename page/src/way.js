// The way from the text to one logit: the residual stream as a line, and along it a box for every part of the model with
// its sizes and what it adds. The numbers add up to the logit.

import { byId, h } from "./dom.js";
import { isolated, short, spelled } from "./numbers.js";
import { section } from "./section.js";

const MOST_LAYERS = 4; // of more than these, each is folded

/** @typedef {{id: number, text: string, logit: number, adds: number[], heads: number[][], bias: number[]}} Choice */

/** With two decimals, so that a reader can add them up; more for what would read as 0. @param {number} x */
const size = (x) => (Math.abs(x) < 0.095 ? short(Math.abs(x)) : Math.abs(x).toFixed(2));
const number = (/** @type {number} */ x) => (x < 0 ? "−" : "") + size(x);
const signed = (/** @type {number} */ x) => (x > 0 ? "+" : "") + number(x);

/** Shows the way to another token. @param {number} id */
export function showWay(id) {
  open("way"); // which draws it
  const pick = /** @type {HTMLSelectElement} */ (byId("pick-next"));
  pick.value = String(id);
  pick.dispatchEvent(new Event("change"));
}

/** Goes to a step; the bar of steps may be a new one. @param {string} step */
const open = (step) => /** @type {HTMLElement | null} */ (document.querySelector(`.map [data-step=${step}]`))?.click();

/** @param {import("./story.js").Story} s @returns {import("./section.js").Section} */
export function waySection(s) {
  const { choices = [], words: both } = s.facts.way;
  const words = both[s.shell.language()];
  const [title, body] = [h("span"), h("div")];
  const named = (/** @type {Choice} */ { text }) => isolated(spelled(text, 20));
  const draw = () => {
    /** @type {Choice} */
    const mine = choices.find((/** @type {Choice} */ { id }) => id === s.state.next) ?? choices[0];
    /** @type {Choice | undefined} */
    const other = choices.find((/** @type {Choice} */ each) => each.id === s.state.less && each !== mine);
    const { position } = s.facts.way;
    /** @type {Record<string, string>} */
    const texts = {
      next: named(mine),
      other: other ? named(other) : "",
      token: isolated(`${position} ${spelled(s.queryName(position), 20)}`),
    };
    const filled = (/** @type {string} */ text) => text.replace(/\{(\w+)\}/g, (_, name) => texts[name]);
    /** @param {"next" | "less"} name @param {Choice | undefined} now @param {Choice[]} list @param {string} [nothing] */
    const pick = (name, now, list, nothing) =>
      h(
        "select",
        {
          id: `pick-${name}`,
          onchange: (/** @type {{target: HTMLSelectElement}} */ { target }) => {
            const focused = document.activeElement === target;
            s.state[name] = Number(target.value);
            draw();
            if (focused) byId(`pick-${name}`)?.focus({ preventScroll: true });
          },
        },
        nothing && h("option", { value: -1 }, nothing),
        list.map((each) => h("option", { value: each.id, selected: each === now }, spelled(each.text, 20))),
      );
    const opened = [...body.querySelectorAll("details")].map((each) => each.open);
    title.replaceChildren(filled(other ? words.minus : words.title));
    body.replaceChildren(
      h(
        "div.picks",
        h("label", words.of, pick("next", mine, choices)),
        h(
          "label",
          words.less,
          pick(
            "less",
            other,
            choices.filter((/** @type {Choice} */ each) => each !== mine),
            words.nothing,
          ),
        ),
      ),
      h("p.aside", words.constant),
      picture(s, words, filled, mine, other, opened),
      h(
        "p.aside",
        words.notes.map((/** @type {string} */ note) => [note, h("br")]),
      ),
    );
  };
  if (choices.length) draw();
  else (body.append(words.no), title.append(words.title));
  return section(s, { id: "way", symbol: "Σ", title, says: () => "", body: () => body });
}

/**
 * @param {import("./story.js").Story} s @param {any} words @param {(text: string) => string} filled
 * @param {Choice} mine @param {Choice | undefined} other      whose way is subtracted
 * @param {boolean[]} opened      which layers were open, if they were drawn before
 */
function picture(s, words, filled, mine, other, opened) {
  /** @type {{kind: string, layer: number | null}[]} */
  const parts = s.facts.way.parts;
  const adds = mine.adds.map((x, at) => x - (other?.adds[at] ?? 0));
  let sum = 0;
  const sums = adds.map((x) => (sum += x));
  /** @type {number[][]} places of parts: alone, or with the others of their layer */
  const groups = [];
  parts.forEach(({ layer }, at) => {
    const last = groups.at(-1);
    if (last && layer !== null && parts[last[0]].layer === layer) last.push(at);
    else groups.push([at]);
  });
  const totals = groups.map((group) => group.reduce((total, at) => total + adds[at], 0));
  const most = Math.max(...[...adds, ...totals].map(Math.abs)) || 1;
  const figures = (/** @type {number} */ x, /** @type {number} */ after) => [
    h("span.track", h("span", { class: x < 0 ? "share less" : "share", style: share(x, most) })),
    h("span.figures", signed(x)),
    h("span.figures", number(after)),
  ];
  const box = (/** @type {string | null} */ name) => name && h("small.box", name);
  const row = (/** @type {number} */ at) => {
    const { kind, layer } = parts[at];
    const [read, wrote] = words.norms[at];
    const own = mine.heads[at].map((x, head) => x - (other?.heads[at][head] ?? 0));
    return h(
      "li",
      { class: `part ${kind}` },
      h("span.boxes", [box(read), h("span.box", words.parts[at]), box(wrote)]),
      figures(adds[at], sums[at]),
      own.length
        ? h(
            "div.heads-of",
            own.map((x, head) =>
              h(
                "button",
                {
                  onclick: () => openHead(s, layer, head),
                  "aria-label": `${words.layers[Number(layer)]}, ${s.t("head")} ${head}: ${signed(x)}`,
                },
                h("small", head),
                ` ${signed(x)}`,
              ),
            ),
            h("small", `${words.bias} ${signed(mine.bias[at] - (other?.bias[at] ?? 0))}`),
          )
        : null,
    );
  };
  const folded = groups.filter(([at]) => parts[at].layer !== null).length > MOST_LAYERS;
  const layerOf = (/** @type {number[]} */ group, /** @type {number} */ place) =>
    h(
      "li",
      h(
        "details",
        { open: opened.length ? opened.shift() : !folded },
        h(
          "summary.part",
          h("strong", words.layers[Number(parts[group[0]].layer)]),
          figures(totals[place], sums[/** @type {number} */ (group.at(-1))]),
        ),
        h("ol", group.map(row)),
      ),
    );
  const total = mine.logit - (other?.logit ?? 0);
  return h(
    "ol.way-parts",
    h(
      "li.part",
      h("small", filled(words.stream)),
      h("span"),
      h("small.figures", words.adds),
      h("small.figures", words.sums),
    ),
    groups.map((group, place) => (parts[group[0]].layer === null ? row(group[0]) : layerOf(group, place))),
    h(
      "li.part.total",
      h("span", filled(words.logit) + (other ? filled(" − {other}") : "")),
      h("span.figures", number(total)),
    ),
  );
}

/** A bar from the middle of its track to the right, or to the left where it takes away. @param {number} x @param {number} most */
function share(x, most) {
  const width = (50 * Math.abs(x)) / most;
  return { width: `${Math.max(0.5, width)}%`, "margin-left": `${x < 0 ? 50 - width : 50}%` };
}

/** Shows a head's weights. @param {import("./story.js").Story} s @param {number | null} layer @param {number} head */
function openHead(s, layer, head) {
  const place = s.page.header.layers.findIndex((/** @type {any} */ each) => each.number === layer);
  s.commit({ layer: place, head, key: -1 });
  open("weights");
}
