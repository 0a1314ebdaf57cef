// The steps of the page and what each says: one query first, then the matrices. A step that the layer lacks is left out.

import { spelled } from "./numbers.js";
import { section } from "./section.js";
import {
  beforeMask,
  concatScenes,
  inputScenes,
  insideSoftmax,
  layerOutputScenes,
  logitScenes,
  maskedScenes,
  outputScenes,
  scoreScenes,
  weightScenes,
} from "./stepscenes.js";
import { closing, oneQuery } from "./steptables.js";
import { waySection } from "./way.js";

/** @typedef {Parameters<typeof section>[1]} Options */

/** The formula of a step, if it has one. @param {Story} s @param {string} name @returns {string[]} */
const formulaOf = (s, name) => [s.step(name)?.formula].filter(Boolean);

/** A symbol as the formulas have it. @param {string} symbol */
const plainly = (symbol) => symbol.replace("′", "'");

/** A section with the title, the sentences and the formula of its step, where it has no others. @param {Story} s @param {string} id @param {string} symbol @param {Partial<Options>} more */
const sectionOf = (s, id, symbol, more) =>
  section(s, { id, symbol, title: s.t(id), says: () => s.words(id), formulas: () => formulaOf(s, id), ...more });

/** @param {Story} s @returns {Section[]} */
export function sectionsOf(s) {
  const { t } = s;
  const whole = s.step("concat");
  const last = whole ? "heads" : "output";
  const projected = s.named("x");
  const sections = [
    sectionOf(s, "qkv", projected ? "X→QKV" : "QKV", {
      says: () => t(projected ? "project" : "given qkv"),
      formulas: () => (projected ? ["q", "k", "v"].flatMap((name) => formulaOf(s, name)) : []),
      scenes: () => inputScenes(s),
    }),
    sectionOf(s, "one", "q → o", {
      says: () => t("one says", { token: spelled(s.queryName(s.state.query)) }),
      formulas: undefined,
      body: () => oneQuery(s),
      ofCell: true,
    }),
    ...weightSections(s),
    sectionOf(s, last, "O", { says: () => s.words(last), scenes: () => outputScenes(s) }),
  ];
  if (whole) {
    sections.push(
      sectionOf(s, "concat", "H", { scenes: () => concatScenes(s) }),
      sectionOf(s, "output", "U", {
        title: t("layer output"),
        says: () => s.words("layer output"),
        scenes: () => layerOutputScenes(s),
      }),
    );
  }
  if (s.facts.way) sections.push(waySection(s));
  const checked = () => sectionOf(s, "checked", "✓", { says: () => "", formulas: undefined, body: () => closing(s) });
  return s.facts.live ? sections : [...sections, checked()]; // the costs and the checks are of the record
}

/** From the scores to the weights. @param {Story} s @returns {Section[]} */
function weightSections(s) {
  const scaledBy = () => s.words(formulaOf(s, "scaled")[0].includes("√") ? "scaled" : "scaled by");
  const changed = [
    ["capped", "C"],
    ["biased", "B"],
  ].filter(([name]) => s.step(name));
  const masking = () => {
    return s.hidden ? [s.step("masked")?.formula || `M = ${plainly(beforeMask(s))}, -∞ where forbidden`] : [];
  };
  const softmax = () =>
    formulaOf(s, "weights").map((text) =>
      text.replace(/(softmax\(\[?)[A-Z]'?/, (_, start) => start + plainly(insideSoftmax(s))),
    );
  return [
    sectionOf(s, "scores", "S", { scenes: () => scoreScenes(s) }),
    sectionOf(s, "scaled", "S′", { says: scaledBy, scenes: () => logitScenes(s, "scaled") }),
    ...changed.map(([name, symbol]) => sectionOf(s, name, symbol, { scenes: () => logitScenes(s, name) })),
    sectionOf(s, "masked", "M", {
      says: () => (s.hidden ? s.words("masked") : s.t("nothing masked")),
      formulas: masking,
      scenes: () => maskedScenes(s),
    }),
    sectionOf(s, "weights", "A", {
      title: s.t(s.columns ? "weights columns" : "weights"),
      says: () => {
        const { over, sink } = s.head.rules;
        return over === "rows"
          ? s.words(sink === -Infinity ? "weights" : "weights with sink")
          : s.t(`over ${over} says`);
      },
      formulas: softmax,
      scenes: () => weightScenes(s),
    }),
  ];
}
