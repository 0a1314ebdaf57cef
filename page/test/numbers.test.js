import assert from "node:assert/strict";
import { test } from "node:test";
import { fmt, percent, short, spelled } from "../src/numbers.js";

test("numbers are short, and say what they are", () => {
  assert.deepEqual([fmt(0), fmt(6.5), fmt(-0.25), fmt(4.59619), fmt(Infinity), fmt(-Infinity), fmt(NaN)], ["0", "6.5", "−0.25", "4.596", "∞", "−∞", "NaN"]);
  assert.match(fmt(1.2e-5), /^1\.20?e-5$/);
  assert.deepEqual([short(0), short(-22.07), short(0.953), short(123.4), short(-Infinity)], ["0", "−22.1", "0.95", "123", "−∞"]);
  assert.deepEqual([percent(0.9312), percent(0.00001), percent(1)], ["93.1%", "<0.01%", "100.0%"]);
});

test("tokens stay in their place", () => {
  assert.equal(spelled(" on"), "␣on");
  assert.equal(spelled("a\nb"), "a⏎b");
  assert.equal(spelled("\u202eabc\u0007"), "\\u202eabc\\u0007");
  assert.equal(spelled("</script>"), "</script>");
  assert.equal(spelled(""), "∅");
  assert.equal([...spelled("x".repeat(10000), 24)].length, 24);
  assert.equal(spelled("👩‍🚀"), "👩‍🚀");
});
