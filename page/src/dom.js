// Elements from plain values. Text only ever becomes text nodes, so no token can be anything but text.

/** @typedef {Node | string | number | null | undefined | false | Child[]} Child */

const SPACES = { svg: "http://www.w3.org/2000/svg", math: "http://www.w3.org/1998/Math/MathML" };

/**
 * @param {Element} element
 * @param {Record<string, any>} given
 * @param {Child[]} children
 */
function fill(element, given, children) {
  for (const [name, value] of Object.entries(given)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
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
 * @param {string} name
 * @param {Record<string, any>} [given]
 * @param {...Child} children
 * @returns {HTMLElement}
 */
export const h = (name, given = {}, ...children) => /** @type {HTMLElement} */ (fill(document.createElement(name), given, children));

/**
 * @param {string} name
 * @param {Record<string, any>} [given]
 * @param {...Child} children
 * @returns {SVGElement}
 */
export const svg = (name, given = {}, ...children) =>
  /** @type {SVGElement} */ (fill(document.createElementNS(SPACES.svg, name), given, children));

/**
 * @param {string} name
 * @param {Record<string, any>} [given]
 * @param {...Child} children
 * @returns {Element}
 */
export const math = (name, given = {}, ...children) => fill(document.createElementNS(SPACES.math, name), given, children);
