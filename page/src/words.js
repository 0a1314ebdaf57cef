// What the page says around the numbers, in English and Chinese. The sentences of the steps come with the document.

import WORDS from "../../src/clearhead/words/page.toml";

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
