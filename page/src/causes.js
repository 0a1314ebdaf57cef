// What made an answer: the heads that carry it, run again, and every head by what it did. A head that is pointed at, or
// chosen, draws its edges in the text; all numbers are in tables below, folded.

import { ARROWS, columnHead, h, table, tableRow, write } from "./dom.js";
import { drawArcs } from "./long/arcs.js";
import { choice } from "./long/controls.js";
import { captionOf, looksOf, nameOfHead } from "./long/grid.js";
import { bare, filled, fmt, isolated, short, spelled, withSign } from "./numbers.js";

/** @typedef {{layer: number, head: number, query?: number, key?: number, weight: number, effect: number, truth: number, share: number, edge?: any}} Effect */

const signed = (/** @type {number} */ x) => withSign(x, short);
const largest = (/** @type {number[]} */ list) => Math.max(...list.map(Math.abs)) || 1;
const share = (/** @type {number} */ x) => `${short(100 * x)}%`;
const FACTS = ["share", "hidden", "effect"]; // of a part; null where it was not run
const factOf = (/** @type {any} */ part) => (/** @type {string} */ x) =>
  part[x] !== null && (x === "share" ? share : signed)(part[x]);

/** Its text, and what stands in place of the text's first token. @param {any} part */
const nameOf = ({ text, replaced }) => h("bdi", bare(text, 60), replaced && ` → ${spelled(replaced)}`);

/** Blue where it spoke for the token, orange where against it; by the square root. @param {number} x @param {number} most @param {number} [full] */
function tint(x, most, full = 45) {
  const part = full * Math.sqrt(Math.abs(x) / most);
  return { background: `color-mix(in srgb, var(--${x > 0 ? "query" : "key"}) ${part}%, var(--paper))` };
}

/** The sentences, with the names of the tokens in them; nothing where the page holds no causes. @param {Page} page @param {Shell} shell @returns {Record<string, string>} */
export function wordsOf({ header: { why, tokens } }, shell) {
  const spoken = (/** @type {string} */ text) => isolated(spelled(text));
  if (!why) return {};
  const texts = {
    token: spoken(why.token.text),
    answer: isolated(spelled(why.answer, 60)),
    against: spoken(why.against.text),
    first: `0 ${spoken(tokens[0])}`,
  };
  const words = Object.entries(/** @type {Record<string, string>} */ (why.words[shell.language()]));
  return Object.fromEntries(words.map(([key, text]) => [key, filled(text, { head: "{head}", ...texts })]));
}

/**
 * Its elements, in the order of the page.
 * @param {Page} page @param {Shell} shell @param {Place} place @param {Answer} answer
 * @param {(name: string) => void} rename      says whose map is folded below
 */
export function causesRoom(page, shell, place, answer, rename) {
  const { why, tokens, runs } = page.header;
  const words = wordsOf(page, shell);
  const { layers } = runs[0];
  const query = tokens.length - 1;
  const said = h("p.caption", { "aria-live": "off" });
  /** @param {number} layer      its place @param {number} head @param {Partial<Chosen>} [edge] */
  const choose = (layer, head, edge) => {
    const inText = Number(edge?.query) <= query && edge; // the answer's further tokens have no rows here
    place.choose("", { run: 0, layer, head, query, key: -1, ...inText });
  };
  /** What is said of a head, and its edges in the text. @param {number} layer @param {number} head */
  const show = (layer, head) => {
    const name = nameOfHead(layers, layer, head, shell.t);
    write(said, `${name} (${signed(-why.grid[layer][head])}): ${captionOf(page, 0, layer, head, shell)}`);
    const cut = (/** @type {number} */ key) => (choose(layer, head), place.live?.cut(key, query));
    drawArcs(answer.text, query, looksOf(page)?.heads[layer][head] ?? [], place.live && cut);
  };
  const showChosen = () => show(place.chosen.layer, place.chosen.head);
  const grid = gridOf(why, words, layers, choose, show, showChosen, shell);
  const tables = tablesOf(page, words, layers, choose, show, showChosen);
  const follow = () => {
    const { layer, head } = place.chosen;
    grid.mark(layer, head);
    rename(filled(words.map, { head: `${layers[layer].name}.${head}` }));
    showChosen();
  };
  Object.assign(answer, { drawn: showChosen, legend: words.shading });
  answer.point = (token) => {
    const part = why.parts.findLast((/** @type {any} */ each) => each.tokens.includes(token));
    if (!part) return showChosen();
    const facts = FACTS.filter((name) => part[name] !== null).map((name) => `${words[name]} ${factOf(part)(name)}`);
    write(said, `${nameOf(part).textContent}: ${facts.join(" · ")}`);
  };
  place.follow("causes", follow);
  follow();
  tables.folded.append(h("p.aside", words.lead));
  return [tables.carried, h("section.every", grid.element, said), tables.folded];
}

