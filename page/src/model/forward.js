// The shipped model's forward pass (GPT-2's layout) in float32, with the reader's changes inside its attention.

import { kept, largest } from "../numbers.js";
import { load, sizeOf } from "../container.js";
import { attend, visible } from "./attention.js";
import PRODUCT from "./product.wat";
import { tokenizerOf } from "./tokenizer.js";

const BLOCK = 16; // results that are computed together

/** A weight as product.wat reads it, (d_out / 16, d_in, 16). @param {number} count @param {number} width @param {Cell} at      a number by its row of d_out and column of d_in */
function packed(count, width, at) {
  const made = new Float32Array(count * width);
  for (let j = 0, place = 0; j < count; j += BLOCK)
    for (let i = 0; i < width; i++) for (let more = 0; more < BLOCK; more++) made[place++] = at(j + more, i);
  return made;
}

/** Memory for so many numbers, which `place` fills, and the product of what is placed there with rows. @param {number} size */
async function multiplying(size) {
  const { instance } = await WebAssembly.instantiate(PRODUCT);
  const { memory, product } = /** @type {any} */ (instance.exports);
  memory.grow(Math.ceil(size / 2 ** 14)); // of 64 KiB
  const room = new Float32Array(memory.buffer);
  let used = 0;
  const place = (/** @type {Float32Array} */ numbers) => {
    room.set(numbers, used);
    return room.subarray(used, (used += numbers.length));
  };
  /**
   * Rows x·W + b.
   * @param {Float32Array} x      (rows, width) @param {Float32Array} weight      packed @param {Float32Array} bias
   * @param {number} [each]      results of a head: the heads stand one after the other, (heads, rows, each)
   */
  function times(x, weight, bias, each = bias.length) {
    const [width, count] = [weight.length / bias.length, bias.length];
    const rows = x.length / width;
    room.set(x, used);
    const end = used + x.length;
    for (let j = 0; j < count; j += each) {
      const [w, b] = [weight.byteOffset + 4 * j * width, bias.byteOffset + 4 * j];
      product(4 * used, rows, width, w, b, 4 * (end + rows * j), each);
    }
    return room.slice(end, end + rows * count);
  }
  return { place, times };
}

/** @param {Float32Array} x @param {Float32Array} weight @param {Float32Array} bias @param {number} epsilon */
function normal(x, weight, bias, epsilon) {
  const [made, width] = [new Float32Array(x.length), weight.length];
  for (let start = 0; start < x.length; start += width) {
    let [mean, square] = [0, 0];
    for (let i = 0; i < width; i++) mean += x[start + i];
    mean /= width;
    for (let i = 0; i < width; i++) square += (x[start + i] - mean) ** 2;
    const by = 1 / Math.sqrt(square / width + epsilon);
    for (let i = 0; i < width; i++) made[start + i] = (x[start + i] - mean) * by * weight[i] + bias[i];
  }
  return made;
}

const TWICE = 2 * Math.sqrt(2 / Math.PI);
/** x·(1 + tanh z)/2 with an exponential, which is quicker. @param {number} x */
const gelu = (x) => x / (1 + Math.exp(-TWICE * (x + 0.044715 * x * x * x)));

/** @param {Float32Array} x @param {Float32Array} more */
const sum = (x, more) => x.map((each, place) => each + more[place]);

