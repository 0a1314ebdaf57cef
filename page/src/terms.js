// The words of the field, each explained where it is pointed at, focused or touched.

import { h } from "./dom.js";
import { lettered } from "./written.js";

const WORDS = {
  residual: "residual stream|残差流",
  mask: "causal mask|mask(?:ed)?|因果掩码|掩码|遮蔽",
  embedding: "embeddings?|嵌入",
  softmax: "softmax",
  logit: "logits?",
  MLP: "MLP",
  W_O: "W\\^O",
  ["d_k"]: "d_k",
  query: "quer(?:y|ies)|查询",
  key: "keys?(?![a-z])|键",
  value: "values?|(?<!数)值",
  weight: "weight(?:s|ed)?(?![a-z])|权重",
  score: "scores?|得分",
  token: "tokens?|词元",
  vector: "vectors?|向量",
  head: "heads?|(?<!开)头",
};
const ANY = new RegExp(
  Object.entries(WORDS)
    .map(([name, words]) => `(?<${name}>(?<![a-z])(?:${words}))`)
    .join("|"),
  "gi",
);
const ROLES = ["query", "key", "value", "weight"];
const tip = h("div.tip", { role: "tooltip", id: "tip", hidden: true });

/** Explains the term that is pointed at, focused or touched. @param {Event} event */
function show({ target }) {
  const term = /** @type {HTMLElement} */ (target).closest?.("dfn");
  tip.hidden = !term;
  if (!term) return;
  tip.textContent = term.dataset.says ?? "";
  document.body.append(tip);
  const { left, bottom, top } = term.getBoundingClientRect();
  const { offsetWidth: wide, offsetHeight: high } = tip;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - wide - 8))}px`;
  tip.style.top = `${bottom + high + 12 > innerHeight ? top - high - 6 : bottom + 6}px`;
}
for (const name of ["pointerover", "focusin", "click"]) addEventListener(name, show);
addEventListener("scroll", () => (tip.hidden = true), { passive: true });
const onkeydown = (/** @type {KeyboardEvent} */ event) => {
  if (event.key !== "Escape" || tip.hidden) return;
  event.stopPropagation(); // this Escape is for the explanation alone
  tip.hidden = true;
};
addEventListener("keydown", onkeydown, { capture: true });

/** A sentence whose terms explain themselves, each once; query, key, value and weight in their colours. @param {Child} text @param {Say} t @returns {Child} */
export function explained(text, t) {
  if (typeof text !== "string") return text;
  /** @type {Child[]} */
  const parts = [];
  const seen = new Set();
  let end = 0;
  for (const { 0: word, index, groups = {} } of text.matchAll(ANY)) {
    const name = Object.keys(groups).find((each) => groups[each]) ?? "";
    const role = ROLES.includes(name) ? `num role-${name === "weight" ? "weights" : name}` : "";
    const said = lettered(word);
    const term = seen.has(name)
      ? h("span", { class: role || null }, said)
      : h("dfn", { class: role || null, tabindex: 0, "aria-describedby": "tip", "data-says": t(`term ${name}`) }, said);
    parts.push(lettered(text.slice(end, index)), term);
    seen.add(name);
    end = Number(index) + word.length;
  }
  return [...parts, lettered(text.slice(end))];
}
