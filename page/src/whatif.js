// What if: controls that change a rule, and the ribbon that says so and leads back to the actual run.

import { warmth } from "./dive/whatifs.js";
import { h, select, tickbox } from "./dom.js";
import { asRun, isAsRun } from "./head.js";
import { fmt } from "./numbers.js";

/** @param {Story} s @param {Partial<WhatIf>} change */
const suppose = (s, change) => s.commit({ what: { ...s.state.what, ...change } });

const panel = (/** @type {Story} */ s, /** @type {any[]} */ ...parts) =>
  h("div.whatif", { role: "group", "aria-label": s.t("what if") }, h("span.tag", s.t("what if")), ...parts);

/** @param {string} id @param {string} words @param {boolean} on @param {(on: boolean) => void} act */
const checkbox = (id, words, on, act) => h("label", tickbox(id, act, on), words);

/** @param {Story} s */
export function scaleControl(s) {
  const set = (/** @type {boolean} */ on) => suppose(s, { scale: !on });
  return panel(s, checkbox("if-scale", s.t("what if scale"), !s.state.what.scale, set));
}

/** @param {Story} s */
export function maskControl(s) {
  const runIsCausal = s.layer.rules.causal;
  const { causal, window } = s.state.what;
  const sizes = [1, 2, 4, 8, 16, 64, 256].filter((size) => size < s.head.m);
  const options = sizes.map((size) => [size, s.t("what if window", { x: size })]);
  const words = s.t(runIsCausal ? "what if uncausal" : "what if causal");
  const turn = (/** @type {boolean} */ on) => suppose(s, { causal: on ? !runIsCausal : null });
  const cut = (/** @type {string} */ size) => suppose(s, { window: size === "" ? null : Number(size) - 1 });
  const sides = select("if-window", [["", "—"], ...options], window === null ? NaN : window + 1, cut);
  return panel(s, checkbox("if-causal", words, causal !== null, turn), h("label", s.t("window control"), sides));
}

/** @param {Story} s */
export function temperatureControl(s) {
  const value = s.state.what.temperature;
  let frame = 0;
  const shown = h("output", fmt(value, 3));
  const slide = warmth("if-temperature", value, (temperature) => {
    shown.textContent = fmt(temperature, 3);
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => suppose(s, { temperature }));
  });
  return panel(s, h("label", s.t("temperature"), slide, shown));
}

/** Says that these are not the run's numbers; null when they are. @param {Story} s */
export function ribbon(s) {
  const { what } = s.state;
  if (isAsRun(what)) return null;
  const list = [];
  if (!what.scale) list.push(s.t("what if scale"));
  if (what.temperature !== 1) list.push(s.t("what if temperature", { x: fmt(what.temperature, 3) }));
  if (what.causal !== null) list.push(s.t(what.causal ? "what if causal" : "what if uncausal"));
  if (what.window !== null) list.push(s.t("what if window", { x: what.window + 1 }));
  if (what.cuts.length) list.push(s.t("what if cuts", { x: what.cuts.length }));
  if (Object.keys(what.values).length) list.push(s.t("what if values", { x: Object.keys(what.values).length }));
  const said = s.t("not the run", { list: list.join(s.shell.language() === "zh" ? "、" : ", ") });
  const back = h("button", { onclick: () => s.commit({ what: asRun() }) }, s.t("back"));
  return h("div.ribbon", { role: "region", "aria-label": s.t("what if") }, h("span", said), back);
}
