// Rows and columns of the matrix: a query's weights on each key, and each query's weight on a key.

import { largestAt, listOf } from "../numbers.js";
import { MASKED } from "../attention.js";
import { columnOf, rowOf } from "./source.js";
import { tokenAt } from "./units.js";

/** Weights of a unit of queries, by key token: the mean over its queries. @param {Head} head @param {Units} queries @param {number} unit */
export const unitRow = async (head, queries, unit) =>
  joined(await Promise.all(tokensOf(queries, unit).map((i) => rowOf(head, i))), true);

/** Weights on a unit of keys, by query token: the sum over its keys. @param {Head} head @param {Units} keys @param {number} unit */
export const unitColumn = async (head, keys, unit) =>
  joined(await Promise.all(tokensOf(keys, unit).map((j) => columnOf(head, j))), false);

/** @param {Units} units @param {number} unit */
export const tokensOf = (units, unit) =>
  listOf(tokenAt(units, unit + 1) - tokenAt(units, unit), (index) => tokenAt(units, unit) + index);

/** The sum or mean of lines, MASKED where all are. @param {(Float32Array | null)[]} lines @param {boolean} mean */
function joined(lines, mean) {
  const [first] = lines;
  if (!first || lines.length === 1) return first ?? null;
  return first.map((_, index) => {
    const seen = lines.map((line) => /** @type {Float32Array} */ (line)[index]).filter((a) => a !== MASKED);
    return seen.length ? seen.reduce((a, b) => a + b, 0) / (mean ? lines.length : 1) : MASKED;
  });
}

/** A row's weight on a unit of keys: the sum over them, MASKED where all are. @param {Float32Array} row @param {Units} keys @param {number} unit */
export function weightOn(row, keys, unit) {
  let [sum, seen] = [0, false];
  for (let token = tokenAt(keys, unit); token < tokenAt(keys, unit + 1); token++)
    if (row[token] !== MASKED) {
      sum += row[token];
      seen = true;
    }
  return seen ? sum : MASKED;
}

/** A column's weight from a unit of queries: the mean over them. @param {Float32Array} column @param {Units} queries @param {number} unit */
export function weightFrom(column, queries, unit) {
  const sum = weightOn(column, queries, unit);
  return sum === MASKED ? sum : sum / (tokenAt(queries, unit + 1) - tokenAt(queries, unit));
}

/** A line by units instead of tokens; `weightOf` is weightOn or weightFrom. @param {Float32Array | null} line @param {Units} units @param {typeof weightOn} weightOf */
export const inUnits = (line, units, weightOf) =>
  line && units.edges ? Float32Array.from({ length: units.count }, (_, unit) => weightOf(line, units, unit)) : line;

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
