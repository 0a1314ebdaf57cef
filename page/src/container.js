// Reads the document inside the page: a JSON header, and arrays, decoded from blocks of text when they are needed.

/** @type {Record<string, number>} */
export const BYTES = { float64: 8, float32: 4, float16: 2, bfloat16: 2, int32: 4, uint32: 4, uint8: 1 };

/**
 * The document inside a page.
 * @param {(id: string) => string} read the text of one part
 */
export function openPage(read) {
  /** @type {Header} */
  const header = JSON.parse(read("clearhead"));
  /** @type {Map<number, Uint8Array>} */
  const blocks = new Map();
  /** @type {Map<string, NumberArray>} */
  const arrays = new Map();
  const block = (/** @type {number} */ number) => {
    const known = blocks.get(number);
    if (known) return known;
    const bytes = base85(read(`clearhead-${number}`));
    blocks.set(number, bytes);
    return bytes;
  };
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
  const array = (/** @type {string} */ name) => {
    const known = arrays.get(name);
    if (known) return known;
    const entry = header.arrays[name];
    return keep(name, bytesOf(entry.at, bytesIn(entry)));
  };
  const put = (/** @type {string} */ name, /** @type {number[]} */ shape, /** @type {Numbers} */ data) => {
    header.arrays[name] = { shape, dtype: "float32", at: 0 };
    arrays.set(name, { shape, data });
    return name;
  };
  const known = (/** @type {string} */ name) => arrays.get(name);
  return {
    header,
    has: (/** @type {string} */ name) => name in header.arrays,
    array,
    known,
    bytesOf,
    keep,
    put,
    version: 0,
  };
}

/** How many bytes an array has where it is not compressed. @param {{shape: number[], dtype: string}} entry */
const bytesIn = ({ shape, dtype }) => sizeOf(shape) * BYTES[dtype];

/** @param {number[]} shape */
export const sizeOf = (shape) => shape.reduce((a, b) => a * b, 1);

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

/** @param {Uint16Array} halves */
function fromBrain(halves) {
  const bits = new Uint32Array(halves.length);
  for (let i = 0; i < halves.length; i++) bits[i] = halves[i] << 16;
  return new Float32Array(bits.buffer);
}

/** @type {Float32Array | null} */
let everyHalf = null;

/** @param {Uint16Array} halves */
function fromHalves(halves) {
  everyHalf ??= Float32Array.from({ length: 65536 }, (_, half) => fromHalf(half));
  const made = new Float32Array(halves.length);
  for (let i = 0; i < halves.length; i++) made[i] = everyHalf[halves[i]];
  return made;
}

/** @param {number} half */
function fromHalf(half) {
  const sign = half & 0x8000 ? -1 : 1;
  const power = (half >> 10) & 31;
  const part = half & 1023;
  if (power === 31) return part ? NaN : sign * Infinity;
  return sign * (power ? 2 ** (power - 15) * (1 + part / 1024) : 2 ** -14 * (part / 1024));
}
