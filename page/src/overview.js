// Below the answer: the whole model as one picture, from the text to the next word, and below it the chosen head, from its
// queries to what its layer adds. Sizes and numbers are the page's own; every part is a door to its numbers.

import { css, signed } from "./colour.js";
import { ARROWS, h, svg } from "./dom.js";
import { listOf, percent, short, spelled, withSign } from "./numbers.js";
import { openStep } from "./section.js";

const [GAP, HIGH, FEW, CELL, TALL] = [20, 42, 4, 12, 64]; // FEW: of more layers each is a column, whose heads are TALL
const pen = /** @type {CanvasRenderingContext2D} */ (h("canvas").getContext("2d"));

/**
 * A part of the picture. `stream`: does it read the residual stream (r), write to it (w)? `adds`: to the logit of the
 * answer's first token; `cells`: what its heads do, of which `chosen` is one; `below`: its layer's number, below a column.
 * @typedef {{id: string, name: string, says?: string, stream?: string, adds?: number[], cells?: (number | null)[], chosen?: number, below?: string, column?: boolean, go?: (head?: number) => void}} Part
 * @typedef {Part & {wide: number, x: number, y: number}} Box
 */

/** @param {Part & {wide?: number}} part @returns {Box} */
function boxOf(part) {
  const widthOf = (/** @type {string} */ text, /** @type {number} */ size) => {
    pen.font = `${size}px system-ui, sans-serif`;
    return pen.measureText(text).width;
  };
  const widths = [widthOf(part.name, 13), widthOf(part.says ?? "", 11), CELL * (part.cells?.length ?? 0), 44];
  return { x: 0, y: 0, ...part, wide: part.wide ?? Math.max(...widths) + 16 };
}

/** Puts boxes into rows, above each room for the stream; returns where they end. @param {Box[]} boxes @param {number} width @param {number} top @param {number} above */
function flow(boxes, width, top, above) {
  let [x, y, bottom] = [0, top + above, top];
  for (const [place, box] of boxes.entries()) {
    const together = box.column && !boxes[place - 1]?.column ? boxes.filter(({ column }) => column).length : 1;
    if (x && x + together * box.wide > width + 1) [x, y] = [0, bottom + above];
    Object.assign(box, { x, y });
    x += box.wide + (box.column && boxes[place + 1]?.column ? 0 : GAP);
    bottom = Math.max(bottom, y + (box.column ? TALL + 44 : HIGH) + (box.adds && !box.column ? 26 : 8));
  }
  return bottom;
}

/** Scrolls to an element and gives it the focus. @param {string} what */
function goTo(what) {
  const element = /** @type {HTMLElement | null} */ (document.querySelector(what));
  element?.scrollIntoView({ block: "center" });
  element?.focus({ preventScroll: true });
}

/** From the text to the next word. @param {Page} page @param {Place} place @param {Shell} shell @param {any} way      of the record: a run in this page has the same parts @param {number} width @returns {Box[]} */
function modelBoxes({ header }, place, shell, way, width) {
  const { t } = shell;
  const { facts, tokens, why, layers, arrays } = header;
  const { layer: at, head: now } = place.chosen;
  const wide = arrays[layers[at].arrays.x]?.shape.at(-1);
  const given = facts.way?.choices[0].adds;
  /** A part of the model: its name, its sizes and what it adds. @param {number | null} layer @param {...string} kinds */
  const partOf = (layer, ...kinds) => {
    const is = (/** @type {any} */ part) => part.layer === layer && kinds.includes(part.kind);
    const places = listOf(way?.parts.length ?? 0, (place) => place).filter((place) => is(way.parts[place]));
    const [name, says] = (way?.words[shell.language()].parts[places[0]] ?? "").split(/, |; |，|；/);
    const adds = given && places.length ? [places.reduce((sum, place) => sum + given[place], 0)] : undefined;
    return { name, says, adds, go: given && (() => openStep("way")) };
  };
  const open =
    (/** @type {number} */ layer) =>
    (/** @type {number} */ head = -1) => {
      const best = why ? why.grid[layer].indexOf(Math.max(...why.grid[layer])) : 0;
      place.choose("", { layer, head: head < 0 ? (layer === at ? now : best) : head, key: -1 });
      if (head < 0) goTo(".front [aria-pressed=true]");
      else openStep("weights");
    };
  const toText = () => goTo(place.live ? "#try-text, #serve-text" : ".passage .token");
  const embeddings = { ...partOf(null, "token", "position"), name: t("overview embeddings"), stream: "w" };
  const start = [
    boxOf({ id: "text", name: t("overview text"), says: t("overview tokens", { n: tokens.length }), go: toText }),
    boxOf({ id: "embeddings", ...embeddings, says: wide ? `${tokens.length} × ${wide}` : "" }),
  ];
  const [word, share] = facts.next?.[0] ?? [];
  const last = partOf(null, "unembedding");
  const end = last.name ? [boxOf({ id: "unembedding", stream: "r", ...last, adds: undefined })] : [];
  if (word)
    end.push(boxOf({ id: "next", name: spelled(word, 14), says: percent(share), go: () => goTo("#next button") }));
  const column = layers.length > FEW;
  const room = width - [...start, ...end].reduce((total, box) => total + box.wide + GAP, GAP);
  const each = Math.min(26, (room > 8 * layers.length ? room : width) / layers.length);
  const middle = layers.flatMap((/** @type {any} */ { number, heads: count }, /** @type {number} */ layer) => {
    const [attention, mlp] = [partOf(number, "attention"), partOf(number, "mlp")];
    const heads = {
      name: t("overview attention", { layer: number ?? layer }),
      says: t("overview heads", { count }),
      stream: "rw",
      go: open(layer),
    };
    const cells = why?.grid[layer] ?? Array(count).fill(null);
    const box = { id: `layer-${layer}`, ...attention, ...heads, cells, chosen: layer === at ? now : -1 };
    if (column)
      return boxOf({
        ...box,
        below: layer % Math.ceil(20 / each) ? "" : String(number ?? layer),
        adds: given && [attention, mlp].map(({ adds }) => adds?.[0] ?? 0),
        column,
        wide: each,
      });
    return mlp.name ? [boxOf(box), boxOf({ id: `mlp-${layer}`, stream: "rw", ...mlp })] : boxOf(box);
  });
  return [...start, ...middle, ...end];
}

