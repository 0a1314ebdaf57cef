// The page's own model, once it is unpacked: what it makes of a text and a change, as the page's document.

import { isUnchanged } from "../address.js";
import { unchanged } from "../model/attention.js";
import { likeliest, openModel, sharesOf } from "../model/forward.js";
import { causesOf } from "./causes.js";
import { documentOf, nextOf, recordOf } from "./document.js";

/** @param {Page} page */
export async function engineOf(page) {
  const { live, facts } = page.header;
  const record = recordOf(page.header);
  const { run, text, encode } = await openModel(page);
  let usual = { of: "", shares: new Float32Array() }; // probabilities where nothing is changed
  const idsOf = (/** @type {string} */ written) => encode(written).slice(0, live.positions);
  return {
    idsOf,
    /** What made the answer, where the page says so of its record. @param {string} written @param {Change} change @param {import("./causes.js").Asked} asked @param {(asked: import("./causes.js").Asked) => void} ask @param {() => boolean} still */
    causes: (written, change, asked, ask, still) =>
      record.why &&
      causesOf({ run, text, neutral: live.neutral }, idsOf(written), change, asked, record.why, ask, still),
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
