// The frame of every page: title bar, theme, language, messages to screen readers, and keyboard shortcuts.

import { forgetColours } from "./colour.js";
import { byId, h } from "./dom.js";
import { speaker } from "./words.js";

/** @typedef {"en" | "zh"} Language */
/** @typedef {ReturnType<typeof openShell>} Shell */

const THEMES = ["auto", "light", "dark"];

/** The keys that a focused control uses itself, so that they are no shortcuts there. @param {HTMLElement} target */
function ownKeys(target) {
  if (target.tagName === "SELECT") return /^(Arrow|Enter|Escape|[\w ]$)/;
  if (target.tagName !== "INPUT") return /^(BUTTON|SUMMARY)$/.test(target.tagName) ? /^(Enter| )$/ : /^$/;
  const { type } = /** @type {HTMLInputElement} */ (target);
  return type === "range" ? /^Arrow/ : type === "checkbox" ? /^ $/ : /^/;
}

/**
 * @param {any} header
 * @param {(shell: Shell) => void} draw      called again when language or theme change
 */
export function openShell(header, draw) {
  /** @type {Language} */
  let language = header.language === "zh" ? "zh" : "en";
  let theme = "auto";
  let printing = false; // on paper: light, and everything drawn
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
    printing: () => printing,
    /** A sentence for screen readers, once the pointer or cursor rests. @param {string} words */
    say(words) {
      clearTimeout(later);
      later = setTimeout(() => (live.textContent = words), 250);
    },
    /** @param {string} key @param {(event: KeyboardEvent) => void | false} act      false: the key is not used */
    key: (key, act) => void keys.set(key, act),
    redraw,
  };
  document.addEventListener("keydown", (event) => {
    const act = keys.get(event.key);
    if (
      !act ||
      event.defaultPrevented ||
      event.metaKey ||
      (event.ctrlKey && !event.altKey) ||
      ownKeys(/** @type {HTMLElement} */ (event.target)).test(event.key)
    )
      return;
    if (act(event) !== false) event.preventDefault();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  for (const [name, on] of /** @type {[string, boolean][]} */ ([
    ["beforeprint", true],
    ["afterprint", false],
  ]))
    addEventListener(name, () => {
      printing = on;
      redraw();
    });

  function redraw() {
    const place = window.scrollY;
    document.documentElement.lang = language === "zh" ? "zh-Hans" : "en";
    const shown = printing ? "light" : theme;
    if (shown === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", shown);
    forgetColours();
    shell.t = speaker(language);
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
    const signs = ["arrows", "heads", "search", "point", ...(header.edited ? ["edits"] : [])].map((name) =>
      h("li", t(`keys ${name}`)),
    );
    return [
      h("span.brand", "clearhead"),
      h("span.space"),
      h("details.keys", { hidden: Boolean(header.learning || header.scale) }, h("summary", t("keys")), h("ul", signs)),
      h(
        "button",
        {
          id: "theme",
          title: t(`theme ${theme}`),
          "aria-label": t(`theme ${theme}`),
          onclick: turn("theme", () => (theme = nextTheme)),
        },
        theme === "auto" ? "◐" : theme === "light" ? "☀" : "☾",
      ),
      h(
        "button",
        {
          id: "language",
          lang: other === "zh" ? "zh-Hans" : "en",
          onclick: turn("language", () => (language = other)),
        },
        t("language"),
      ),
    ];
  }
  redraw();
  return shell;
}
