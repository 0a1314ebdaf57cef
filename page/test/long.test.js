import assert from "node:assert/strict";
import { test } from "node:test";
import { range } from "../src/attention.js";
import { firstPixel, forbidden, pixel } from "../src/long/source.js";
import { search, tokenAt, tokens, unitName, unitOf, words } from "../src/long/units.js";

const plain = { scale: 1, softcap: null, causal: false, window: [null, null], offset: 0, keys: null, queries: null, allowed: null, bias: null, slope: 0, sink: -Infinity, temperature: 1 };

test("words begin where a space, a sign or another script begins", () => {
  const starts = (texts) => [...words(texts).edges];
  assert.deepEqual(starts([" un", "believ", "able", ",", " it", "'s", " 1", "2", "猫", "犬"]), [0, 3, 4, 6, 8, 9, 10]);
  assert.deepEqual(starts(["un", "##believ", "##able", "story"]), [0, 3, 4]);
  assert.deepEqual(starts(["▁a", "b", "▁c"]), [0, 2, 3]);
  assert.deepEqual(starts(["7", "12"]), [0, 1, 2]);
});

test("units and tokens lead to each other", () => {
  const u = words([" a", "b", " c", " d", "e", "f"]);
  assert.deepEqual([0, 1, 2, 3, 4, 5].map((token) => unitOf(u, token)), [0, 0, 1, 2, 2, 2]);
  assert.deepEqual([0, 1, 2, 3].map((unit) => tokenAt(u, unit)), [0, 2, 3, 6]);
  assert.equal(unitName(u, (at) => [" a", "b", " c", " d", "e", "f"][at], 2), "def");
  assert.deepEqual([tokenAt(tokens(4), 3), unitOf(tokens(4), 3)], [3, 3]);
});

test("a search finds words over token borders, each place once", () => {
  assert.deepEqual(search([" the", " un", "believ", "able", " The", "ory"], "the"), [0, 4]);
  assert.deepEqual(search([" un", "believ", "able"], "NBEL"), [0]);
  assert.deepEqual(search(["aa", "a"], ""), []);
  assert.deepEqual(search(["em", "##bed"], "embed"), [0]);
});

test("a pixel's value lies within what it says it may be off", () => {
  const largest = 0.37;
  for (const value of [0, 0.001, 0.05, 0.2, 0.37]) {
    const code = Math.round(Math.sqrt(value / largest) * 80);
    const p = { pixels: [1, 1], data: Uint8Array.of(code), at: 0, first: Uint8Array.of(code), firstAt: 0, largest };
    for (const read of [pixel(p, 0, 0), firstPixel(p, 0)]) assert.ok(Math.abs(read.value - value) <= read.off + 1e-12, `${value}: ${JSON.stringify(read)}`);
  }
});

test("a block is forbidden only where no query of it sees any key of it", () => {
  for (const rules of [{ causal: true, offset: 2 }, { window: [2, 1] }, { window: [1, null], offset: 3 }, { keys: 4 }, { queries: 3 }])
    for (let i0 = 0; i0 < 6; i0++)
      for (let i1 = i0 + 1; i1 <= 6; i1++)
        for (let j0 = 0; j0 < 8; j0++)
          for (let j1 = j0 + 1; j1 <= 8; j1++) {
            const r = { ...plain, ...rules };
            let seen = false;
            for (let i = i0; i < i1; i++) seen ||= Math.max(range(r, i)[0], j0) < Math.min(range(r, i)[1], j1);
            if (forbidden(r, i0, i1, j0, j1)) assert.ok(!seen, JSON.stringify([rules, i0, i1, j0, j1]));
            else if (rules.causal || rules.keys) assert.ok(seen, JSON.stringify([rules, i0, i1, j0, j1]));
          }
});
