// The frame of every page: title bar, theme, language, messages to screen readers, and keyboard shortcuts.

import WORDS from "../../src/clearhead/words/page.toml";
import { forgetColours } from "./colour.js";
import { byId, h, paper } from "./dom.js";

const THEMES = ["auto", "light", "dark"];

const langOf = (/** @type {Language} */ language) => (language === "zh" ? "zh-Hans" : "en");

/** The keys that a focused control uses itself, so that they are no shortcuts there. @param {HTMLElement} target */
function keysUsedBy(target) {
  if (target.tagName === "SELECT") return /^(Arrow|Enter|Escape|[\w ]$)/;
  if (target.tagName === "TEXTAREA") return /^/;
  if (target.tagName !== "INPUT") return /^(BUTTON|SUMMARY)$/.test(target.tagName) ? /^(Enter| )$/ : /^$/;
  const { type } = /** @type {HTMLInputElement} */ (target);
  return type === "range" ? /^Arrow/ : type === "checkbox" ? /^ $/ : /^/;
}

function listenToKeys(/** @type {Map<string, (event: KeyboardEvent) => void | false>} */ keys) {
  document.addEventListener("keydown", (event) => {
    const { key, defaultPrevented, metaKey, ctrlKey, altKey, target } = event;
    const act = keys.get(key);
    if (!act || defaultPrevented || metaKey || (ctrlKey && !altKey)) return;
    if (!keysUsedBy(/** @type {HTMLElement} */ (target)).test(key) && act(event) !== false) event.preventDefault();
  });
}

/** @param {any} header @param {(shell: Shell) => void} draw      called again when language or theme change */
export function openShell(header, draw) {
  /** @type {Language} */
  let language = header.language === "zh" ? "zh" : "en";
  let theme = "auto";
  /** @type {Map<string, (event: KeyboardEvent) => void | false>} */
  const keys = new Map();
  const live = h("div.live", { role: "status", "aria-live": "polite" });
  const bar = h("header.bar");
  const main = h("main");
  document.body.append(bar, main, live);
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let later;
  const shell = {
    main,
    t: speaker(language),
    language: () => language,
    /** A sentence for screen readers, once the pointer or cursor rests. @param {string} words */
    say(words) {
      clearTimeout(later);
      later = setTimeout(() => (live.textContent = words), 250);
    },
    /** @param {string} key @param {(event: KeyboardEvent) => void | false} act      false: the key is not used */
    key: (key, act) => void keys.set(key, act),
    redraw,
  };
  listenToKeys(keys);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  for (const name of ["beforeprint", "afterprint"])
    addEventListener(name, () => {
      paper.printing = name === "beforeprint"; // light, and everything drawn
      redraw();
    });

  function redraw() {
    const place = window.scrollY;
    document.documentElement.lang = langOf(language);
    const shown = paper.printing ? "light" : theme;
    if (shown === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", shown);
    forgetColours();
    shell.t = speaker(language, header.words?.[language].page);
    bar.replaceChildren(...buttons());
    main.replaceChildren();
    draw(shell);
    window.scrollTo({ top: place, behavior: "instant" });
  }

  function buttons() {
    const { t } = shell;
    const other = language === "zh" ? "en" : "zh";
    const nextTheme = THEMES[(THEMES.indexOf(theme) + 1) % 3];
    const turn = (/** @type {string} */ id, /** @type {() => void} */ act) => () => {
      act();
      redraw();
      byId(id)?.focus();
    };
    const signs = ["arrows", "heads", "point"].map((name) => h("li", t(`keys ${name}`)));
    const title = t(`theme ${theme}`);
    const changeTheme = turn("theme", () => (theme = nextTheme));
    const changeLanguage = turn("language", () => (language = other));
    const sign = theme === "auto" ? "◐" : theme === "light" ? "☀" : "☾";
    return [
      h("span.brand", "clearhead"),
      h("span.space"),
      h("details.keys", { hidden: Boolean(header.learning) }, h("summary", t("keys")), h("ul", signs)),
      h("button", { id: "theme", title, "aria-label": title, onclick: changeTheme }, sign),
      h("button", { id: "language", lang: langOf(other), onclick: changeLanguage }, t("language")),
    ];
  }
  redraw();
  return shell;
}

/**
 * @param {"en" | "zh"} language @param {Record<string, string>} [more]      that came with the document
 * @returns {(key: string, values?: Record<string, any>) => string}
 */
export const speaker =
  (language, more = {}) =>
  (key, values = {}) =>
    (more[key] ?? WORDS[key]?.split("|")[language === "zh" ? 1 : 0] ?? key).replace(/\{(\w+)\}/g, (_, name) =>
      String(values[name] ?? ""),
    );
