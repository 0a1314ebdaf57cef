// The first room: what was asked, the text, and what the model says comes next after the chosen token.

import { wordsOf } from "./causes.js";
import { byId, h, renew, write } from "./dom.js";
import { bare, percent, spelled } from "./numbers.js";
import { showWay } from "./way.js";

/** @typedef {[text: string, share: number, id?: number, logit?: number, usual?: number]} Choice      a token and its probability; in a run of this page its number, its logit, and the probability where nothing is changed */

/** @param {Page} page @param {Shell} shell @param {Live | null} live @param {Child} bar      to type in */
export function answerRoom(page, shell, live, bar) {
  const { t } = shell;
  const { header } = page;
  const { title, layers, words, runs } = header;
  const first = runs[0]?.tokens && runs[0].layers[0];
  const [text, next, above, list] = [h("div.text-of"), h("div.next-of"), h("h2"), nextList(t)];
  const [heading, asked, so, note] = [h("h1", { id: "opening-title" }), h("div"), h("p.so"), h("p.note")];
  const language = shell.language();
  const illustration = header.facts?.illustration ? ` — ${words[language].illustration}` : null;
  let shown = "";
  const room = {
    element: h(
      "section.answer",
      { "aria-labelledby": "opening-title" },
      ...[heading, header.facts?.model && h("p.model", header.facts.model[language], illustration), bar, asked, so],
      ...[h("div.answered", text, next), note],
    ),
    text,
    template: "",
    legend: "", // of the text's colours, where these are effects
    caption: h("p.caption", { "aria-live": "off" }), // of a head, or of a part of the text
    show: (/** @type {number} */ _layer = 0, _head = 0) => {}, // a head that is pointed at; else the chosen one
    arcs: (/** @type {number} */ _layer, /** @type {number} */ _head) => {}, // of a head in the text
    drawn: () => {}, // the text is there anew
    point: (/** @type {number | null} */ _token) => {}, // at a token
    /** What was asked, of the run that is shown now. */
    fill() {
      const { facts, why } = header;
      const said = wordsOf(page, shell);
      const untitled = layers ? t(facts?.text === undefined ? "title trace" : "title explain") : spelled(title, 80);
      heading.textContent = said.title ?? untitled;
      asked.replaceChildren(...[choices(why, said, shell, live) ?? []].flat());
      const wrong = (header.claims ?? []).filter((/** @type {any} */ { right }) => !right);
      const mistakeOf = (/** @type {any} */ { text, mistake }) =>
        text[language] + (mistake ? ` — ${mistake[language]}` : "");
      so.textContent = said.so ?? wrong.map(mistakeOf).join(" ");
      const causeless = !said.title && !live && first?.name;
      document.title = `${heading.textContent} ${facts?.text ?? ""}`;
      note.textContent = causeless ? (first.statistics.effect ? t("first order") : "") + t("no causes") : "";
      Object.assign(room, { template: said.template, legend: "", arcs: () => {}, drawn: () => {}, point: () => {} });
      shown = "";
    },
    /** What the model says comes after a token. @param {number} token @param {string} name */
    follow(token, name) {
      const { facts, tokens } = header;
      if (!facts) return;
      const atEnd = facts.after
        ? token >= tokens.length - 1
        : token === facts.following?.length - 1 || !facts.following?.[token];
      /** @type {Choice[] | null} */
      const choices = atEnd ? facts.next : facts.after ? facts.after(token) : facts.following[token];
      const now = `${page.version} ${atEnd || token}`;
      if (!choices || now === shown) return;
      shown = now;
      if (facts.live && !header.why) {
        const [likeliest, share] = facts.next[0];
        for (const each of [asked, so]) write(each, ""); // they are of the run before
        write(heading, t("title live", { token: bare(likeliest), share: percent(share) }));
        const title = facts.text + likeliest;
        if (document.title !== title) document.title = title; // each time it is set, the browser draws it
      }
      const ways = facts.way?.position === token ? facts.way.choices : [];
      list.fill(choices, ways, live && atEnd && !header.why?.turns.length ? live : null);
      write(above, atEnd ? t("next") : t("next after", { token: bare(name, 20) }));
      if (!next.firstChild) next.append(above, list.element);
    },
  };
  room.fill();
  return room;
}

/** Which token of the answer is explained, or rather than which other one. @param {any} causes @param {Record<string, string>} words @param {Shell} shell @param {Live | null} live */
function choices(causes, words, shell, live) {
  if (!causes || (live && !causes.numbers.length)) return null;
  const buttons = causes.numbers.map((/** @type {any} */ number, /** @type {number} */ index) => {
    const id = `number-${index}`;
    const onclick = () => {
      if (causes.ask) return causes.ask(number.id);
      Object.assign(causes, number, { chosen: index });
      shell.redraw();
      byId(id)?.focus();
    };
    const pressed = String(index === (causes.chosen ?? 0));
    return h("button", { id, "aria-pressed": pressed, onclick }, index ? spelled(number.name, 14) : words.all);
  });
  const elsewhere = causes.ask || live ? null : h("small", words.elsewhere);
  return h("p.choices", buttons.length ? [words.choose, " ", buttons] : null, elsewhere);
}

/** The list of next tokens: a row stays where its choice changes, so that its bar moves. @param {Say} t */
function nextList(t) {
  /** @type {ReturnType<typeof rowOf>[]} */
  let rows = [];
  const element = h("ol.next", { id: "next" });
  /** @param {Choice[]} choices @param {any[]} ways @param {Live | null} live      puts one after the text */
  function fill(choices, ways, live) {
    rows = choices.map((choice, index) => {
      const same = (/** @type {any} */ each) => each?.text === choice[0];
      const way = (same(ways[index]) ? ways[index] : ways.find(same))?.id;
      const last = rows[index];
      const row = last && last.way === way && last.live === live ? last : rowOf(t, way, live);
      row.fill(choice);
      return row;
    });
    renew(
      element,
      rows.map((row) => row.element),
    );
  }
  return { element, fill };
}

/** @param {Say} t @param {number | undefined} way      of whose token @param {Live | null} live */
function rowOf(t, way, live) {
  let token = "";
  const width = (/** @type {number} */ x) => `${Math.max(0.5, x * 100)}%`;
  const [text, bar, mark, figures] = [h("bdi"), h("span.share"), h("span.was"), h("span.figures")];
  const name = way === undefined ? text : h("button", { onclick: () => showWay(way), title: t("way to") }, text);
  const append = { onclick: () => live?.type(live.state.text + token), title: t("try append") };
  const more = live && h("button.more", { ...append, "aria-label": append.title }, "+");
  const element = h("li", name, h("span.track", bar, mark), figures, more);
  return {
    ...{ element, way, live },
    fill(/** @type {Choice} */ [said, share, id, logit, usual]) {
      token = said;
      write(text, spelled(token));
      bar.style.width = width(share);
      mark.hidden = usual === undefined;
      mark.style.left = width(usual ?? 0);
      mark.title = percent(usual ?? 0);
      write(figures, percent(share));
      if (id !== undefined) Object.assign(element.dataset, { id, logit });
    },
  };
}