/**
 * Every head as a square of one grid: by layer, or with its name and the largest first.
 * @param {any} why @param {Record<string, string>} words @param {Layer[]} layers @param {(layer: number, head: number) => void} choose @param {(layer: number, head: number) => void} show @param {() => void} rest @param {Shell} shell
 */
function gridOf(why, words, layers, choose, show, rest, shell) {
  let [order, chosen] = ["layer", ""];
  const placeOf = (/** @type {Event} */ { target }) =>
    /** @type {HTMLElement} */ (target).dataset.place?.split(" ").map(Number);
  /** @param {(layer: number, head: number) => void} act */
  const on = (act) => (/** @type {Event} */ event) => {
    const place = placeOf(event);
    if (place) act(place[0], place[1]);
  };
  const cellAt = (/** @type {string} */ place) =>
    /** @type {HTMLElement | null} */ (box.querySelector(`[data-place="${place}"]`));
  const onkeydown = (/** @type {KeyboardEvent} */ event) => {
    const [step, place] = [ARROWS[event.key], placeOf(event)];
    if (!step || !place) return;
    const index = [...box.children].indexOf(/** @type {Element} */ (event.target));
    const to =
      order === "layer" ? cellAt(`${place[0] + step[1]} ${place[1] + step[0]}`) : box.children[index + step[1]];
    event.preventDefault();
    event.stopPropagation();
    /** @type {HTMLElement | null} */ (to)?.focus();
  };
  const pointed = { onpointerover: on(show), onfocusin: on(show), onpointerleave: rest };
  const group = {
    role: "group",
    "aria-label": words.grid,
    style: { "--layers": layers.length, "--rows": why.grid[0].length },
  };
  const box = h("div", { ...group, ...pointed, onclick: on(choose), onkeydown });
  const mark = (/** @type {number} */ layer, /** @type {number} */ head) => {
    const before = cellAt(chosen);
    before?.setAttribute("aria-pressed", "false");
    if (before) before.tabIndex = -1;
    const now = cellAt((chosen = `${layer} ${head}`));
    now?.setAttribute("aria-pressed", "true");
    if (now) now.tabIndex = 0;
  };
  const draw = () => {
    box.className = `effects by-${order}`;
    box.replaceChildren(...cellsOf(why.grid, layers, order === "layer"));
    const [layer, head] = chosen.split(" ").map(Number);
    mark(layer, head);
  };
  const find = (/** @type {any} */ { target }) => {
    const [layer, head] = target.value.trim().split(".");
    const place = layers.findIndex(({ name }) => name === layer);
    if (!cellAt(`${place} ${head}`)) return;
    choose(place, Number(head));
    cellAt(chosen)?.scrollIntoView({ block: "nearest" });
  };
  const named = { placeholder: words.find, "aria-label": words.find };
  const field = h("input", { type: "search", id: "find", ...named, oninput: find });
  for (const digit of "123456789") shell.key(digit, () => (field.focus(), false)); // which types it there
  const orders = ["layer", "effect"].map((name) => [name, words[`by ${name}`]]);
  const pick = choice(words.order, "order", orders, order, (to) => ((order = to), draw()));
  draw();
  return { element: h("div", h("div.headed", h("h2", words.grid), h("div.picks", pick, field)), box), mark };
}

