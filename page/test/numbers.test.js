import assert from "node:assert/strict";
import { test } from "node:test";
import { bare, fmt, percent, safe, short, spelled, within } from "../src/numbers.js";

test("numbers are short, and say what they are", () => {
  assert.deepEqual(
    [fmt(0), fmt(6.5), fmt(-0.25), fmt(4.59619), fmt(Infinity), fmt(-Infinity), fmt(NaN)],
    ["0", "6.5", "−0.25", "4.596", "∞", "−∞", "NaN"],
  );
  assert.match(fmt(1.2e-5), /^1\.20?e-5$/);
  assert.deepEqual(
    [short(0), short(-22.07), short(0.953), short(123.4), short(-Infinity)],
    ["0", "−22.1", "0.95", "123", "−∞"],
  );
});

test("digits that count are kept, and what is not zero is not written as 0", () => {
  assert.deepEqual(
    [fmt(0.0006), fmt(0.0024), fmt(-0.00088), fmt(0.00123456), fmt(123456), fmt(12.3456)],
    ["0.0006", "0.0024", "−0.00088", "0.001235", "123456", "12.35"],
  );
  assert.deepEqual(
    [short(0.0024), short(0.0006), short(-0.0024), short(0.052), short(-0.05, true), short(0.9999)],
    ["0.002", "6e-4", "−2e-3", "0.05", "−0.05", "1.00"],
  );
  for (let x = 1e-30; x < 1e30; x *= 1.37)
    for (const value of [x, -x])
      for (const text of [fmt(value), fmt(value, 2), short(value), short(value, true)])
        assert.ok(Math.abs(Number(text.replace("−", "-")) / value - 1) < 0.51, `${value} is ${text}`);
});

test("shares are percentages with two decimals, or more where these show fewer than two digits", () => {
  assert.deepEqual([1, 0.99999, 0.9312, 0.006, 0.0009, 0.00001, 0.00000042, 4e-12, 0, NaN].map(percent), [
    "100.00%",
    "100.00%",
    "93.12%",
    "0.60%",
    "0.090%",
    "0.0010%",
    "4.2e-5%",
    "4e-10%",
    "0%",
    "NaN%",
  ]);
});

test("the true value lies inside what is printed with a bound", () => {
  assert.deepEqual(
    [within(0.204473, 8e-6), within(1, 3e-7), within(0.25, 0), within(NaN, NaN), within(0, 0.001)],
    ["0.204473 ± 9e-6", "1.0000000 ± 4e-7", "0.25", "NaN", "0 ± 0.002"],
  );
  let seed = 1;
  const random = () => (seed = (seed * 48271) % 2147483647) / 2147483647;
  for (let turn = 0; turn < 20000; turn++) {
    const x = 10 ** (-12 * random());
    const off = x * 10 ** (2 - 10 * random());
    const truth = x + off * (2 * random() - 1);
    const [value, bound] = within(x, off).replaceAll("−", "-").split(" ± ").map(Number);
    assert.ok(Math.abs(truth - value) <= bound * (1 + 1e-9), `${truth} is not within ${within(x, off)}`);
    assert.ok(bound <= 2.2 * off + (off > x ? x : 0), `${off} became ${bound}`);
  }
});

test("digits that may be wrong are left out, or the bound is printed", () => {
  assert.deepEqual(
    [safe(-0.08281, 1e-5), safe(-0.08281, 6e-5), safe(-0.08281, 6e-3), safe(0, 0), safe(0, 0.0015), safe(NaN, 1)],
    ["−0.0828", "−0.083", "−0.083 ± 0.007", "0", "0 ± 0.002", "NaN"],
  );
  let seed = 7;
  const random = () => (seed = (seed * 48271) % 2147483647) / 2147483647;
  for (let turn = 0; turn < 5000; turn++) {
    const x = (random() - 0.5) * 10 ** (3 - 8 * random());
    const off = Math.abs(x) * 10 ** (1 - 6 * random());
    const truth = x + off * (2 * random() - 1);
    const text = safe(x, off).replaceAll("−", "-");
    const value = parseFloat(text);
    const third = 10 ** (Math.floor(Math.log10(Math.abs(x))) - 2);
    const unit = off > third / 2 ? 10 * third : third;
    if (!text.includes("±")) assert.ok(Math.abs(truth - value) <= unit * (1 + 1e-9), `${truth} is printed as ${text}`);
  }
});

test("tokens stay in their place", () => {
  assert.equal(spelled(" on"), "␣on");
  assert.equal(spelled("a\nb"), "a⏎b");
  assert.equal(spelled("\u202eabc\u0007\u00a0\t"), "\\u202eabc\\x07\\xa0⇥");
  assert.deepEqual(
    ["  ", "        return", "a  b "].map((token) => spelled(token)),
    ["␣␣", "␣×8return", "a␣␣b␣"],
  );
  assert.deepEqual(
    [" wall", "  "].map((token) => bare(token)),
    ["wall", "␣␣"],
  );
  assert.equal(spelled("</script>"), "</script>");
  assert.equal(spelled(""), "∅");
  assert.equal([...spelled("x".repeat(10000), 24)].length, 24);
  assert.equal(spelled("👩\u200d🚀"), "👩\\u200d🚀"); // one that joins looks like one that does not
});