/** The steps of the chosen head. @param {Page} page @param {Place} place @param {Say} t @returns {Box[]} */
function headBoxes({ header: { layers } }, { chosen }, t) {
  const { queries, keys, steps } = layers[chosen.layer];
  const made = steps.map((/** @type {any} */ { name, formula, shape, axes }) => {
    const id = name === "q" ? "qkv" : name;
    if (!/^(qkv|scores|scaled|capped|biased|masked|weights|heads|output)$/.test(id)) return [];
    const size = axes.flatMap((/** @type {string} */ axis, /** @type {number} */ at) =>
      /heads$/.test(axis) ? [] : (/** @type {any} */ ({ queries, keys })[axis] ?? shape[at]),
    );
    const sizes = name === "scaled" ? formula.split(" = ")[1].replace("S/", "÷ ") : size.join(" × ");
    const title = t(/^(capped|biased)$/.test(id) ? id : `stop ${id}`).replace("^O", "ᴼ");
    return boxOf({
      id: `step-${id}`,
      name: title,
      says: id === "qkv" ? `3 × (${sizes})` : sizes,
      go: () => openStep(id),
    });
  });
  return made.flat();
}

/** @param {Box} box       to which it leads */
const arrow = ({ x, y }) => svg("path.arrow", { d: `M${x - GAP + 3} ${y + HIGH / 2}h${GAP - 6}m-5 -3l5 3 -5 3` });

/** The residual stream above a row of boxes, and how they read it and add to it. @param {Box[]} row */
function streamOf(row) {
  const along = row.filter(({ stream }) => stream);
  if (!along.length) return null;
  const [from, to, y] = [along[0], along[along.length - 1], row[0].y];
  const marks = along
    .filter(({ column }) => !column)
    .map(({ x, wide, stream = "" }) => [
      /r/.test(stream) && svg("path.arrow", { d: `M${x + 10} ${y - 10}v8m-3 -4l3 4 3 -4` }),
      /w/.test(stream) && svg("path.arrow", { d: `M${x + wide - 10} ${y}v-10` }),
      /w/.test(stream) && svg("circle.plus", { cx: x + wide - 10, cy: y - 10, r: 4 }),
    ]);
  return [svg("path.stream", { d: `M${from.x + 4} ${y - 10}H${to.x + to.wide - 4}` }), marks];
}

