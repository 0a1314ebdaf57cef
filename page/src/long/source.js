// The heads of the map. Their weights are computed here from q, k and L, requested from the viewer's server, or read from
// a picture.

import { range, rulesOf } from "../attention.js";
import { computing } from "../head.js";
import { kept, largestAt } from "../numbers.js";
import { load } from "../container.js";

export const LEVELS = 80; // of a pixel
const NONFINITE = 255; // a pixel with NaN or infinity in it
const RULES = [
  ...["scale", "bias", "mask", "alibi_slopes", "sinks", "query_segments", "kv_segments"],
  ...["query_spans", "key_spans", "span_table"],
];

/** @type {Map<string, Promise<Head>>} */
const opened = new Map();

export function headAt(/** @type {Page} */ page, /** @type {Address} */ address) {
  const key = `${page.version} ${address.run} ${address.layer} ${address.head}`;
  const head = kept(opened, key, () => openHead(page, address));
  if (opened.size > 12) opened.delete(/** @type {string} */ (opened.keys().next().value));
  return head;
}

export async function openHead(/** @type {Page} */ page, /** @type {Address} */ { run, layer: place, head: position }) {
  const layer = page.header.runs[run].layers[place];
  const { queries: n, keys: m, first } = layer;
  const exactAt = layer.exact.indexOf(position);
  const { served } = page.header;
  const array = async (/** @type {string} */ name) => (layer.arrays[name] ? load(page, layer.arrays[name]) : null);
  const picture = async (/** @type {string} */ prefix, /** @type {any} */ entry, /** @type {number} */ at) => {
    const [pixels, side] = [await array(`${prefix}most`), await array(`${prefix}first_most`)];
    return entry?.largest && pixels && side ? pictureOf(pixels, side, entry.largest[at], at, layer) : null;
  };
  const small = await picture("", layer, position);
  if (exactAt >= 0) for (const name of RULES) await array(name);
  const rules = rulesOf(page, exactAt >= 0 ? layer : { ...layer, arrays: {} }, 0, Math.max(exactAt, 0));
  const head = {
    address: { run, layer: place, head: position },
    ...{ layer, n, m, first, served, rules, small },
    exact: Boolean(served) || exactAt >= 0,
    wide: async () => (exactAt >= 0 && !served ? picture("wide_", layer.wide, exactAt) : null), // a finer picture
    stored: exactAt >= 0 && !served ? page.header.arrays[layer.arrays.q].dtype : layer.dtype,
    computing: /** @type {Awaited<ReturnType<typeof computed>> | null} */ (null),
    loading: Promise.resolve(),
    version: page.version,
  };
  if (exactAt >= 0 && !served)
    head.loading = (small ? drawn() : Promise.resolve())
      .then(() => computed(page, layer, exactAt, rules))
      .then((numbers) => void (head.computing = numbers));
  if (!small) await head.loading;
  return head;
}

/** The picture comes first, since unpacking q and k takes a moment. */
const drawn = () => new Promise((go) => requestAnimationFrame(() => setTimeout(go)));

/**
 * A stored picture. The first key is stored apart.
 * @param {NumberArray} pixels @param {NumberArray} side
 * @param {number} largest      the weight of the highest code
 * @param {number} at      which of the pictures
 * @param {any} layer
 */
function pictureOf({ data, shape: [, rows, cols] }, side, largest, at, { first, keys }) {
  const codes = data.subarray(at * rows * cols, (at + 1) * rows * cols);
  const firsts = side.data.subarray(at * rows, (at + 1) * rows);
  const firstCol = Math.floor((first * cols) / keys);
  /** The value of a code, and how far it may be off. @param {number} code */
  const decoded = (code) =>
    code === NONFINITE
      ? { value: NaN, off: 0 }
      : { value: (code / LEVELS) ** 2 * largest, off: ((code + 0.25) / LEVELS ** 2) * largest };
  return {
    ...{ rows, cols },
    pixel: (/** @type {number} */ row, /** @type {number} */ col) => decoded(codes[row * cols + col]),
    first: (/** @type {number} */ row) => decoded(firsts[row]),
    /** With the first key's in its pixel. @type {Cell} */
    value: (row, col) => {
      const { value } = decoded(codes[row * cols + col]);
      return col === firstCol ? Math.max(value, decoded(firsts[row]).value) : value;
    },
    nonfinite: () => codes.includes(NONFINITE) || firsts.includes(NONFINITE),
  };
}

