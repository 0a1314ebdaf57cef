// What can be chosen.

import { h } from "../dom.js";

/** @param {string} label @param {string} id @param {[string, string][]} options @param {string} value @param {(value: string) => void} then */
export function choice(label, id, options, value, then) {
  const made = h("select", { id, onchange: () => then(/** @type {HTMLSelectElement} */ (made).value) }, options.map(([name, text]) => h("option", { value: name, selected: name === value }, text)));
  return h("label", `${label} `, made);
}
