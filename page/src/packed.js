// Unpacks arrays that are compressed in the page: the first bytes of all numbers, then the second bytes, …, deflated.

import { BYTES, sizeOf } from "./container.js";

/**
 * An array by name, once it is unpacked; from then on page.array(name) has it.
 * @param {Page} page @param {string} name @returns {Promise<NumberArray>}
 */
export async function load(page, name) {
  const entry = page.header.arrays[name];
  const { shape, dtype, packed } = entry;
  if (packed === undefined || page.known(name)) return page.array(name);
  const planes = await inflated(page.bytesOf(entry.at, packed));
  const bytes = together(planes, sizeOf(shape), BYTES[dtype]);
  if (dtype.includes("float")) turnBack(bytes, BYTES[dtype]);
  return page.known(name) ?? page.keep(name, bytes);
}

/** @param {Uint8Array} bytes */
async function inflated(bytes) {
  const stream = new Blob([/** @type {any} */ (bytes)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/**
 * First bytes of all numbers, then second bytes, …: as numbers again.
 * @param {Uint8Array} planes @param {number} size @param {number} width
 */
function together(planes, size, width) {
  if (width === 1) return planes;
  const bytes = new Uint8Array(size * width);
  for (let plane = 0; plane < width; plane++) {
    const from = plane * size;
    for (let i = 0, to = plane; i < size; i++, to += width) bytes[to] = planes[from + i];
  }
  return bytes;
}

/** Moves the sign from the lowest bit back to the highest. @param {Uint8Array} bytes @param {number} width */
function turnBack(bytes, width) {
  if (width > 4) return;
  const words = width === 2 ? new Uint16Array(bytes.buffer) : new Uint32Array(bytes.buffer);
  const top = width * 8 - 1;
  for (let i = 0; i < words.length; i++) words[i] = (words[i] >>> 1) | ((words[i] & 1) << top);
}
