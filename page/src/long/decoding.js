// Decoding, token by token: which token was generated, what its query saw, and how the cache of keys and values grows.

import { h, slider } from "../dom.js";
import { spelled } from "../numbers.js";

/** The slider over the steps; null where the model generated nothing. @param {Look} look @returns {Parts["decoding"]} */
export function decoding(look) {
  const { page, shell, state, queryName } = look;
  const { facts, layers } = page.header;
  const count = facts?.generated ?? 0;
  if (!count || !layers) return null;
  const { queries, kv_heads, arrays } = layers[0];
  const first = queries - count; // the first generated token; its query is the one before
  const width = (/** @type {string} */ name) => Number(page.header.arrays[arrays[name]].shape.at(-1));
  const numbers = layers.length * kv_heads * (width("k") + width("v")); // in the cache for each token
  const go = (/** @type {number} */ query) => look.jumpTo(query, Math.min(state.key, query));
  const slide = slider("decoding", 1, count, (step) => go(first + step - 2), { value: count });
  const said = h("p.aside", { role: "status" });
  const update = () => {
    const step = Math.max(1, Math.min(count, state.query - first + 2));
    const cached = first + step - 1;
    slide.value = String(step);
    const during = state.query >= first - 1 && state.query < queries - 1;
    said.textContent = shell.t(during ? "decoding step" : "decoding says", {
      step,
      count,
      token: spelled(queryName(cached), 20),
      after: spelled(queryName(cached - 1), 20),
      cached,
      numbers: (cached * numbers).toLocaleString("en"),
      layers: layers.length,
    });
  };
  update();
  return { element: h("div.decoding", h("label", shell.t("decoding"), slide), said), update };
}
