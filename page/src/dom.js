// Creates elements from plain values. Text becomes text nodes only, so a token can never be read as HTML.

/** @typedef {Node | string | number | null | undefined | false | Child[]} Child */

const SPACES = { svg: "http://www.w3.org/2000/svg", math: "http://www.w3.org/1998/Math/MathML" };

/**
 * @param {Element} element
 * @param {string[]} classes
 * @param {(Record<string, any> | Child)[]} given      attributes and listeners first, where there are any; then children
 */
function fill(element, classes, given) {
  if (classes.length) element.setAttribute("class", classes.join(" "));
  const [first] = given;
  const plain = first !== null && typeof first === "object" && !(first instanceof Node) && !Array.isArray(first);
  for (const [name, value] of Object.entries(plain ? first : {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style")
      for (const [property, to] of Object.entries(value)) /** @type {any} */ (element).style.setProperty(property, to); // the page's security policy forbids style attributes
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, /** @type {Child[]} */ (plain ? given.slice(1) : given));
  return element;
}

/**
 * @param {Element} element
 * @param {Child} child
 */
export function add(element, child) {
  if (Array.isArray(child)) for (const each of child) add(element, each);
  else if (child instanceof Node) element.append(child);
  else if (child !== null && child !== undefined && child !== false) element.append(String(child));
}

/**
 * h("p.note", {lang: "en"}, "text"): an element with classes, attributes and children.
 * @param {string} name
 * @param {...(Record<string, any> | Child)} given
 * @returns {HTMLElement}
 */
export function h(name, ...given) {
  const [tag, ...classes] = name.split(".");
  const made = fill(document.createElement(tag), classes, given);
  if (tag === "button") made.setAttribute("type", "button");
  if (tag === "canvas") made.setAttribute("aria-hidden", "true"); // its content is also written as text
  return /** @type {HTMLElement} */ (made);
}

/** Whether the reader wants nothing to move by itself. */
export const isStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** A slider. @param {string} id @param {number} min @param {number} max @param {(value: number) => void} act @param {Record<string, any>} [more] */
export const slider = (id, min, max, act, more) =>
  /** @type {HTMLInputElement} */ (
    h("input", {
      type: "range",
      id,
      min,
      max,
      ...more,
      oninput: (/** @type {any} */ { target }) => act(Number(target.value)),
    })
  );

/** A box to tick. @param {string} id @param {(on: boolean) => void} act @param {boolean} [checked] */
export const tickbox = (id, act, checked) =>
  /** @type {HTMLInputElement} */ (
    h("input", { type: "checkbox", id, checked, onchange: (/** @type {any} */ { target }) => act(target.checked) })
  );

const inSpace =
  (/** @type {string} */ space) =>
  (/** @type {string} */ name, /** @type {(Record<string, any> | Child)[]} */ ...given) => {
    const [tag, ...classes] = name.split(".");
    return fill(document.createElementNS(space, tag), classes, given);
  };

export const svg = /** @type {(name: string, ...given: (Record<string, any> | Child)[]) => SVGElement} */ (
  inSpace(SPACES.svg)
);
export const math = inSpace(SPACES.math);

/** Writes a text where another stands: one that is the same again costs the browser nothing. @param {Element} element @param {string} text */
export const write = (element, text) => void (element.textContent === text || (element.textContent = text));

/** Puts children in place of others; of those that are the same again the old ones stay, which costs the browser nothing. @param {Element} element @param {Element[]} made */
export function renew(element, made) {
  const old = [...element.children];
  made.forEach((each, at) => {
    if (!old[at]) element.append(each);
    else if (!old[at].isEqualNode(each)) old[at].replaceWith(each);
  });
  for (const each of old.slice(made.length)) each.remove();
}

/** @param {string} id */
export const byId = (id) => document.getElementById(id);

/** Lets the browser draw and handle events, then continues at once; a timer would wait four milliseconds. */
export const breathe = () =>
  new Promise((go) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = go;
    port2.postMessage(0);
  });

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
