// What the page says around the numbers, in English and Chinese. The sentences of the steps come with the document.

/** @type {Record<string, [string, string]>} */
const WORDS = {
  "theme auto": ["theme: same as the system", "主题：跟随系统"],
  "theme light": ["theme: light", "主题：浅色"],
  "theme dark": ["theme: dark", "主题：深色"],
  language: ["中文", "English"],
  keys: ["shortcuts", "快捷键"],
  "keys heads": ["[ and ]: previous and next head; { and }: layer", "[ 与 ]：上一个、下一个头；{ 与 }：上一层、下一层"],
  "masked cell": ["masked", "被遮蔽"],
};

/**
 * @param {"en" | "zh"} language
 * @returns {(key: string, values?: Record<string, any>) => string}
 */
export const speaker =
  (language) =>
  (key, values = {}) =>
    (WORDS[key]?.[language === "zh" ? 1 : 0] ?? key).replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));

/** A page of another kind has words of its own. @param {Record<string, [string, string]>} own */
export const addWords = (own) => void Object.assign(WORDS, own);
