// Reads the document inside the page: a JSON header, and arrays, decoded from blocks of text and unpacked when they are
// needed.

import { kept } from "./numbers.js";

/** @type {Record<string, number>} */
export const BYTES = { float64: 8, float32: 4, float16: 2, bfloat16: 2, int32: 4, uint32: 4, uint8: 1 };

/** The document inside a page. @param {(id: string) => string} read the text of one part */
export function openPage(read) {
  /** @type {Header} */
  const header = JSON.parse(read("clearhead"));
  /** @type {Map<number, Uint8Array>} */
  const blocks = new Map();
  /** @type {Map<string, NumberArray>} */
  const arrays = new Map();
  const block = (/** @type {number} */ number) => kept(blocks, number, () => base85(read(`clearhead-${number}`)));
  const bytesOf = (/** @type {number} */ first, /** @type {number} */ length) => {
    const bytes = new Uint8Array(length);
    for (let done = 0; done < length;) {
      const number = Math.floor((first + done) / header.block);
      const from = first + done - number * header.block;
      const part = block(number).subarray(from, Math.min(header.block, from + length - done));
      bytes.set(part, done);
      done += part.length;
    }
    return bytes;
  };
  const keep = (/** @type {string} */ name, /** @type {Uint8Array} */ bytes) => {
    const { shape, dtype } = header.arrays[name];
    const made = { shape, data: numbers(bytes, dtype) };
    arrays.set(name, made);
    return made;
  };
  const array = (/** @type {string} */ name) =>
    arrays.get(name) ?? keep(name, bytesOf(header.arrays[name].at, bytesIn(header.arrays[name])));
  const put = (/** @type {string} */ name, /** @type {number[]} */ shape, /** @type {Numbers} */ data) => {
    header.arrays[name] = { shape, dtype: "float32", at: 0 };
    arrays.set(name, { shape, data });
    return name;
  };
  const known = (/** @type {string} */ name) => arrays.get(name);
  const has = (/** @type {string} */ name) => name in header.arrays;
  return { header, has, array, known, bytesOf, keep, put, version: 0 }; // version: of the run that is shown
}

/** How many bytes an array has where it is not compressed. @param {{shape: number[], dtype: string}} entry */
const bytesIn = ({ shape, dtype }) => sizeOf(shape) * BYTES[dtype];

export const sizeOf = (/** @type {number[]} */ shape) => shape.reduce((a, b) => a * b, 1);

const DIGITS = "!#$%()*+,-./0123456789:;=?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_`abcdefghijklmnopqrstuvwxyz{";
const WORTH = new Uint8Array(128);
for (let i = 0; i < DIGITS.length; i++) WORTH[DIGITS.charCodeAt(i)] = i;

/** Five digits, the lowest first, are four bytes, the lowest first. @param {string} text */
export function base85(text) {
  const words = new Uint32Array(text.length / 5);
  for (let i = 0, first = 0; i < words.length; i++, first += 5) {
    let word = 0;
    for (let place = 4; place >= 0; place--) word = word * 85 + WORTH[text.charCodeAt(first + place)];
    words[i] = word;
  }
  return new Uint8Array(words.buffer);
}

/** @param {Uint8Array} bytes @param {string} dtype @returns {Numbers} */
export function numbers(bytes, dtype) {
  const { buffer } = bytes;
  if (dtype === "float64") return new Float64Array(buffer);
  if (dtype === "float32") return new Float32Array(buffer);
  if (dtype === "int32") return new Int32Array(buffer);
  if (dtype === "uint32") return new Uint32Array(buffer);
  if (dtype === "uint8") return bytes;
  const halves = new Uint16Array(buffer);
  return dtype === "bfloat16" ? fromBrain(halves) : fromHalves(halves);
}

function fromBrain(/** @type {Uint16Array} */ halves) {
  const bits = new Uint32Array(halves.length);
  for (let i = 0; i < halves.length; i++) bits[i] = halves[i] << 16;
  return new Float32Array(bits.buffer);
}

/** The exponents of float32 are larger by 112; the highest, 31, is that of infinity and NaN. */
function fromHalves(/** @type {Uint16Array} */ halves) {
  const bits = Uint32Array.from(halves, (half) => ((half & 0x8000) << 16) | ((half & 0x7fff) << 13));
  const small = new Float32Array(bits.buffer);
  const special = (/** @type {number} */ half) => (half & 1023 ? NaN : half & 0x8000 ? -Infinity : Infinity);
  return small.map((x, place) => ((halves[place] & 0x7c00) === 0x7c00 ? special(halves[place]) : x * 2 ** 112));
}

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

async function inflated(/** @type {Uint8Array} */ bytes) {
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
