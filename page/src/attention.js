// Attention in float64: the rules of core/definition.py, applied in the same order.
//   logit = c·tanh(scale·q·k / c) + bias − slope·|position − j| + table[span of i, span of j], −∞ where forbidden
//   a = exp(logit / T − L)

/** @param {Rows} q @param {number} i @param {Rows} k @param {number} j */
export function dot(q, i, k, j) {
  let sum = 0;
  const a = q.start + i * q.width;
  const b = k.start + j * k.width;
  for (let c = 0; c < q.width; c++) sum += q.data[a + c] * k.data[b + c];
  return sum;
}

/** May query i see key j, as far as positions do not say? @param {Rules} r @param {number} i @param {number} j */
const admits = (r, i, j) => r.allowed?.(i, j) !== false && r.bias?.(i, j) !== -Infinity;

/** May query i see key j? @param {Rules} r @param {number} i @param {number} j */
export function visible(r, i, j) {
  const [first, end] = range(r, i);
  return j >= first && j < end && admits(r, i, j);
}

/** @param {Rules} r @param {number} scaled */
export const capped = (r, scaled) => (r.softcap === null ? scaled : r.softcap * Math.tanh(scaled / r.softcap));

/** @param {Rules} r @param {number} value @param {number} i @param {number} j */
export const biased = (r, value, i, j) =>
  value + (r.bias ? r.bias(i, j) : 0) - (r.slope ? r.slope * Math.abs(i + r.offset - j) : 0);

/** The logit of a raw score q·k of a visible key, over the temperature. @param {Rules} r @param {number} score @param {number} i @param {number} j */
const seen = (r, score, i, j) => biased(r, capped(r, score * r.scale), i, j) / r.temperature;

/** The same of any key; −∞ where masked. @param {Rules} r @param {number} score @param {number} i @param {number} j */
export const logit = (r, score, i, j) => (visible(r, i, j) ? seen(r, score, i, j) : -Infinity);

/**
 * ln Σ exp over one row of logits and the sink; −∞ for a row that sees no key.
 * @param {number} m @param {(j: number) => number} row @param {number} sink
 */
export function logsumexp(m, row, sink) {
  let peak = -Infinity;
  for (let j = 0; j < m; j++) peak = Math.max(peak, row(j));
  if (peak === -Infinity) return -Infinity;
  const top = Math.max(peak, sink);
  let sum = sink === -Infinity ? 0 : Math.exp(sink - top);
  for (let j = 0; j < m; j++) sum += Math.exp(row(j) - top);
  return top + Math.log(sum);
}

/** Which log-sum-exp a weight is divided by: its query's, or its key's. @param {Rules} r @param {number} i @param {number} j */
export const sumAt = ({ over }, i, j) => (over === "columns" ? j : i);

export const MASKED = -1; // in place of the weight of a masked cell

/**
 * One query's weights on keys from…to, computed from q, k and L; MASKED where it may not see the key.
 * @param {Rows} q @param {Rows} k
 * @param {{[i: number]: number}} L log-sum-exp of each query, or of each key where the softmax runs over columns
 * @param {Rules} r @param {number} i @param {number} from @param {number} to @param {Float32Array} out
 * @param {number} start      where in `out` key `from` stands
 */
export function rowInto(q, k, L, r, i, from, to, out, start) {
  const [first, end] = range(r, i);
  const [low, high] = [Math.max(from, first), Math.min(to, end)];
  out.fill(MASKED, start, start + to - from);
  const shift = start - from;
  for (let j = low; j < high; j++)
    if (admits(r, i, j)) out[shift + j] = Math.exp(seen(r, dot(q, i, k, j), i, j) - L[sumAt(r, i, j)]);
}

/**
 * ln Σ exp over one query's logits and the sink.
 * @param {Rows} q @param {Rows} k @param {Rules} r @param {number} i
 * @param {Float64Array} line      room for a logit of each key
 */
