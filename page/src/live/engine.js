// What the page's own model makes of a text and a change, in the form of the page's record: what all rooms draw.

import { factor, unchanged } from "../model/attention.js";
import { likeliest, openModel, sharesOf } from "../model/forward.js";
import { isUnchanged } from "../address.js";
import { largest } from "../numbers.js";
import { causesOf } from "./causes.js";

export async function engineOf(/** @type {Page} */ page) {
  const { live, facts } = page.header;
  const record = recordOf(page.header);
  const { run, text, encode } = await openModel(page);
  let usual = { of: "", shares: new Float32Array() }; // probabilities where nothing is changed
  const idsOf = (/** @type {string} */ written) => encode(written).slice(0, live.positions);
  return {
    idsOf,
    /** What made the answer, where the page says so of its record. @param {string} written @param {Change} change @param {import("./causes.js").Asked} asked @param {(asked: import("./causes.js").Asked) => void} ask @param {() => boolean} still */
    causes: (written, change, asked, ask, still) =>
      record.why && causesOf({ ...live, run, text }, idsOf(written), change, asked, record.why, ask, still),
    /** The likeliest word after a text; none where a rhyme ends, or the model's room. @param {string} written @param {Change} change */
    next(written, change) {
      const ids = idsOf(written);
      const [best] = ids.length && ids.length < live.positions ? likeliest(run(ids, change).logits, 1) : [];
      return best?.id ? text(best.id) : null; // token 0 ends a rhyme
    },
    /** The page's entries: of the record where nothing is changed. @param {string} written @param {number[]} ids @param {Change} change */
    document(written, ids, change) {
      if (written === facts.text && isUnchanged(change)) return record;
      const { layers, logits } = run(ids, change);
      if (usual.of !== ids.join()) usual = { of: ids.join(), shares: sharesOf(run(ids, unchanged()).logits) };
      /** @type {Float32Array | null} */
      let all = null; // logits of every token, once one is pointed at
      const size = live.vocabulary.length;
      const after = (/** @type {number} */ token) => {
        all ??= run(ids, change, true).logits;
        return nextOf(all.subarray(token * size, (token + 1) * size), text, null);
      };
      const next = nextOf(logits, text, isUnchanged(change) ? null : usual.shares);
      return documentOf(page, record, layers, ids.map(text), change, { text: written, next, after });
    },
  };
}

const [NEXT, LOOKS, LOOK] = [8, 4, 0.005]; // words; keys of each head, and the least weight
const SCALED = { none: "S' = S", d_k: "S' = S/d_k" };
const OVER = { columns: ", each column", all: ", the whole matrix" };

/** What a run takes the place of. @param {any} header */
const recordOf = ({ tokens, facts, why, runs, layers }) => ({
  ...{ tokens, facts, why },
  runs: [...runs],
  layers: [...layers],
});

/** Puts entries into the page, in the lists that its rooms hold. @param {any} header @param {ReturnType<typeof recordOf>} entries */
export function show(header, { runs, layers, ...entries }) {
  Object.assign(header, entries);
  header.runs.splice(0, runs.length, ...runs);
  header.layers.splice(0, layers.length, ...layers);
}

/** @param {(Float64Array | Uint8Array)[]} parts */
const joined = (parts) => Float32Array.from(parts.flatMap((part) => [...part]));

/**
 * The arrays of one layer, put into the page, by their names in the page's record.
 * @param {Page} page @param {number} at @param {LayerRun} run @param {number} n @param {Change} change
 */
function arraysOf(page, at, { x, q, k, v, heads }, n, change) {
  const [count, width] = [heads.length, x.length / n];
  const put = (/** @type {string} */ name, /** @type {number[]} */ shape, /** @type {Numbers} */ data) =>
    page.put(`run.${at}.${name}`, shape, data);
  const rows = Object.entries({ q, k, v }).map(([name, data]) => [name, put(name, [1, count, n, width / count], data)]);
  const weights = Object.entries({ q: "q", k: "k", v: "v", o: "output" }).flatMap(([letter, name]) =>
    ["weight", "bias"].map((part) => [`${part[0]}_${letter}`, `live.blk.${at}.attn_${name}.${part}`]),
  );
  const scales = new Float32Array(count).fill(factor(change, width / count));
  return {
    ...Object.fromEntries([...rows, ...weights]),
    ["x"]: put("x", [1, n, width], x),
    ["logsumexp"]: put("logsumexp", [1, count, n], joined(heads.map(({ sums }) => sums))),
    ["scale"]: put("scale", [count], scales),
    ...(hides(change) && { ["mask"]: put("mask", [1, count, n, n], joined(heads.map(({ seen }) => seen))) }),
  };
}

/** Whether a mask is needed. @param {Change} change */
const hides = ({ hidden, cuts }) => hidden.length + cuts.length > 0;

/** What the last query of each head looks at. @param {LayerRun[]} layers @param {number} n */
const looksOf = (layers, n) => ({
  query: n - 1,
  heads: layers.map(({ heads }) =>
    heads.map(({ weights }) => {
      const row = weights.subarray((n - 1) * n);
      return largest(row, LOOKS, LOOK).map((key) => [key, row[key]]);
    }),
  ),
});

/** The likeliest words: text, probability, number, logit, and the probability where nothing is changed. @param {Float32Array} logits @param {(id: number) => string} text @param {Float32Array | null} usual */
const nextOf = (logits, text, usual) =>
  likeliest(logits, NEXT).map(({ id, share }) => [text(id), share, id, logits[id], usual?.[id]]);

/**
 * @param {Page} page @param {ReturnType<typeof recordOf>} record @param {LayerRun[]} run @param {string[]} tokens @param {Change} change
 * @param {any} facts      what the page says of the run
 * @returns {ReturnType<typeof recordOf>}
 */
function documentOf(page, record, run, tokens, change, facts) {
  const n = tokens.length;
  const { causal, temperature, over, scale } = change;
  const stepOf = (/** @type {any} */ step) => {
    const { name, formula } = step;
    if (name === "scaled" && scale !== "sqrt") return { ...step, formula: SCALED[scale] };
    if (name === "weights" && over !== "rows") return { ...step, formula: formula.replace(", each row", OVER[over]) };
    return step;
  };
  const unknown = { statistics: {}, captions: [], kinds: [], reach: null, largest: null, wide: null };
  const made = run.map((layer, at) => {
    const [steps, shown] = [record.layers[at], record.runs[0].layers[at]];
    const every = [...layer.heads.keys()];
    const rules = { ...shown.rules, causal, temperature, over };
    const both = { queries: n, keys: n, rules, arrays: arraysOf(page, at, layer, n, change) };
    const off = change.off.filter(([of]) => of === at).map(([, head]) => head);
    return {
      steps: { ...steps, ...both, off, steps: steps.steps.map(stepOf) },
      shown: { ...shown, ...both, ...unknown, masked: causal || hides(change), exact: every, key_of: every },
    };
  });
  const none = { way: null, check: null, kept: null, generated: 0 };
  return {
    tokens,
    facts: { ...record.facts, ...none, looks: looksOf(run, n), ...facts, live: true },
    why: null,
    runs: [{ ...record.runs[0], tokens, pads: [], layers: made.map(({ shown }) => shown) }],
    layers: made.map(({ steps }) => steps),
  };
}
