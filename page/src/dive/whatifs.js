// The what-ifs of the chosen weight: controls that stay in place while the numbers change.

import { h, slider, tickbox, write } from "../dom.js";
import { asRun, isAsRun } from "../head.js";
import { fmt, listOf } from "../numbers.js";
import { cell } from "./problem.js";

const SMALL = 4096; // numbers: up to so many q, k and v can be edited

/**
 * @param {Say} t @param {() => WhatIf} now @param {(what: WhatIf) => void} suppose
 * @param {() => {i: number, j: number, name: string, head: Head} | null} chosen
 */
export function whatIfs(t, now, suppose, chosen) {
  const set = (/** @type {Partial<WhatIf>} */ change) => suppose({ ...now(), ...change });
  const temperature = warmth("dive-temperature", 1, (temperature) => set({ temperature }));
  const shown = h("output");
  const unscaled = tickbox("dive-scale", (on) => set({ scale: !on }));
  const causal = tickbox("dive-causal", (on) => set({ causal: on ? !chosen()?.head.rules.causal : null }));
  const causalWords = h("span");
  const window = /** @type {HTMLInputElement} */ (
    h("input", {
      type: "number",
      id: "dive-window",
      min: 1,
      placeholder: "—",
      oninput: () => set({ window: Number(window.value) >= 1 ? Math.floor(Number(window.value)) - 1 : null }),
    })
  );
  const isCut = (/** @type {number} */ i, /** @type {number} */ j) => now().cuts.some(([a, b]) => a === i && b === j);
  const cutter = (/** @type {string} */ id, /** @type {boolean} */ whole) =>
    tickbox(id, (on) => {
      const place = chosen();
      if (!place) return;
      const i = whole ? -1 : place.i;
      const others = now().cuts.filter(([a, b]) => a !== i || b !== place.j);
      set({ cuts: on ? [...others, [i, place.j]] : others });
    });
  const [edge, word] = [cutter("dive-edge", false), cutter("dive-word", true)];
  const [edgeWords, wordWords] = [h("span"), h("span")];
  const ribbon = ribbonOf(t, suppose);
  const numbers = h("div.cells");
  const element = h(
    "div.whatifs",
    { role: "group", "aria-label": t("what if") },
    h("span.tag", t("what if")),
    h("label", t("temperature"), temperature, shown),
    h("label", unscaled, t("what if scale")),
    h("label", causal, causalWords),
    h("label", t("window control"), window),
    h("label", edge, edgeWords),
    h("label", word, wordWords),
  );
  return {
    element,
    ribbon,
    numbers,
    /** @param {Problem} problem */
    update(problem) {
      const what = now();
      const place = chosen();
      if (!place) return;
      const { i, j, name, head } = place;
      temperature.value = String(Math.log2(what.temperature));
      write(shown, fmt(what.temperature, 3));
      unscaled.checked = !what.scale;
      causal.checked = what.causal !== null;
      write(causalWords, t(head.rules.causal ? "what if uncausal" : "what if causal"));
      if (document.activeElement !== window) window.value = what.window === null ? "" : String(what.window + 1);
      edge.checked = isCut(i, j);
      word.checked = isCut(-1, j);
      write(edgeWords, t("cut edge", { i, j }));
      write(wordWords, t("cut key", { name }));
      ribbon.hidden = isAsRun(what);
      fillNumbers(numbers, problem, i, j, (key, value) => set({ values: { ...now().values, [key]: value } }), t);
    },
  };
}

/** A slider of temperatures from 1/8 to 8. @param {string} id @param {number} now @param {(temperature: number) => void} act */
export const warmth = (id, now, act) =>
  slider(id, -3, 3, (power) => act(Number((2 ** power).toPrecision(3))), { step: 0.25, value: Math.log2(now) });

/** Says that something is supposed, and leads back. @param {(key: string) => string} t @param {(what: WhatIf) => void} suppose */
export const ribbonOf = (t, suppose) =>
  h(
    "p.supposed",
    { role: "status" },
    h("span", t("supposed")),
    " ",
    h("button", { onclick: () => suppose(asRun()) }, t("back")),
  );

/** The numbers of q, k and v of the chosen place, to be edited. @param {HTMLElement} box @param {Problem} problem @param {number} i @param {number} j @param {(key: string, value: number) => void} edit @param {Say} t */
function fillNumbers(box, { q, k, v, n, m }, i, j, edit, t) {
  const small = Math.max(n, m) * q.width <= SMALL && q.width <= 16;
  if (box.dataset.place === `${i} ${j} ${small}` && box.contains(document.activeElement)) return; // while one is being edited
  box.dataset.place = `${i} ${j} ${small}`;
  const lines = /** @type {[string, Rows | null, number, string][]} */ ([
    ["q", q, i, "query"],
    ["k", k, j, "key"],
    ["v", v, j, "value"],
  ]);
  box.replaceChildren(
    ...(small ? lines : []).flatMap(([name, rows, row, role]) =>
      rows && rows.width <= 16
        ? [
            h(
              "div.cells-of",
              h(`span.num.role-${role}`, h("var", name), h("sub", row)),
              listOf(rows.width, (c) =>
                h("input", {
                  type: "number",
                  step: "any",
                  "aria-label": t("edit number", { name, row, c }),
                  value: String(Number(cell(rows, row, c).toPrecision(5))),
                  oninput: (/** @type {any} */ { target }) =>
                    Number.isFinite(target.valueAsNumber) && edit(`${name} ${row} ${c}`, target.valueAsNumber),
                }),
              ),
            ),
          ]
        : [],
    ),
  );
}
