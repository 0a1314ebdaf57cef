// Where weights come from: computed here from q, k and L, requested from the viewer's server, or read from a picture.

import { range, rowInto, rowLogsumexp, rulesOf } from "../attention.js";
import { largestAt } from "../numbers.js";
import { load } from "../packed.js";

export const LEVELS = 80; // of a pixel
export const NONFINITE = 255; // a pixel with NaN or infinity in it
const RULES = [
  ...["scale", "bias", "mask", "alibi_slopes", "sinks", "query_segments", "kv_segments"],
  ...["query_spans", "key_spans", "span_table"],
];

/** @type {Map<string, Promise<Head>>} */
const opened = new Map();

/** @param {Page} page @param {Address} address */
export function headAt(page, address) {
  const key = `${page.version} ${address.run} ${address.layer} ${address.head}`;
  const known = opened.get(key);
  if (known) return known;
  const head = openHead(page, address);
  opened.set(key, head);
  if (opened.size > 12) opened.delete(/** @type {string} */ (opened.keys().next().value));
  return head;
}

/** The query at which a head opens: the last that is no padding. @param {Page} page @param {Head} head */
export function lastQuery(page, { address, layer, n }) {
  const pads = new Set(layer.text === "tokens" ? page.header.runs[address.run].pads : []);
  const offset = layer.cross ? 0 : layer.rules.query_offset[0];
  let query = n - 1;
  while (query > 0 && pads.has(query + offset)) query -= 1;
  return query;
}

/** @param {Page} page @param {Address} address */
export async function openHead(page, { run, layer: place, head: position }) {
  const layer = page.header.runs[run].layers[place];
  const { queries: n, keys: m, first } = layer;
  const exactAt = layer.exact.indexOf(position);
  const { served } = page.header;
  const exact = Boolean(served) || exactAt >= 0;
  const array = async (/** @type {string} */ name) => (layer.arrays[name] ? load(page, layer.arrays[name]) : null);

  /** @param {string} prefix @param {number[] | undefined} largest @param {number} place @returns {Promise<Picture | null>} */
  async function picture(prefix, largest, place) {
    const [pixels, side] = [await array(`${prefix}most`), await array(`${prefix}first_most`)];
    if (!largest || !pixels || !side) return null;
    const [rows, cols] = pixels.shape.slice(1);
    return {
      pixels: [rows, cols],
      data: /** @type {Uint8Array} */ (pixels.data),
      start: place * rows * cols,
      first: /** @type {Uint8Array} */ (side.data),
      firstStart: place * rows,
      largest: largest[place],
    };
  }
  const small = await picture("", layer.largest, position);
  if (exactAt >= 0) for (const name of RULES) await array(name);
  const rules = rulesOf(page, exactAt >= 0 ? layer : { ...layer, arrays: {} }, 0, Math.max(exactAt, 0));
  const head = {
    address: { run, layer: place, head: position },
    layer,
    n,
    m,
    first,
    exact,
    served,
    rules,
    small,
    wide: () => (exact && !served ? picture("wide_", layer.wide?.largest, exactAt) : Promise.resolve(null)),
    stored: exactAt >= 0 && !served ? page.header.arrays[layer.arrays.q].dtype : layer.dtype,
    computing: /** @type {Awaited<ReturnType<typeof computed>> | null} */ (null),
    loading: Promise.resolve(),
    version: page.version,
    shows: /** @type {Shows} */ ("weights"),
  };
  if (exactAt >= 0 && !served)
    head.loading = (small ? drawn() : Promise.resolve())
      .then(() => computed(page, layer, exactAt, rules))
      .then((operands) => void (head.computing = operands));
  if (!small) await head.loading;
  return head;
}

/** The picture comes first, since unpacking q and k takes a moment. */
const drawn = () => new Promise((go) => requestAnimationFrame(() => setTimeout(go)));

/** @param {Page} page @param {any} layer @param {number} place @param {Rules} rules */
async function computed(page, layer, place, rules) {
  const { queries: n, keys: m, d_k: width, arrays } = layer;
  const loaded = ["q", "k", "logsumexp", "v", "g"].map((name) => (arrays[name] ? load(page, arrays[name]) : null));
  const [q, k, lse, values, effects] = /** @type {NumberArray[]} */ (await Promise.all(loaded));
  /** @param {NumberArray} x @param {number} start @param {number} wide */
  const part = (x, start, wide) => x && { data: x.data, start: start * wide, width: wide };
  const [query, key] = [place * n, layer.key_of[place] * m];
  const rows = { q: part(q, query, width), k: part(k, key, width) };
  const wide = values?.shape.at(-1) ?? 0;
  const [v, g] = [part(values, key, wide), part(effects, query, wide)];
  const { L, know, rowInto } = computing(rows, rules, n, m, lse?.data.subarray(place * n, (place + 1) * n));
  const lost = (/** @type {string} */ name, /** @type {string} */ original) => {
    const stored = page.header.arrays[arrays[name]]?.dtype;
    return !stored || stored === original ? 0 : ROUND[stored];
  };
  const bound = bounds(rows.q, L, rules, lost("q", layer.dtype), longestOf(rows.k, m));
  return {
    ...rows,
    v,
    g,
    vLost: lost("v", layer.values), // by rounding for the page, as a share
    /** How far a query's weights may be from the run's, as a share of them. @param {number} i */
    bound: (i) => (know(i), bound(i)),
    rowInto,
    L,
  };
}