export function rowLogsumexp(q, k, r, i, line) {
  const [first, end] = range(r, i);
  const m = line.length;
  const [low, high] = [Math.max(0, first), Math.min(m, end)];
  line.fill(-Infinity);
  for (let j = low; j < high; j++) if (admits(r, i, j)) line[j] = seen(r, dot(q, i, k, j), i, j);
  return logsumexp(m, (j) => line[j], r.sink);
}

/**
 * The keys that positions (causal, window, lengths) let query i see: one range, which may reach past the last key.
 * @param {Rules} r @param {number} i @returns {[number, number]}
 */
export function range(r, i) {
  const position = i + r.offset;
  const [left, right] = r.window;
  if (r.queries !== null && i >= r.queries) return [0, 0];
  return [
    left === null ? 0 : position - left,
    Math.min(r.keys ?? Infinity, r.causal ? position + 1 : Infinity, right === null ? Infinity : position + right + 1),
  ];
}

/**
 * The rules of one batch and head of a layer.
 * @param {Page} page @param {any} layer @param {number} batch @param {number} head
 */
export function rulesOf(page, { rules, arrays }, batch, head) {
  const named = (/** @type {string} */ name) => (arrays[name] ? page.array(arrays[name]) : null);
  /** An array over (batch, heads, i, j), whose axes of size 1 are repeated. @param {string} name @returns {Cell | null} */
  const cells = (name) => {
    const a = named(name);
    if (!a) return null;
    const [B, H, n, m] = a.shape;
    const start = ((B > 1 ? batch : 0) * H + (H > 1 ? head : 0)) * n;
    return (i, j) => a.data[(start + (n > 1 ? i : 0)) * m + (m > 1 ? j : 0)];
  };
  /** The same over (batch, i). @param {string} name @returns {((i: number) => number) | null} */
  const labels = (name) => {
    const a = named(name);
    return a && ((i) => a.data[(a.shape[0] > 1 ? batch : 0) * a.shape[1] + (a.shape[1] > 1 ? i : 0)]);
  };
  const ofHead = (/** @type {string} */ name, /** @type {number} */ none) => {
    const a = named(name);
    return a ? a.data[a.shape[0] > 1 ? head : 0] : none;
  };
  const [mask, bias, table] = ["mask", "bias", "span_table"].map(cells);
  const [from, to, rows, cols] = ["query_segments", "kv_segments", "query_spans", "key_spans"].map(labels);
  /** What the table of spans adds to a logit: 0 where a label is −1. @type {Cell | null} */
  const spans = table && rows && cols && ((i, j) => (rows(i) < 0 || cols(j) < 0 ? 0 : table(rows(i), cols(j))));
  /** @type {Test} */
  const allowed = (i, j) => mask?.(i, j) !== 0 && (!from || from(i) === to?.(j));
  /** @type {Cell | null} */
  const biases = bias && spans ? (i, j) => bias(i, j) + spans(i, j) : (bias ?? spans);
  return {
    scale: ofHead("scale", 1),
    softcap: /** @type {number | null} */ (rules.softcap),
    causal: /** @type {boolean} */ (rules.causal),
    window: /** @type {[number | null, number | null]} */ (rules.window),
    offset: /** @type {number} */ (rules.query_offset[batch] ?? 0), // the key position of query 0
    keys: /** @type {number | null} */ (rules.kv_lengths?.[batch] ?? null), // keys from here on are padding
    queries: /** @type {number | null} */ (rules.query_lengths?.[batch] ?? null),
    allowed: mask || from ? allowed : null, // mask and segments
    bias: biases, // with what the table of spans adds
    slope: ofHead("alibi_slopes", 0), // of ALiBi
    sink: ofHead("sinks", -Infinity), // −∞ for none
    temperature: /** @type {number} */ (rules.temperature ?? 1),
    over: /** @type {Change["over"]} */ (rules.over ?? "rows"), // what the softmax makes sum to 1
  };
}
