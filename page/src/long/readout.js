// The chosen cell in words: query, key, weight with its error bound, rank and the row's sum.

import { MASKED } from "../attention.js";
import { fmt, isolated, within } from "../numbers.js";
import { firstPixel, pixel } from "./source.js";
import { placed } from "./names.js";

/** @param {Shown} shown @param {Say} t */
export function readout(shown, t) {
  const { cell, queryName, keyName, row } = shown;
  const reading = cellValue(shown);
  const names = { query: isolated(placed(queryName, cell.i, 24)), key: isolated(placed(keyName, cell.j, 24)) };
  const read = (/** @type {string} */ value) => t("read", { ...names, value });
  if (!reading) return read(t("computing"));
  if (reading.value === MASKED) return read(t("masked cell"));
  const { shows } = shown.head;
  const effects = shows !== "weights";
  const parts = [read(effects ? `${t(`one ${shows}`)} ${fmt(reading.value)}` : within(reading.value, reading.off))];
  const finite = Number.isFinite(reading.value);
  if (!finite) parts.push(t("nonfinite cell"));
  else if (!reading.exact) parts.push(t("of pixel"));
  if (finite && row) {
    const { rank, of, sum } = placeIn(row, reading.value);
    const { layer, rules, served } = shown.head;
    const sink = layer.sinks && (served || rules.sink > -Infinity);
    parts.push(t("rank here", { rank, of }));
    if (shows === "contributions") parts.push(t("contributions sum", { sum: fmt(sum, 4) }));
    if (!effects)
      parts.push(t(sink ? "sums with sink" : "sums to", { sum: fmt(sum, 6), sink: fmt(Math.max(0, 1 - sum), 4) }));
  }
  return parts.join(" · ");
}

/** The chosen cell's weight and its error bound. @param {Shown} shown */
function cellValue({ head, cell: { i, j }, row }) {
  if (row) {
    return { value: row[j], off: head.computing ? row[j] * head.computing.bound(i) : 0, exact: true };
  }
  const picture = head.small;
  if (!picture) return null;
  const [high, wide] = picture.pixels;
  const index = Math.floor(((i + 0.5) * high) / head.n);
  return {
    ...(j === head.first ? firstPixel(picture, index) : pixel(picture, index, Math.floor(((j + 0.5) * wide) / head.m))),
    exact: high === head.n && wide === head.m,
  };
}

/** A weight's rank in its row, and the row's sum. @param {Float32Array} row @param {number} weight */
function placeIn(row, weight) {
  let [rank, of, sum] = [1, 0, 0];
  for (const other of row) {
    if (other === MASKED) continue;
    of++;
    sum += other;
    if (Math.abs(other) > Math.abs(weight)) rank++;
  }
  return { rank, of, sum };
}
