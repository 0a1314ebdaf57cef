// The shipped model's forward pass (GPT-2's layout) in float32, with the reader's changes inside its attention.

import { attend, visible } from "./attention.js";

/**
 * Rows x·Wᵀ + b, where W has a row for each result. Four rows of x and three of W at a time: each number that is read is
 * used as often as there are registers for, which is more than twice as fast as one row of W after the other.
 * @param {Float32Array} x @param {Float32Array} weight @param {Float32Array | null} bias @param {number} width
 */
function product(x, weight, bias, width) {
  const [rows, count] = [x.length / width, weight.length / width];
  const [made, four, last] = [new Float32Array(rows * count), new Float64Array(4 * width), (count - 1) * width];
  for (let r = 0; r < rows; r += 4) {
    const end = Math.min(4, rows - r);
    for (let row = 0; row < end; row++) for (let i = 0; i < width; i++) four[4 * i + row] = x[(r + row) * width + i];
    for (let j = 0; j < count; j += 3) {
      let [a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
      const [first, second, third] = [0, 1, 2].map((more) => Math.min((j + more) * width, last));
      for (let i = 0, at = 0; i < width; i++, at += 4) {
        const w0 = weight[first + i]; // an array of them would be made anew each time
        const w1 = weight[second + i];
        const w2 = weight[third + i];
        const x0 = four[at];
        const x1 = four[at + 1];
        const x2 = four[at + 2];
        const x3 = four[at + 3];
        a0 += x0 * w0;
        b0 += x1 * w0;
        c0 += x2 * w0;
        d0 += x3 * w0;
        a1 += x0 * w1;
        b1 += x1 * w1;
        c1 += x2 * w1;
        d1 += x3 * w1;
        a2 += x0 * w2;
        b2 += x1 * w2;
        c2 += x2 * w2;
        d2 += x3 * w2;
      }
      const sums = [a0, a1, a2, b0, b1, b2, c0, c1, c2, d0, d1, d2];
      for (let row = 0; row < end; row++)
        for (let more = 0; more < 3 && j + more < count; more++)
          made[(r + row) * count + j + more] = sums[3 * row + more] + (bias ? bias[j + more] : 0);
    }
  }
  return made;
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

const ROOT = Math.sqrt(2 / Math.PI);
const gelu = (/** @type {number} */ x) => 0.5 * x * (1 + Math.tanh(ROOT * (x + 0.044715 * x ** 3)));

/** @param {Float32Array} x @param {Float32Array} more */
const sum = (x, more) => x.map((each, place) => each + more[place]);

/**
 * @param {{layers: number, heads: number, d_model: number, epsilon: number, neutral: number}} sizes
 * @param {(name: string) => Float32Array} weight      by the name of GGUF files, (d_out, d_in)
 */
export function modelOf({ layers, heads, d_model: width, epsilon, neutral }, weight) {
  const size = width / heads;
  const names = (/** @type {string} */ name) => [weight(`${name}.weight`), weight(`${name}.bias`)];
  const linear = (/** @type {Float32Array} */ x, /** @type {string} */ name) => {
    const [w, b] = names(name);
    return product(x, w, b, w.length / b.length);
  };
  const norm = (/** @type {Float32Array} */ x, /** @type {string} */ name) => {
    const [w, b] = names(name);
    return normal(x, w, b, epsilon);
  };
  /** What the first layer reads, and its queries, keys and values, of the latest texts: only another text changes them. @type {Map<string, Omit<LayerRun, "heads">>} */
  const first = new Map();

  /** @param {number[]} ids */
  function embedded(ids) {
    const [words, places] = [weight("token_embd.weight"), weight("position_embd.weight")];
    const made = new Float32Array(ids.length * width);
    ids.forEach((id, place) => {
      for (let i = 0; i < width; i++) made[place * width + i] = words[id * width + i] + places[place * width + i];
    });
    return made;
  }

  /**
   * @param {number[]} text @param {Change} change
   * @param {boolean} [all]      the logits of every token, not of the last alone
   */
  function run(text, change, all = false) {
    const [n, ids] = [text.length, [...text]];
    if (change.hidden.includes(0)) ids[0] = neutral; // most heads rest on it: no text makes sense without a first token
    /** @type {LayerRun[]} */
    const runs = [];
    let hidden = embedded(ids);
    for (let layer = 0; layer < layers; layer++) {
      const of = (/** @type {string} */ name) => `blk.${layer}.${name}`;
      let read = layer ? undefined : first.get(ids.join());
      if (!read) {
        const normed = norm(hidden, of("attn_norm"));
        const [q, k, v] = ["q", "k", "v"].map((name) => linear(normed, of(`attn_${name}`)));
        read = { x: normed, q, k, v };
        if (first.size > 2) first.clear();
        if (!layer) first.set(ids.join(), read);
      }
      const { x, ...rows } = read;
      const outputs = new Float32Array(n * width);
      const made = Array.from({ length: heads }, (_, head) => {
        const at = { n, width, first: head * size, size };
        const seen = visible(change, layer, head, n);
        const { weights, sums } = attend(change, seen, rows, at, outputs);
        for (const [, , row = 0] of change.off.filter((off) => off[0] === layer && off[1] === head))
          for (let i = row; i < n; i++) outputs.fill(0, i * width + at.first, i * width + at.first + size);
        return { weights, seen, sums };
      });
      runs.push({ x, ...rows, heads: made });
      const from = layer === layers - 1 && !all ? n - 1 : 0; // the rest of the last layer has no part in the last row
      hidden = sum(hidden.subarray(from * width), linear(outputs.subarray(from * width), of("attn_output")));
      const inner = linear(norm(hidden, of("ffn_norm")), of("ffn_up")).map(gelu);
      hidden = sum(hidden, linear(inner, of("ffn_down")));
    }
    return { layers: runs, logits: product(norm(hidden, "output_norm"), weight("token_embd.weight"), null, width) };
  }
  return { layers, heads, run };
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
  const order = Array.from(logits.keys()).sort((a, b) => logits[b] - logits[a]);
  return order.slice(0, count).map((id) => ({ id, share: shares[id] }));
}
