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
const shown = h("div.tip", { role: "tooltip", id: "tip", hidden: true });

/** @param {Element} over @param {string} text */
function show(over, text) {
  shown.textContent = text;
  document.body.append(shown);
  shown.hidden = false;
  const { left, bottom, top } = over.getBoundingClientRect();
  const { offsetWidth: wide, offsetHeight: high } = shown;
  shown.style.left = `${Math.max(8, Math.min(left, innerWidth - wide - 8))}px`;
  shown.style.top = `${bottom + high + 12 > innerHeight ? top - high - 6 : bottom + 6}px`;
}
const hide = () => void (shown.hidden = true);
addEventListener("scroll", hide, { passive: true });

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
    const open = (/** @type {Event} */ { currentTarget }) =>
      show(/** @type {Element} */ (currentTarget), t(`term ${name}`));
    const onkeydown = (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Escape" || shown.hidden) return;
      event.stopPropagation(); // this Escape is for the explanation alone
      hide();
    };
    const acts = { onpointerenter: open, onfocus: open, onclick: open, onpointerleave: hide, onblur: hide, onkeydown };
    const said = lettered(word);
    const term = seen.has(name)
      ? h("span", { class: role || null }, said)
      : h("dfn", { class: `term ${role}`, tabindex: 0, "aria-describedby": "tip", ...acts }, said);
    parts.push(lettered(text.slice(end, index)), term);
    seen.add(name);
    end = Number(index) + word.length;
  }
  return [...parts, lettered(text.slice(end))];
}
