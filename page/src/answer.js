// The first room: what was asked, the text, and what the model says comes next after the chosen token.

import { add, h } from "./dom.js";
import { percent, spelled } from "./numbers.js";
import { sampling } from "./sampling.js";
import { showWay } from "./way.js";

/** @typedef {[string, number, number?]} Choice      a token, its probability, and that in the other run */

/**
 * @param {import("./container.js").Page} page
 * @param {import("./shell.js").Shell} shell
 */
export function answerRoom(page, shell) {
  const { t } = shell;
  const { title, facts, edited, layers, words } = page.header;
  const explained = facts?.text !== undefined;
  const [text, next] = [h("div.text-of"), h("div.next-of")];
  const heading = explained ? t("title explain") : layers ? t("title trace") : spelled(title, 80);
  const element = h("section.answer", { "aria-labelledby": "opening-title" });
  add(element, [
    h("h1", { id: "opening-title" }, heading),
    facts?.model &&
      h(
        "p.model",
        facts.model[shell.language()],
        facts.illustration ? ` — ${words[shell.language()].illustration}` : null,
      ),
    edited &&
      h(
        "ul.edits",
        edited.edits.map((/** @type {string} */ edit) => h("li", h("code", edit))),
      ),
    h("div.answered", text, next),
    h("div", { id: "causes" }),
  ]);
  let shown = "";
  return {
    element,
    text,
    /** What the model says comes after a token. @param {boolean} withEdits @param {number} token @param {string} name */
    follow(withEdits, token, name) {
      if (!facts) return;
      const run = withEdits && edited ? { ...facts, ...edited.facts } : facts;
      const last = token === run.following?.length - 1;
      /** @type {Choice[] | null} */
      const choices = last || !run.following?.[token] ? run.next : run.following[token];
      const now = `${withEdits} ${choices === run.next ? "last" : token}`;
      if (!choices || now === shown) return;
      shown = now;
      const ways = run.way?.position === token ? run.way.choices : [];
      next.replaceChildren(
        h("h2", choices === run.next ? t("next") : t("next after", { token: spelled(name.trim() || name, 20) })),
        h(
          "ol.next",
          choices.map((choice, at) => {
            const same = (/** @type {any} */ each) => each?.text === choice[0];
            const way = same(ways[at]) ? ways[at] : ways.find(same);
            return row(
              choice,
              way?.id,
              edited && choices === run.next && (withEdits ? "without edits" : "with edits"),
              t,
            );
          }),
        ),
        ...(choices === run.next && run.sampling ? [sampling(page, shell, run.sampling)] : []),
      );
    },
  };
}

/** @param {Choice} choice @param {number | undefined} way      of whose token @param {string | false} otherRun @param {(key: string, values?: any) => string} t */
function row([token, share, other], way, otherRun, t) {
  const bar = h("span.share", { style: { width: `${Math.max(0.5, share * 100)}%` } });
  return h(
    "li",
    way === undefined
      ? h("bdi", spelled(token))
      : h("button", { onclick: () => showWay(way), title: t("way to") }, h("bdi", spelled(token))),
    h("span.track", bar),
    h("span.figures", percent(share)),
    other !== undefined && otherRun && h("small", t(otherRun, { x: percent(other) })),
  );
}
