// Every sentence that the page asks for has an entry in words/page.toml or page_steps.toml, in both languages, and every entry is asked for.

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";
import { parse } from "smol-toml";

const read = (place) => readFileSync(new URL(place, import.meta.url), "utf8");
const files = ["page", "page_steps"].map((name) => parse(read(`../../src/clearhead/words/${name}.toml`)));
const WORDS = Object.assign({}, ...files);
const sources = readdirSync(new URL("../src", import.meta.url), { recursive: true })
  .filter((name) => name.endsWith(".js"))
  .map((name) => read(`../src/${name}`))
  .join("\n");
const STATISTICS = ["sink", "previous", "diagonal", "distance", "entropy", "effect"]; // as the document names them
const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

/** What t is called with: keys, and patterns for keys that are put together. */
const calls = sources.matchAll(/(?<![\w.])(?:\w+\.)*t\(\s*((?:"[^"]*"|`[^`]*`|[^"`(),])+)/g);
const called = [...calls].map(([, key]) => key);
const inside = (text, quoted) => [...text.matchAll(quoted)].map(([, name]) => name);
const keys = called.flatMap((key) => inside(key.replace(/[=!]== *"[^"]*"/g, ""), /"([^"]*)"/g));
const patterns = called
  .flatMap((key) => inside(key, /`([^`]*)`/g))
  .map((pattern) => pattern.split(/\$\{[^}]*\}/).map(escaped))
  .map((parts) => new RegExp(`^${parts.join(".+")}$`));

test("every key has its sentence", () => {
  assert.ok(keys.length > 100 && patterns.length > 5);
  const missing = keys.filter((key) => !(key in WORDS));
  const unmet = patterns.filter((pattern) => !Object.keys(WORDS).some((name) => pattern.test(name)));
  assert.deepEqual([missing, unmet], [[], []]);
});

test("every sentence is asked for", () => {
  const found = sources.matchAll(/["`]([^"`\n]*)["`]|(\w+)(?=[,:\]}])/g);
  const known = new Set([...keys, ...STATISTICS, ...[...found].map(([, text, name]) => text ?? name)]);
  const unused = Object.keys(WORDS).filter((name) => !known.has(name) && !patterns.some((each) => each.test(name)));
  assert.deepEqual(unused, []);
});

test("both languages name the same values", () => {
  for (const [key, { en, zh }] of Object.entries(WORDS)) {
    const [values, others] = [en, zh].map((sentence) => [...new Set(sentence.match(/\{\w+\}/g))].sort());
    assert.deepEqual(others, values, key);
  }
});