/** @param {Box} box @param {number} most      of what parts add @param {Shade} tint */
function drawn({ id, name, says, go, adds = [], cells = [], chosen, below, column, wide, x, y }, most, tint) {
  const label = (/** @type {string} */ kind, /** @type {number} */ at, /** @type {Child} */ text) =>
    svg(`text.middle${kind}`, { x: x + wide / 2, y: y + at }, text);
  const told = [name, says, ...adds.map((value) => withSign(value, short))].filter(Boolean).join(", ");
  const [size, left] = [column ? Math.min(8, TALL / cells.length) : CELL, x + wide / 2 - (cells.length * CELL) / 2];
  const heads = cells.map((value, head) => {
    const at = column
      ? { x: x + 1, y: y + head * size, width: wide - 2, height: size - 0.5 }
      : { x: left + head * CELL, y: y + 23, width: CELL - 2, height: CELL };
    const onclick = (/** @type {Event} */ event) => (event.stopPropagation(), go?.(head));
    const style = value === null ? null : { fill: css(tint.colour(value)) };
    return svg(head === chosen ? "rect.cell.now" : "rect.cell", { ...at, style, onclick });
  });
  const bars = adds.map((value, place) => {
    const [long, kind, half] = [Math.abs(value) / most, value < 0 ? "rect.adds.less" : "rect.adds", (wide - 3) / 2];
    if (!column) return svg(kind, { x, y: y + HIGH + 3, width: Math.max(1, long * wide), height: 5 });
    const tall = Math.max(0.5, long * 13);
    return svg(kind, { x: x + 1 + place * half, y: y + TALL + 16 - (value < 0 ? 0 : tall), width: half, height: tall });
  });
  const frame = column
    ? svg("rect.column", { x, y: y - 3, width: wide, height: TALL + 34 })
    : svg("rect.box", { x, y, width: wide, height: HIGH, rx: 6 });
  const words = column
    ? label(".small", TALL + 42, below)
    : [
        label("", cells.length ? 15 : 18, name),
        cells.length ? null : label(".small", 34, says),
        adds.length > 0 && label(".small", HIGH + 21, withSign(adds[0], short)),
      ];
  const act = go && { role: "button", tabindex: -1, "data-door": id, onclick: () => go() };
  return svg(go ? "g.door" : "g", { ...act, "data-part": id }, svg("title", told), frame, heads, bars, words);
}

/** Arrows go from door to door, Enter opens one. @param {KeyboardEvent} event */
function walk(event) {
  const [step, door] = [ARROWS[event.key], /** @type {SVGElement} */ (event.target)];
  if (!step && event.key !== "Enter" && event.key !== " ") return;
  event.preventDefault();
  event.stopPropagation();
  if (!step) return void door.dispatchEvent(new MouseEvent("click", { bubbles: true }));
  const doors = [.../** @type {NodeListOf<SVGElement>} */ (door.parentElement?.querySelectorAll(".door"))];
  const next = doors[doors.indexOf(door) + step[0] + step[1]];
  next?.setAttribute("tabindex", "0");
  next?.focus();
  if (next) door.setAttribute("tabindex", "-1");
}

/** @param {Page} page @param {Place} place @param {Child} tour      what begins it */
export function overviewRoom(page, place, tour) {
  const { header } = page;
  const way = header.facts?.way;
  const [title, how, host] = [h("h2", { id: "overview" }), h("p.note"), h("div.picture")];
  /** @type {Shell} */
  let shell;
  const draw = () => {
    const { t } = shell;
    const { facts, why, layers } = header;
    const { layer, head } = place.chosen;
    const width = Math.max(280, host.clientWidth);
    const model = facts?.text === undefined ? [] : modelBoxes(page, place, shell, way, width);
    const inside = headBoxes(page, place, t);
    const below = model.length ? flow(model, width, 0, 20) + 14 : 14;
    const height = flow(inside, width, below + 6, 4);
    const most = Math.max(...model.flatMap(({ adds = [] }) => adds.map(Math.abs))) || 1;
    const tint = signed("contributions", Math.max(0, ...(why?.grid ?? []).flat().map(Math.abs)) || 1, true);
    const focused = document.activeElement?.getAttribute("data-door");
    title.textContent = t(model.length ? "overview" : "overview head");
    how.textContent = t(facts?.way ? "overview how" : "overview plain", { token: spelled(way?.choices[0].text ?? "") });
    const rows = [...new Set(model.map(({ y }) => y))].map((y) => model.filter((box) => box.y === y));
    const ends = [...inside.slice(1), ...model.filter(({ id }) => /^(embeddings|next)$/.test(id))].filter(({ x }) => x);
    const named = t("overview inside", { layer: layers[layer].number ?? layer, head });
    const made = [
      ...[rows.map(streamOf), ends.map(arrow), svg("text.heading", { x: 0, y: below }, named)],
      [...model, ...inside].map((box) => drawn(box, most, tint)),
    ];
    host.replaceChildren(
      svg("svg", { role: "group", "aria-label": title.textContent, width, height, onkeydown: walk }, ...made),
    );
    const doors = /** @type {SVGElement[]} */ ([...host.querySelectorAll(".door")]);
    const again = doors.find((door) => door.getAttribute("data-door") === focused);
    (again ?? doors[0])?.setAttribute("tabindex", "0");
    again?.focus({ preventScroll: true });
  };
  let known = 0;
  new ResizeObserver(() => {
    if (host.clientWidth && host.clientWidth !== known) draw();
    known = host.clientWidth;
  }).observe(host);
  return {
    element: h("section.overview", { "aria-labelledby": "overview" }, h("div.headed", title, how, tour), host),
    draw(/** @type {Shell} */ now) {
      shell = now;
      place.follow("overview", draw);
      draw();
    },
  };
}
