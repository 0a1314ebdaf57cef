// Rows and columns of the matrix: a query's weights on each key, and each query's weight on a key.

import { largestAt } from "../numbers.js";
import { rowOf } from "./source.js";

/** The key with a query's largest weight. @param {Head} head @param {number} query */
export async function strongestKey(head, query) {
  const row = await rowOf(head, query);
  return row ? largestAt(/** @type {any} */ (row)) : 0;
}

/** A column as values of keys, where queries and keys are one text. @param {Float32Array} column @param {number} offset @param {number} length */
export function alongKeys(column, offset, length) {
  const all = new Float32Array(length);
  for (let index = 0; index < column.length; index++)
    if (index + offset >= 0 && index + offset < length) all[index + offset] = column[index];
  return all;
}
