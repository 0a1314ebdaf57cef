// Creates elements from plain values. Text becomes text nodes only, so a token can never be read as HTML.

/**
 * An element's classes, attributes and children.
 * @template {Element} E @param {E} element @param {string[]} classes
 * @param {Filling[]} parts      attributes and listeners first, where there are any; then children
 */
function fill(element, classes, parts) {
  if (classes.length) element.setAttribute("class", classes.join(" "));
  const [first] = parts;
  const plain = first !== null && typeof first === "object" && !(first instanceof Node) && !Array.isArray(first);
  for (const [name, value] of Object.entries(plain ? first : {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style")
      for (const [property, to] of Object.entries(value)) /** @type {any} */ (element).style.setProperty(property, to); // the page's security policy forbids style attributes
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, /** @type {Child[]} */ (plain ? parts.slice(1) : parts));
  return element;
}

export function add(/** @type {Element} */ element, /** @type {Child} */ child) {
  if (Array.isArray(child)) for (const each of child) add(element, each);
  else if (child instanceof Node) element.append(child);
  else if (child !== null && child !== undefined && child !== false) element.append(String(child));
}

/**
 * h("p.note", {lang: "en"}, "text"): an element with classes, attributes and children.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag | `${Tag}.${string}`} name @param {...Filling} parts @returns {HTMLElementTagNameMap[Tag]}
 */
export function h(name, ...parts) {
  const [tag, ...classes] = name.split(".");
  const element = fill(document.createElement(tag), classes, parts);
  if (tag === "button") element.setAttribute("type", "button");
  if (tag === "canvas") element.setAttribute("aria-hidden", "true"); // its content is also written as text
  return /** @type {HTMLElementTagNameMap[Tag]} */ (element);
}

/** @param {string} space */
const inSpace =
  (space) =>
  (/** @type {string} */ name, /** @type {Filling[]} */ ...parts) => {
    const [tag, ...classes] = name.split(".");
    return fill(/** @type {SVGElement} */ (document.createElementNS(space, tag)), classes, parts);
  };

export const svg = inSpace("http://www.w3.org/2000/svg");
export const math = inSpace("http://www.w3.org/1998/Math/MathML");

/** A slider. @param {string} id @param {number} min @param {number} max @param {(value: number) => void} act @param {Record<string, any>} [more] */
export const slider = (id, min, max, act, more) =>
  h("input", { type: "range", id, min, max, ...more, oninput: (/** @type {any} */ e) => act(Number(e.target.value)) });

/**
 * A choice among values, each with its text.
 * @param {string} id @param {(string | number)[][]} options @param {string | number} value
 * @param {(value: string, select: HTMLSelectElement) => void} act
 */
export const select = (id, options, value, act) =>
  h(
    "select",
    { id, onchange: (/** @type {any} */ { target }) => act(target.value, target) },
    options.map(([each, text]) => h("option", { value: each, selected: each === value }, text)),
  );

/** The heading of a table's column. @param {Child} name */
export const columnHead = (name) => h("th", { scope: "col" }, name);

/** A row of a table: its heading, and its cells. @param {Child} name @param {Child[]} cells */
export const tableRow = (name, cells) =>
  h(
    "tr",
    h("th", { scope: "row" }, name),
    cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : h("td", cell))),
  );

/** @param {"table" | `table.${string}`} name @param {Child} heads      cells of the first row @param {Child} rows @param {Child} [caption] */
export const table = (name, heads, rows, caption) =>
  h(name, caption ? h("caption", caption) : null, h("thead", h("tr", heads)), h("tbody", rows));

/** Writes a text where another stands: one that is the same again costs the browser nothing. @param {Element} element @param {string} text */
export const write = (element, text) => void (element.textContent === text || (element.textContent = text));

/** Puts children in place of others; of those that are the same again the old ones stay, which costs the browser nothing. @param {Element} element @param {Element[]} made */
export function renew(element, made) {
  made.forEach((each, index) => {
    const old = element.children[index];
    if (!old) element.append(each);
    else if (!old.isEqualNode(each)) old.replaceWith(each);
  });
  while (element.children[made.length]) element.lastElementChild?.remove();
}

/** Scrolls a box until an element is in its view, and nothing else. @param {Element | null} box @param {Element | null} element */
export function scrollWithin(box, element) {
  if (!box || !element) return;
  const [around, inner] = [box.getBoundingClientRect(), element.getBoundingClientRect()];
  const past = (/** @type {number} */ low, /** @type {number} */ high) => Math.min(0, low) + Math.max(0, high);
  box.scrollTop += past(inner.top - around.top - 5, inner.bottom - around.bottom + 5);
  box.scrollLeft += past(inner.left - around.left - 5, inner.right - around.right + 5);
}

export const byId = (/** @type {string} */ id) => document.getElementById(id);

/** Down and right, by the name of a key. @type {Record<string, [number, number]>} */
export const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/** Lets arrows go from one part of a group to another, which takes the focus. @param {(from: any, down: number, right: number) => any} next */
export const walking = (next) => (/** @type {KeyboardEvent} */ event) => {
  const step = ARROWS[event.key];
  if (!step || event.defaultPrevented) return;
  const to = next(event.target, ...step);
  if (to) /** @type {HTMLElement} */ (event.target).tabIndex = -1;
  if (to) to.tabIndex = 0;
  to?.focus();
  event.preventDefault();
  event.stopPropagation();
};

/** Whether the page is printed: all must be drawn when the listeners of `beforeprint` and their promises are done. */
export const paper = { printing: false };
/** Calls in a later task, on paper before this one ends. @param {() => void} go @param {(go: () => void) => void} [wait] */
export const later = (go, wait = setTimeout) => (paper.printing ? void Promise.resolve().then(go) : wait(go));

/** Lets the browser draw and handle events, then continues at once; a timer would wait four milliseconds. */
export const breathe = () =>
  new Promise((/** @type {(_?: any) => void} */ go) => {
    if (paper.printing) return go();
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = go;
    port2.postMessage(0);
  });

/** Lets it do so in long work, where 8 milliseconds have passed since it last did; says whether they had. */
export function pacer() {
  let since = performance.now();
  return async () => {
    if (performance.now() - since < 8) return false;
    await breathe();
    since = performance.now();
    return true;
  };
}

/** A function that draws in the next frame, once however often it is called until then. @param {() => void} draw */
export function afterwards(draw) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  };
}
