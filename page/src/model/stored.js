// The model that a page holds: its weights and tokenizer, unpacked once somebody may want it.

import { load } from "../packed.js";
import { modelOf } from "./forward.js";
import { tokenizerOf } from "./tokenizer.js";

/** Rows as columns. @param {NumberArray} matrix */
function turned({ shape: [rows, columns], data }) {
  const made = new Float32Array(data.length);
  for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) made[j * rows + i] = data[i * columns + j];
  return made;
}

/** @param {Page} page */
export async function openModel(page) {
  const { live, arrays } = page.header;
  const names = Object.keys(arrays).filter((name) => name.startsWith("live."));
  /** @type {Map<string, Float32Array>} */
  const weights = new Map();
  for (const name of names) {
    const array = await load(page, name);
    const ofLayer = name.startsWith("live.blk") && array.shape.length === 2; // (d_in, d_out)
    weights.set(name.slice(5), ofLayer ? turned(array) : /** @type {Float32Array} */ (array.data));
  }
  const weight = (/** @type {string} */ name) => /** @type {Float32Array} */ (weights.get(name));
  return { ...modelOf(live, weight), ...tokenizerOf(live.vocabulary, live.merges) };
}