/** @type {Record<string, number>} unit roundoff */
const ROUND = { bfloat16: 2 ** -8, float16: 2 ** -11, float32: 2 ** -24 };

/** @param {Page} page @param {any} layer @param {number} place @param {Rules} rules */
async function computed(page, layer, place, rules) {
  const { queries: n, keys: m, arrays } = layer;
  const loaded = ["q", "k", "logsumexp", "v"].map((name) => (arrays[name] ? load(page, arrays[name]) : null));
  const [q, k, lse, v] = await Promise.all(loaded);
  const [query, key] = [place * n, layer.key_of[place] * m];
  const part = (/** @type {NumberArray | null} */ x, /** @type {number} */ from) => {
    const width = x?.shape.at(-1) ?? 0;
    return x && { data: x.data, start: from * width, width };
  };
  const rows = { q: /** @type {Rows} */ (part(q, query)), k: /** @type {Rows} */ (part(k, key)), v: part(v, key) };
  const numbers = computing({ ...rows, n, m, rules, sums: lse && lse.data.subarray(query, query + n) });
  const lost = (/** @type {string} */ name, /** @type {string} */ original) => {
    const stored = page.header.arrays[arrays[name]]?.dtype;
    return !stored || stored === original ? 0 : ROUND[stored];
  };
  const norm = (/** @type {Rows} */ { data, start, width }, /** @type {number} */ i) => {
    let sum = 0;
    for (let at = start + i * width; at < start + (i + 1) * width; at++) sum += data[at] ** 2;
    return Math.sqrt(sum);
  };
  let longest = -1; // key, looked for when it is first needed
  return {
    ...numbers,
    lost: lost("v", layer.values), // by v's rounding for the page, as a share
    /**
     * How far a query's weights may be from the run's, as a share of them: L in float32 from sums of d_k products, and,
     * where q and k were rounded for the page, that rounding twice (in the score and in L).
     * @param {number} i
     */
    bound(i) {
      const L = Math.abs(numbers.logsumexp(i));
      if (longest < 0) for (let j = 0; j < m; j++) longest = Math.max(longest, norm(rows.k, j));
      const most = Math.abs(rules.scale) * norm(rows.q, i) * longest;
      const off = 2 ** -24 * (4 + L + (numbers.dk + 8) * most);
      return Math.expm1(off + 4 * lost("q", layer.dtype) * most);
    },
  };
}

/** All weights of one query; null where this head is a picture only. @param {Head} head @param {number} i @returns {Promise<Float32Array | null>} */
export async function rowOf(head, i) {
  await head.loading;
  if (head.served) return ask(head, "row", { ["at"]: i });
  const out = new Float32Array(head.m);
  head.computing?.rowInto(i, 0, head.m, out, 0);
  return head.computing && out;
}

/** The key with a query's largest weight. @param {Head} head @param {number} query */
export async function strongestKey(head, query) {
  const row = await rowOf(head, query);
  return row ? largestAt(/** @type {any} */ (row)) : 0;
}

/** All weights on one key. @param {Head} head @param {number} j @returns {Promise<Float32Array | null>} */
export async function columnOf(head, j) {
  await head.loading;
  if (head.served) return ask(head, "column", { ["at"]: j });
  const out = new Float32Array(head.n);
  for (let i = 0; i < head.n; i++) head.computing?.rowInto(i, j, j + 1, out, i);
  return head.computing && out;
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