/** The model that a page holds, unpacked once somebody may want it. @param {Page} page */
export async function openModel(page) {
  const { live, arrays } = page.header;
  const { layers, heads, d_model: width, epsilon, neutral } = live;
  const names = Object.keys(arrays).filter((each) => each.startsWith("live."));
  const [most] = arrays["live.token_embd.weight"].shape;
  const stored = names.reduce((sum, name) => sum + sizeOf(arrays[name].shape), 0);
  const { place, times } = await multiplying(stored + most * (width + 1) + live.positions * (width + most));
  /** @type {Map<string, Float32Array>} */
  const weights = new Map();
  for (const name of names) {
    const { shape, data } = await load(page, name);
    const [rows, columns] = shape;
    const ofLayer = name.startsWith("live.blk") && shape.length === 2; // (d_in, d_out)
    const made = ofLayer ? packed(columns, rows, (j, i) => data[i * columns + j]) : data;
    weights.set(name.slice(5), place(/** @type {Float32Array} */ (made)));
  }
  const weight = (/** @type {string} */ name) => /** @type {Float32Array} */ (weights.get(name));
  const [words, places, size] = [weight("token_embd.weight"), weight("position_embd.weight"), width / heads];
  const [unembed, none] = [packed(most, width, (j, i) => words[j * width + i]), new Float32Array(most)].map(place);
  /** @param {Float32Array} x @param {string} name @param {number} [each]      results of a head */
  const linear = (x, name, each) => times(x, weight(`${name}.weight`), weight(`${name}.bias`), each);
  const norm = (/** @type {Float32Array} */ x, /** @type {string} */ name) =>
    normal(x, weight(`${name}.weight`), weight(`${name}.bias`), epsilon);
  /** What a layer's attention reads, and its queries, keys and values. @param {number} layer @param {Float32Array} hidden */
  function readBy(layer, hidden) {
    const x = norm(hidden, `blk.${layer}.attn_norm`);
    const [q, k, v] = ["q", "k", "v"].map((name) => linear(x, `blk.${layer}.attn_${name}`, size));
    return { x, q, k, v };
  }
  /** The latest texts as far as no change matters: embeddings, and what the first layer makes of them. @type {Map<string, {hidden: Float32Array, read: ReturnType<typeof readBy>}>} */
  const begun = new Map();
  const begin = (/** @type {number[]} */ ids) => {
    const key = ids.join();
    if (begun.size > 2 && !begun.has(key)) begun.clear();
    return kept(begun, key, () => {
      const at = (/** @type {number} */ place) => words[ids[Math.floor(place / width)] * width + (place % width)];
      const hidden = Float32Array.from({ length: ids.length * width }, (_, place) => at(place) + places[place]);
      return { hidden, read: readBy(0, hidden) };
    });
  };

  /**
   * @param {number[]} text @param {Change} change
   * @param {boolean} [all]      the logits of every token, not of the last alone
   */
  function run(text, change, all = false) {
    const [n, ids] = [text.length, [...text]];
    if (change.hidden.includes(0)) ids[0] = neutral; // most heads rest on it: no text makes sense without a first token
    /** @type {LayerRun[]} */
    const runs = [];
    let { hidden, read } = begin(ids);
    for (let layer = 0; layer < layers; layer++) {
      const of = (/** @type {string} */ name) => `blk.${layer}.${name}`;
      if (layer) read = readBy(layer, hidden);
      const { q, k, v } = read;
      const outputs = new Float32Array(n * width);
      const made = Array.from({ length: heads }, (_, head) => {
        const rows = [q, k, v].map((x) => x.subarray(head * n * size, (head + 1) * n * size));
        const off = change.off.filter((each) => each[0] === layer && each[1] === head);
        const seen = visible(change, layer, head, n);
        const end = Math.min(n, ...off.map(([, , row = 0]) => row)); // from here on the head is off
        return { seen, ...attend(change, seen, rows, size, end, outputs, head * size, width) };
      });
      runs.push({ ...read, heads: made });
      const from = layer === layers - 1 && !all ? n - 1 : 0; // the rest of the last layer has no part in the last row
      hidden = sum(hidden.subarray(from * width), linear(outputs.subarray(from * width), of("attn_output")));
      const inner = linear(norm(hidden, of("ffn_norm")), of("ffn_up")).map(gelu);
      hidden = sum(hidden, linear(inner, of("ffn_down")));
    }
    const logits = times(norm(hidden, "output_norm"), unembed, none);
    return { layers: runs, logits };
  }
  return { run, ...tokenizerOf(live.vocabulary, live.merges) };
}

/** The probability of each token. @param {Float32Array} logits */
export function sharesOf(logits) {
  const most = logits.reduce((a, b) => Math.max(a, b));
  const powers = logits.map((each) => Math.exp(each - most));
  const total = powers.reduce((a, b) => a + b);
  return powers.map((each) => each / total);
}

/** The likeliest tokens, and their probabilities. @param {Float32Array} logits @param {number} count */
export function likeliest(logits, count) {
  const shares = sharesOf(logits);
  return largest(logits, count).map((id) => ({ id, share: shares[id] }));
}
