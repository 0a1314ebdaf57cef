// The controls of what is changed for all heads: scale, mask, softmax; each has a key.

import { h, select, slider, tickbox } from "../dom.js";
import { fmt } from "../numbers.js";

const WARMEST = 3; // 2³

/** @param {Shell} shell @param {() => Change} now @param {(more: Partial<Change>) => void} change */
export function changeControls({ t, key }, now, change) {
  const scales = { sqrt: "1/√dₖ", d_k: "1/dₖ", none: t("try unscaled") };
  const overs = Object.fromEntries(["rows", "columns", "all"].map((each) => [each, t(`try over ${each}`)]));
  const warm = h("output");
  const warmth = slider("try-temperature", -WARMEST, WARMEST, (power) => change({ temperature: 2 ** power }), {
    step: 0.05,
  });
  const causal = tickbox("try-causal", (on) => change({ causal: on }));

  /** @param {"scale" | "over"} name @param {Record<string, string>} options @param {string} letter */
  function choice(name, options, letter) {
    const set = (/** @type {string} */ value) => change({ [name]: value });
    const names = Object.keys(options);
    key(letter, () => set(names[(names.indexOf(now()[name]) + 1) % names.length]));
    return select(`try-${name}`, Object.entries(options), "", set);
  }
  const [scale, over] = [choice("scale", scales, "s"), choice("over", overs, "o")];
  key("m", () => change({ causal: !now().causal }));
  for (const [sign, by] of /** @type {[string, number][]} */ (Object.entries({ "<": -0.25, ">": 0.25 })))
    key(sign, () => {
      const power = Math.log2(now().temperature) + by;
      change({ temperature: 2 ** Math.min(WARMEST, Math.max(-WARMEST, power)) });
    });

  const label = (/** @type {string} */ words, /** @type {string} */ sign, /** @type {Child[]} */ ...input) =>
    h("label", words, " ", input, h("kbd", sign));
  return {
    elements: [
      label(t("try scale"), "s", scale),
      label(t("try causal"), "m", causal),
      label(t("try over"), "o", over),
      label(t("temperature"), "< >", warmth, warm),
    ],
    update() {
      const { temperature, ...what } = now();
      [scale.value, over.value, causal.checked] = [what.scale, what.over, what.causal];
      warmth.value = String(Math.log2(temperature));
      warm.textContent = fmt(temperature, 3);
    },
  };
}