/** Weights by the row. @param {{q: Rows, k: Rows}} rows @param {Rules} rules @param {number} n @param {number} m @param {Numbers} [lse]      the log-sum-exps, where they are known */
function computing({ q, k }, rules, n, m, lse) {
  const L = lse ?? new Float64Array(n);
  const known = new Uint8Array(n).fill(lse ? 1 : 0);
  const line = new Float64Array(m);
  const know = (/** @type {number} */ i) => {
    if (!known[i]) L[i] = rowLogsumexp(q, k, rules, i, line);
    known[i] = 1;
  };
  /** A query's weights on keys from…to. @type {(i: number, from: number, to: number, out: Float32Array, place: number) => void}      place: where in `out` key `from` stands */
  const into = (i, from, to, out, place) => (know(i), rowInto(q, k, L, rules, i, from, to, out, place));
  return { L, know, rowInto: into };
}

/** @type {Record<string, number>} unit roundoff */
const ROUND = { bfloat16: 2 ** -8, float16: 2 ** -11, float32: 2 ** -24 };

/** @param {Rows} x @param {number} i */
const norm = (x, i) => {
  let sum = 0;
  for (let c = 0; c < x.width; c++) sum += x.data[x.start + i * x.width + c] ** 2;
  return Math.sqrt(sum);
};

/** The length of the longest key, computed when it is first needed. @param {Rows} k @param {number} m */
function longestOf(k, m) {
  let longest = -1;
  return () => {
    if (longest < 0) for (let j = 0; j < m; j++) longest = Math.max(longest, norm(k, j));
    return longest;
  };
}

/**
 * How far a weight computed here may be from the run's, as a share of it: L in float32 from sums of d products, and, where
 * q and k were rounded for the page, that rounding twice (in the score and in L).
 * @param {Rows} q @param {{[i: number]: number}} L @param {Rules} r
 * @param {number} rounded      what q and k lost by rounding, as a share
 * @param {() => number} longest      the length of the longest key
 */
const bounds = (q, L, r, rounded, longest) => (/** @type {number} */ i) => {
  const most = Math.abs(r.scale) * norm(q, i) * longest();
  const lost = 2 ** -24 * (4 + Math.abs(L[i]) + (q.width + 8) * most);
  return Math.expm1(lost + 4 * rounded * most);
};

/**
 * The value of a picture's pixel, and how far it may be off.
 * @param {Picture} p @param {number} row @param {number} col
 */
export function pixel(p, row, col) {
  return decoded(p.data[p.start + row * p.pixels[1] + col], p.largest);
}

/** The same of the first key's own column. @param {Picture} p @param {number} row */
export const firstPixel = (p, row) => decoded(p.first[p.firstStart + row], p.largest);

/** @param {number} code @param {number} largest */
const decoded = (code, largest) =>
  code === NONFINITE
    ? { value: NaN, off: 0 }
    : { value: (code / LEVELS) ** 2 * largest, off: ((code + 0.25) / LEVELS ** 2) * largest };

/**
 * All weights of one query; null where this head is a picture only.
 * @param {Head} head @param {number} i @returns {Promise<Float32Array | null>}
 */
export async function rowOf(head, i) {
  await head.loading;
  const { computing: c } = head;
  if (head.served) return ask(head, "row", { ["at"]: i });
  if (!c) return null;
  const out = new Float32Array(head.m);
  c.rowInto(i, 0, head.m, out, 0);
  return out;
}

/** The key with a query's largest weight. @param {Head} head @param {number} query */
export async function strongestKey(head, query) {
  const row = await rowOf(head, query);
  return row ? largestAt(/** @type {any} */ (row)) : 0;
}

/** All weights on one key. @param {Head} head @param {number} j @returns {Promise<Float32Array | null>} */
export async function columnOf(head, j) {
  await head.loading;
  const { computing: c } = head;
  if (head.served) return ask(head, "column", { ["at"]: j });
  if (!c) return null;
  const out = new Float32Array(head.n);
  for (let i = 0; i < head.n; i++) c.rowInto(i, j, j + 1, out, i);
  return out;
}

/** Weights from the viewer's server. @param {Head} head @param {string} what @param {Record<string, any>} values */
export async function ask(head, what, values) {
  const body = JSON.stringify({ ...head.address, ...values });
  const answer = await fetch(what, { method: "POST", body }).catch(() => Promise.reject(new Error("ended")));
  if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
  return new Float32Array(await answer.arrayBuffer());
}

/** Do the rules without a mask forbid all of these? @param {Rules} r @param {number} i0 @param {number} i1 @param {number} j0 @param {number} j1 */
export function forbidden(r, i0, i1, j0, j1) {
  const last = Math.min(i1, r.queries ?? i1) - 1; // beyond are queries that are padding
  return last < i0 || range(r, last)[1] <= j0 || range(r, i0)[0] >= j1;
}
