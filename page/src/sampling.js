// Sampling the next token: the softmax of all logits at another temperature, or of the k largest alone.

import { barList } from "./barlist.js";
import { h, select, slider } from "./dom.js";
import { fmt, percent, spelled } from "./numbers.js";

const COUNTS = [1, 2, 5, 10, 50];

/** @param {Page} page @param {Shell} shell @param {{logits: string, texts: string[]}} given      the name of the sorted logits, and the texts of the first */
export function sampling(page, { t }, { logits, texts }) {
  const { data } = page.array(logits);
  const temperature = slider("temperature", 0.1, 2, update, { step: 0.05, value: 1 });
  const counts = COUNTS.filter((count) => count < data.length).map((count) => [count, count]);
  const kept = select("top-k", [[data.length, t("all tokens")], ...counts], NaN, update);
  const [shownTemperature, entropy] = [h("output.figures", { for: "temperature" }), h("p.aside", { role: "status" })];
  const names = texts.map((text) => spelled(text));
  const rows = barList(names, percent);
  function update() {
    const now = Number(temperature.value);
    const shares = probabilities(data, now, Number(kept.value));
    shownTemperature.textContent = fmt(now, 2);
    rows.set(shares);
    const spread = shares.reduce((sum, share) => (share > 0 ? sum - share * Math.log(share) : sum), 0);
    entropy.textContent = t("sampling entropy", { x: fmt(spread, 3), tokens: fmt(Math.exp(spread), 3) });
  }
  update();
  return h(
    "details.sampling",
    h("summary", t("sampling")),
    h("p.aside", t("sampling says")),
    h("div.picks", h("label", t("temperature"), temperature, shownTemperature), h("label", "top-k", kept)),
    rows.list,
    entropy,
  );
}

/** softmax(logits/temperature) over the first `count` of logits that are sorted, the largest first. @param {ArrayLike<number>} logits @param {number} temperature @param {number} count */
export function probabilities(logits, temperature, count) {
  const shares = new Float64Array(Math.min(count, logits.length));
  let sum = 0;
  for (let i = 0; i < shares.length; i++) sum += shares[i] = Math.exp((logits[i] - logits[0]) / temperature);
  return shares.map((share) => share / sum);
}
