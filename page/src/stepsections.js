// The steps of the page and what each says: one query first, then the matrices. A step that the layer lacks is left out.

import { spelled } from "./numbers.js";
import { oneQuery } from "./onequery.js";
import { withOneHead } from "./onehead.js";
import { closing } from "./opening.js";
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
import { waySection } from "./way.js";
import { maskControl, scaleControl, temperatureControl } from "./whatif.js";

/** @typedef {import("./story.js").Story} Story */
/** @typedef {import("./section.js").Section} Section */

/** @param {Story} s @returns {Section[]} */
export function sectionsOf(s) {
  const { t } = s;
  const formulaOf = (/** @type {string} */ name) => [s.step(name)?.formula].filter(Boolean);
  const plainly = (/** @type {string} */ symbol) => symbol.replace("′", "'");
  const plain = (
    /** @type {string} */ id,
    /** @type {string} */ symbol,
    /** @type {() => import("./section.js").Scene[]} */ scenes,
    /** @type {any} */ more = {},
  ) =>
    section(s, { id, symbol, title: t(id), says: () => s.words(id), formulas: () => formulaOf(id), scenes, ...more });
  const whole = s.step("concat");
  const last = whole ? "heads" : "output";
  const projected = s.named("x");
  const sections = [
    section(s, {
      id: "qkv",
      symbol: projected ? "X→QKV" : "QKV",
      title: t("qkv"),
      says: () => t(projected ? "project" : "given qkv"),
      formulas: () => (projected ? ["q", "k", "v"].flatMap(formulaOf) : []),
      scenes: () => inputScenes(s),
    }),
    section(s, {
      id: "one",
      symbol: `q → o`,
      title: t("one"),
      says: () => t("one says", { token: spelled(s.queryName(s.state.query)) }),
      body: () => oneQuery(s),
      ofCell: true,
    }),
    plain("scores", "S", () => scoreScenes(s)),
    plain("scaled", "S′", () => logitScenes(s, "scaled"), {
      controls: () => scaleControl(s),
      says: () =>
        s.state.what.scale
          ? s.words(formulaOf("scaled")[0].includes("√") ? "scaled" : "scaled by")
          : t("what if scale"),
      formulas: () => (s.state.what.scale ? formulaOf("scaled") : ["S' = S"]),
    }),
  ];
  for (const [name, symbol] of [
    ["capped", "C"],
    ["biased", "B"],
  ])
    if (s.step(name)) sections.push(plain(name, symbol, () => logitScenes(s, name)));
  const masking = () =>
    s.hidden
      ? [
          (s.state.what.causal === null && s.state.what.window === null && s.step("masked")?.formula) ||
            `M = ${plainly(beforeMask(s))}, -∞ where forbidden`,
        ]
      : [];
  const softmax = () =>
    formulaOf("weights").map((text) =>
      text.replace(
        /(softmax\(\[?)[A-Z]'?/,
        (/** @type {string} */ _, /** @type {string} */ start) => start + plainly(insideSoftmax(s)),
      ),
    );
  sections.push(
    plain("masked", "M", () => maskedScenes(s), {
      controls: () => maskControl(s),
      says: () => (s.hidden ? s.words("masked") : t("nothing masked")),
      formulas: masking,
    }),
    plain("weights", "A", () => weightScenes(s), {
      controls: () => temperatureControl(s),
      title: t(s.columns ? "weights columns" : "weights"),
      says: () => s.words(s.head.rules.sink === -Infinity ? "weights" : "weights with sink"),
      formulas: softmax,
    }),
    plain(last, "O", () => outputScenes(s), {
      says: () => s.words(last) + (s.head.factor === 1 ? "" : t("times", { x: s.head.factor })),
    }),
  );
  if (whole) {
    const concat = plain("concat", "H", () => concatScenes(s));
    sections.push(s.layer.one ? withOneHead(s, concat) : concat);
    sections.push(
      section(s, {
        id: "output",
        symbol: "U",
        title: t("layer output"),
        says: () => s.words("layer output"),
        formulas: () => formulaOf("output"),
        scenes: () => layerOutputScenes(s),
      }),
    );
  }
  if (s.facts.way) sections.push(waySection(s));
  sections.push(
    section(s, { id: "checked", symbol: "✓", title: t("checked"), says: () => "", body: () => closing(s) }),
  );
  return sections;
}