/** The squares, and of a grid by layer the numbers along its sides. @param {number[][]} values @param {Layer[]} layers @param {boolean} byLayer */
function cellsOf(values, layers, byLayer) {
  const most = largest(values.flat());
  const cells = values.flatMap((row, layer) => row.map((x, head) => ({ x, layer, head })));
  if (!byLayer) cells.sort((a, b) => Math.abs(b.x) - Math.abs(a.x));
  const [every, beside] = [layers, values[0]].map(({ length }) => Math.ceil(length / 16));
  const side = (/** @type {string} */ area, /** @type {Child} */ name) =>
    h("small", { style: { "grid-area": area } }, name);
  const tops = layers.map(({ name }, i) => side(`1 / ${i + 2}`, i % every === 0 && name));
  const made = cells.map(({ x, layer, head }) => {
    const name = `${layers[layer].name}.${head}`;
    const style = byLayer ? { ...tint(x, most, 90), "grid-area": `${head + 2} / ${layer + 2}` } : tint(x, most);
    const label = { "aria-label": `${name} ${signed(-x)}`, "aria-pressed": "false", tabindex: -1 };
    return h("button", { style, "data-place": `${layer} ${head}`, ...label }, !byLayer && name);
  });
  return byLayer ? [...tops, ...values[0].map((_, i) => side(`${i + 2} / 1`, i % beside === 0 && i)), ...made] : made;
}

/**
 * The heads that carry it; and folded, the parts of the text, the edges, and what the numbers are.
 * @param {Page} page @param {Record<string, string>} words @param {Layer[]} layers @param {(layer: number, head: number, edge?: Partial<Chosen>) => void} choose
 * @param {(layer: number, head: number) => void} show @param {() => void} rest
 */
function tablesOf({ header: { why } }, words, layers, choose, show, rest) {
  const name = (/** @type {number} */ i) => h("bdi", spelled(why.tokens[i], 14));
  /** @param {Effect} edge */
  const ends = (edge) => [name(Number(edge.query)), " ← ", name(Number(edge.key))];
  /** A row about a head or an edge, which a click chooses. @param {Effect} effect @param {Child[]} cells */
  const rowOf = ({ layer: number, head, query, key }, cells) => {
    const layer = layers.findIndex((each) => each.name === String(number));
    const onclick = () => choose(layer, head, key === undefined ? {} : { query, key });
    const row = tableRow(h("button", { onclick, onfocus: () => show(layer, head) }, `${number}.${head}`), cells);
    row.addEventListener("pointerenter", () => show(layer, head));
    row.addEventListener("pointerleave", rest);
    return row;
  };
  /** @param {string} title @param {Effect[]} list @param {(effect: Effect) => Child[]} cells @param {string[]} columns */
  const block = (title, list, columns, cells) => {
    const most = largest(list.map(({ truth }) => truth));
    const last = (/** @type {Effect} */ { truth }) => h("td", { style: tint(-truth, most) }, signed(truth));
    const rows = list.map((effect) => rowOf(effect, [...cells(effect), last(effect)]));
    return h("section.block", h("h2", title), h("div.pan", table("table", columns.map(columnHead), rows)));
  };
  const weight = (/** @type {number} */ x) => (x < 0.001 ? fmt(x, 1) : x.toFixed(3));
  const { head, ends: edge, weight: a, effect, share: then, off, truth } = words;
  const looks = (/** @type {Effect} */ one) => [h("td", ends(one)), weight(one.weight), share(one.share)];
  const carried = block(words.carried, why.heads, [head, edge, a, then, off], ({ edge: one }) =>
    one ? looks(one) : ["", "", ""],
  );
  carried.classList.add("carried");
  const edges = block(words.edges, why.edges, [head, edge, a, then, truth], looks);
  const parts = why.parts.map((/** @type {any} */ part) => tableRow(nameOf(part), FACTS.map(factOf(part))));
  const columns = [words.part, then, words.hidden, effect].map(columnHead);
  const folded = h(
    "details.fold",
    h("summary", words.numbers),
    h("div.hold", h("section.block", h("h2", words.parts), h("div.pan", table("table", columns, parts))), edges),
    h("p.aside", words.exact, " ", words.gap, " ", words.kept),
  );
  return { carried, folded };
}
