// Reading the document that the page carries: a JSON header, and arrays decoded from base64 blocks when asked for.

/** @typedef {Float64Array | Float32Array | Uint8Array | Int32Array | Uint32Array} Numbers */
/** @typedef {{shape: number[], data: Numbers}} NumberArray */
/** @typedef {{header: any, has: (name: string) => boolean, array: (name: string) => NumberArray}} Page */

/** @type {Record<string, number>} */
const BYTES = { float64: 8, float32: 4, float16: 2, bfloat16: 2, int32: 4, uint32: 4, uint8: 1 };

/**
 * @param {(id: string) => string} read the text of one part
 * @returns {Page}
 */
export function openPage(read) {
  const header = JSON.parse(read("clearhead"));
  /** @type {Map<number, Uint8Array>} */
  const blocks = new Map();
  /** @type {Map<string, NumberArray>} */
  const arrays = new Map();
  const block = (/** @type {number} */ number) => {
    const known = blocks.get(number);
    if (known) return known;
    const bytes = fromBase64(read(`clearhead-${number}`));
    blocks.set(number, bytes);
    return bytes;
  };
  const bytesOf = (/** @type {number} */ at, /** @type {number} */ length) => {
    const bytes = new Uint8Array(length);
    for (let done = 0; done < length; ) {
      const number = Math.floor((at + done) / header.block);
      const from = at + done - number * header.block;
      const part = block(number).subarray(from, Math.min(header.block, from + length - done));
      bytes.set(part, done);
      done += part.length;
    }
    return bytes;
  };
  const array = (/** @type {string} */ name) => {
    const known = arrays.get(name);
    if (known) return known;
    const { at, shape, dtype } = header.arrays[name];
    const size = shape.reduce((/** @type {number} */ a, /** @type {number} */ b) => a * b, 1);
    const made = { shape, data: numbers(bytesOf(at, size * BYTES[dtype]), dtype) };
    arrays.set(name, made);
    return made;
  };
  return { header, has: (name) => name in header.arrays, array };
}

/**
 * @param {string} text
 * @returns {Uint8Array}
 */
function fromBase64(text) {
  const direct = /** @type {any} */ (Uint8Array).fromBase64;
  if (direct) return direct.call(Uint8Array, text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

/**
 * @param {Uint8Array} bytes
 * @param {string} dtype
 * @returns {Numbers}
 */
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
