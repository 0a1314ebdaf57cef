// Every sentence that the page asks for has an entry in words/page.toml or page_steps.toml, in both languages, and every entry is asked for.

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";
import { parse } from "smol-toml";

const read = (/** @type {string} */ place) => readFileSync(new URL(place, import.meta.url), "utf8");
const WORDS = {
  ...parse(read("../../src/clearhead/words/page.toml")),
  ...parse(read("../../src/clearhead/words/page_steps.toml")),
};
const sources = readdirSync(new URL("../src", import.meta.url), { recursive: true })
  .filter((name) => String(name).endsWith(".js"))
  .map((name) => read(`../src/${name}`))
  .join("\n");
const STATISTICS = ["sink", "previous", "diagonal", "distance", "entropy", "effect"]; // as the document names them
const escaped = (/** @type {string} */ text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

/** What t is called with: keys, and patterns for keys that are put together. */
const called = [...sources.matchAll(/(?<![\w.])(?:\w+\.)*t\(\s*((?:"[^"]*"|`[^`]*`|[^"`(),])+)/g)].map(
  ([, key]) => key,
);
const keys = called.flatMap((key) =>
  [...key.replace(/[=!]== *"[^"]*"/g, "").matchAll(/"([^"]*)"/g)].map(([, name]) => name),
);
const patterns = called
  .flatMap((key) => [...key.matchAll(/`([^`]*)`/g)])
  .map(
    ([, pattern]) =>
      new RegExp(
        `^${pattern
          .split(/\$\{[^}]*\}/)
          .map(escaped)
          .join(".+")}$`,
      ),
  );

test("every key has its sentence", () => {
  assert.ok(keys.length > 100 && patterns.length > 5);
  assert.deepEqual(
    keys.filter((key) => !(key in WORDS)),
    [],
  );
  const names = Object.keys(WORDS);
  assert.deepEqual(
    patterns.filter((pattern) => !names.some((name) => pattern.test(name))),
    [],
  );
});

test("every sentence is asked for", () => {
  const literals = new Set(
    [...sources.matchAll(/["`]([^"`\n]*)["`]|(\w+)(?=[,:\]}])/g)].map(([, text, name]) => text ?? name),
  );
  const used = (/** @type {string} */ name) =>
    keys.includes(name) || literals.has(name) || patterns.some((pattern) => pattern.test(name));
  assert.deepEqual(
    Object.keys(WORDS).filter((name) => !used(name) && !STATISTICS.includes(name)),
    [],
  );
});

test("both languages name the same values", () => {
  for (const [key, { en, zh }] of Object.entries(WORDS)) {
    const [values, others] = [en, zh].map((sentence) => [...new Set(sentence.match(/\{\w+\}/g))].sort());
    assert.deepEqual(others, values, key);
  }
});
