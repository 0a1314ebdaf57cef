import assert from "node:assert/strict";
import { test } from "node:test";
import { fromHalves } from "../src/container.js";
import { fmt, safe, short, within } from "../src/numbers.js";

const random = Math.random;

test("digits that count are kept, and what is not zero is not written as 0", () => {
  assert.deepEqual(
    [0, -0.25, 4.59619, 123456, -Infinity, NaN].map((x) => fmt(x)),
    ["0", "−0.25", "4.596", "123456", "−∞", "NaN"],
  );
  assert.deepEqual(
    [0, -22.07, 0.953, 0.9999, -0.0024].map((x) => short(x)),
    ["0", "−22.1", "0.95", "1.00", "−2e-3"],
  );
  for (let x = 1e-30; x < 1e30; x *= 1 + random())
    for (const value of [x, -x])
      for (const text of [fmt(value), fmt(value, 2), short(value), short(value, true)])
        assert.ok(Math.abs(Number(text.replace("−", "-")) / value - 1) < 0.51, `${value} is ${text}`);
});

test("digits that may be wrong are left out, or the bound is printed and the true value lies inside", () => {
  for (let turn = 0; turn < 20000; turn++) {
    const x = (random() - 0.5) * 10 ** (3 - 8 * random());
    const off = Math.abs(x) * 10 ** (1 - 6 * random());
    const truth = x + off * (2 * random() - 1);
    const [value, bound] = within(x, off).replaceAll("−", "-").split(" ± ").map(Number);
    assert.ok(Math.abs(truth - value) <= bound * (1 + 1e-9), `${truth} is not within ${within(x, off)}`);
    assert.ok(bound <= 2.2 * off + (off > Math.abs(x) ? Math.abs(x) : 0), `${off} became ${bound}`);
    const text = safe(x, off).replaceAll("−", "-");
    const third = 10 ** (Math.floor(Math.log10(Math.abs(x))) - 2);
    const unit = off > third / 2 ? 10 * third : third;
    const near = Math.abs(truth - parseFloat(text)) <= unit * (1 + 1e-9);
    assert.ok(text.includes("±") || near, `${truth} is printed as ${text}`);
  }
});

test("halves become the numbers they are", () => {
  const half = fromHalves(Uint16Array.of(0x3c00, 0xc000, 0x0001, 0xfc00, 0x7e00));
  assert.deepEqual([...half], [1, -2, 2 ** -24, -Infinity, NaN]);
});
