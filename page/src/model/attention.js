// One layer's attention as the reader has changed it: what a query sees, the scale, the temperature, and over what the
// softmax runs.

/** Nothing changed. @returns {Change} */
export const unchanged = () => ({
  hidden: [],
  cuts: [],
  off: [],
  scale: "sqrt",
  causal: true,
  temperature: 1,
  over: "rows",
});

/** The scale: what scores are multiplied by. @param {Change} change @param {number} width      d_k */
export const factor = ({ scale }, width) => (scale === "none" ? 1 : scale === "d_k" ? 1 / width : 1 / Math.sqrt(width));

/**
 * Whether each query may see each key, (n, n): the mask, hidden words, which no other token sees (in place of
 * the first one another token stands), and cut edges.
 * @param {Change} change @param {number} layer @param {number} head @param {number} n
 */
export function visible(change, layer, head, n) {
  const seen = new Uint8Array(n * n);
  for (let i = 0; i < n; i++) seen.fill(1, i * n, i * n + (change.causal ? i + 1 : n));
  for (const key of change.hidden) for (let i = 0; i < n; i++) if (key && i !== key && key < n) seen[i * n + key] = 0;
  for (const [ofLayer, ofHead, query, key] of change.cuts)
    if (ofLayer === layer && ofHead === head && query < n && key < n) seen[query * n + key] = 0;
  return seen;
}

/** Softmax over some of the places, and its log-sum-exp; where nothing is seen there, zeros. @param {Float32Array} x @param {Uint8Array} seen @param {number} start @param {number} step @param {number} count */
function softmax(x, seen, start, step, count) {
  const end = start + step * count;
  let [most, sum] = [-Infinity, 0];
  for (let at = start; at < end; at += step) if (seen[at] && x[at] > most) most = x[at];
  for (let at = start; at < end; at += step) sum += x[at] = seen[at] ? Math.exp(x[at] - most) : 0;
  for (let at = start; at < end; at += step) x[at] = sum ? x[at] / sum : 0;
  return most + Math.log(sum);
}

/**
 * One head's weights, (n, n), the log-sum-exp of each query, or of each key where the softmax runs over columns, and its
 * output, which it writes.
 * @param {Change} change @param {Uint8Array} seen @param {Record<"q" | "k" | "v", Float32Array>} x      (n, width) each
 * @param {{n: number, width: number, first: number, size: number}} at      the head's first column, and how many it has
 * @param {Float32Array} output      (n, width)
 */
export function attend(change, seen, { q, k, v }, { n, width, first, size }, output) {
  const [weights, times] = [new Float32Array(n * n), factor(change, size) / change.temperature];
  const sums = new Float32Array(n);
  for (let i = 0; i < n; i++)
    for (let j = 0; j < n; j++) {
      if (!seen[i * n + j]) continue;
      let sum = 0;
      for (let c = first; c < first + size; c++) sum += q[i * width + c] * k[j * width + c];
      weights[i * n + j] = sum * times;
    }
  if (change.over === "all") sums.fill(softmax(weights, seen, 0, 1, n * n));
  else if (change.over === "columns") for (let j = 0; j < n; j++) sums[j] = softmax(weights, seen, j, n, n);
  else for (let i = 0; i < n; i++) sums[i] = softmax(weights, seen, i * n, 1, n);
  const row = new Float64Array(size);
  for (let i = 0; i < n; i++) {
    row.fill(0);
    for (let j = 0; j < n; j++) {
      const weight = weights[i * n + j];
      if (weight) for (let c = 0; c < size; c++) row[c] += weight * v[j * width + first + c];
    }
    output.set(row, i * width + first);
  }
  return { weights, sums };
}
