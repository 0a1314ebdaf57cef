// The first room: what was asked, the text, and what the model says comes next after the chosen token.

import { wordsOf } from "./causes.js";
import { byId, h } from "./dom.js";
import { bare, percent, spelled } from "./numbers.js";
import { showWay } from "./way.js";

/** @typedef {[string, number]} Choice      a token and its probability */

/** @param {Page} page @param {Shell} shell */
export function answerRoom(page, shell) {
  const { t } = shell;
  const { title, facts, layers, words, runs } = page.header;
  const first = runs[0]?.tokens && runs[0].layers[0];
  const [text, next] = [h("div.text-of"), h("div.next-of")];
  const why = wordsOf(page, shell);
  const untitled = layers ? t(facts?.text === undefined ? "title trace" : "title explain") : spelled(title, 80);
  const language = shell.language();
  const note = facts?.illustration ? ` — ${words[language].illustration}` : null;
  const element = h(
    "section.answer",
    { "aria-labelledby": "opening-title" },
    h("h1", { id: "opening-title" }, why.title ?? untitled),
    facts?.model && h("p.model", facts.model[language], note),
    choices(page.header.why, why, shell),
    h("p.so", why.so),
    h("div.answered", text, next),
    !why.title && first?.name && h("p.note", first.statistics.effect && t("first order"), t("no causes")),
  );
  let shown = "";
  return {
    element,
    text,
    template: why.template,
    legend: "", // of the text's colours, where these are effects
    drawn: () => {}, // the text is there anew
    point: (/** @type {number | null} */ _token) => {}, // at a token
    /** What the model says comes after a token. @param {number} token @param {string} name */
    follow(token, name) {
      if (!facts) return;
      const last = token === facts.following?.length - 1;
      const atEnd = last || !facts.following?.[token];
      /** @type {Choice[] | null} */
      const choices = atEnd ? facts.next : facts.following[token];
      const now = atEnd ? "last" : String(token);
      if (!choices || now === shown) return;
      shown = now;
      const ways = facts.way?.position === token ? facts.way.choices : [];
      const rows = choices.map((choice, index) => {
        const same = (/** @type {any} */ each) => each?.text === choice[0];
        const way = same(ways[index]) ? ways[index] : ways.find(same);
        return row(choice, way?.id, t);
      });
      const title = atEnd ? t("next") : t("next after", { token: bare(name, 20) });
      next.replaceChildren(h("h2", title), h("ol.next", rows));
    },
  };
}

/** Which token of the answer is explained, or rather than which other one. @param {any} causes @param {Record<string, string>} words @param {Shell} shell */
function choices(causes, words, shell) {
  if (!causes?.numbers.length) return null;
  const buttons = causes.numbers.map((/** @type {any} */ number, /** @type {number} */ index) => {
    const id = `number-${index}`;
    const onclick = () => {
      Object.assign(causes, number, { chosen: index });
      shell.redraw();
      byId(id)?.focus();
    };
    const pressed = String(index === (causes.chosen ?? 0));
    return h("button", { id, "aria-pressed": pressed, onclick }, index ? spelled(number.name, 14) : words.all);
  });
  return h("p.choices", words.choose, " ", buttons);
}

/** @param {Choice} choice @param {number | undefined} way      of whose token @param {Say} t */
function row([token, share], way, t) {
  const bar = h("span.share", { style: { width: `${Math.max(0.5, share * 100)}%` } });
  const text = h("bdi", spelled(token));
  const name = way === undefined ? text : h("button", { onclick: () => showWay(way), title: t("way to") }, text);
  return h("li", name, h("span.track", bar), h("span.figures", percent(share)));
}
