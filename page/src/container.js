// Reads the document inside the page: a JSON header, and arrays, all of them compressed and written as text; an array is
// unpacked when it is needed.

import { kept } from "./numbers.js";

/** The document inside a page. @param {(id: string) => string} read the text of one part */
export async function openPage(read) {
  /** @type {Header} */
  const header = JSON.parse(new TextDecoder().decode(await inflated(base85(read("clearhead")))));
  /** @type {Map<number, Uint8Array<ArrayBuffer>>} */
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
  const put = (/** @type {string} */ name, /** @type {number[]} */ shape, /** @type {Numbers} */ data) => {
    header.arrays[name] = { shape, dtype: "float32", at: 0, packed: 0 };
    arrays.set(name, { shape, data });
    return name;
  };
  const array = (/** @type {string} */ name) => /** @type {NumberArray} */ (arrays.get(name)); // once it is unpacked
  const has = (/** @type {string} */ name) => name in header.arrays;
  return { header, has, array, arrays, bytesOf, put, version: 0 }; // version: of the run that is shown
}

export const sizeOf = (/** @type {number[]} */ shape) => shape.reduce((a, b) => a * b, 1);

const DIGITS = "!#$%()*+,-./0123456789:;=?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_`abcdefghijklmnopqrstuvwxyz{";
const WORTH = new Uint8Array(128);
for (let i = 0; i < DIGITS.length; i++) WORTH[DIGITS.charCodeAt(i)] = i;

/** Five digits, the lowest first, are four bytes, the lowest first; of the last bytes each has one digit, and one more. @param {string} text */
export function base85(text) {
  const words = new Uint32Array(Math.ceil(text.length / 5));
  for (let i = 0, first = 0; i < words.length; i++, first += 5) {
    let word = 0;
    for (let place = 4; place >= 0; place--) word = word * 85 + (WORTH[text.charCodeAt(first + place)] ?? 0);
    words[i] = word;
  }
  return new Uint8Array(words.buffer, 0, Math.floor((text.length * 4) / 5));
}

const KINDS = {
  float64: Float64Array,
  float32: Float32Array,
  int32: Int32Array,
  uint32: Uint32Array,
  uint8: Uint8Array,
};

/** The numbers of an array; in floats of two and four bytes the sign stands in the lowest bit. @param {ArrayBuffer} buffer @param {string} dtype @returns {Numbers} */
function numbers(buffer, dtype) {
  const isHalf = dtype.endsWith("float16");
  const words = isHalf ? new Uint16Array(buffer) : new Uint32Array(dtype === "float32" ? buffer : []);
  for (let i = 0; i < words.length; i++) words[i] = (words[i] >>> 1) | ((words[i] & 1) << (isHalf ? 15 : 31));
  if (!isHalf) return new KINDS[/** @type {keyof typeof KINDS} */ (dtype)](buffer);
  const wide = (/** @type {number} */ half) => half << 16;
  return dtype === "float16" ? fromHalves(words) : new Float32Array(Uint32Array.from(words, wide).buffer);
}

/** The exponents of float32 are larger by 112; the highest, 31, is that of infinity and NaN. */
export function fromHalves(/** @type {Uint16Array | Uint32Array} */ halves) {
  const bits = Uint32Array.from(halves, (half) => ((half & 0x8000) << 16) | ((half & 0x7fff) << 13));
  const small = new Float32Array(bits.buffer);
  const special = (/** @type {number} */ half) => (half & 1023 ? NaN : half & 0x8000 ? -Infinity : Infinity);
  return small.map((x, place) => ((halves[place] & 0x7c00) === 0x7c00 ? special(halves[place]) : x * 2 ** 112));
}

/** An array by name, once it is unpacked; from then on page.array(name) has it. @param {Page} page @param {string} name @returns {Promise<NumberArray>} */
export async function load({ header, arrays, bytesOf }, name) {
  const { at, packed, shape, dtype } = header.arrays[name];
  if (arrays.has(name)) return /** @type {NumberArray} */ (arrays.get(name));
  const bytes = together(await inflated(bytesOf(at, packed)), sizeOf(shape));
  return kept(arrays, name, () => ({ shape, data: numbers(bytes.buffer, dtype) }));
}

async function inflated(/** @type {Uint8Array<ArrayBuffer>} */ bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** First bytes of all numbers, then second bytes, …: as numbers again. @param {Uint8Array} planes @param {number} size */
function together(planes, size) {
  const [bytes, width] = [new Uint8Array(planes.length), planes.length / size];
  for (let plane = 0, from = 0; plane < width; plane++)
    for (let i = 0, to = plane; i < size; i++, to += width) bytes[to] = planes[from++];
  return bytes;
}
