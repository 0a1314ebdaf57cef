import assert from "node:assert/strict";
import { test } from "node:test";
import { deflateSync } from "node:zlib";
import { numbers, openPage } from "../src/container.js";
import { load } from "../src/packed.js";

const bytes = (typed) => new Uint8Array(typed.buffer.slice(0));
const entry = (start, shape, dtype, packed) => ({ ["at"]: start, shape, dtype, packed });
const DIGITS = "!#$%()*+,-./0123456789:;=?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_`abcdefghijklmnopqrstuvwxyz{";
const written = (data) =>
  [...new Uint32Array(bytes(data).buffer)]
    .map((word) => [0, 1, 2, 3, 4].map((place) => DIGITS[Math.floor(word / 85 ** place) % 85]).join(""))
    .join("");

test("an array that reaches over blocks comes out whole, and blocks are read once and only when needed", () => {
  const data = bytes(Float64Array.of(1, -2, 3.5, 4));
  const read = [];
  const parts = {
    clearhead: JSON.stringify({ block: 24, arrays: { a: entry(0, [1], "float64"), b: entry(8, [3, 1], "float64") } }),
    "clearhead-0": written(data.slice(0, 24)),
    "clearhead-1": written(data.slice(24)),
  };
  const page = openPage((id) => (read.push(id), parts[id]));
  assert.deepEqual([...page.array("a").data], [1]);
  assert.deepEqual(read, ["clearhead", "clearhead-0"]);
  assert.deepEqual([...page.array("b").data], [-2, 3.5, 4]);
  assert.equal(page.array("b"), page.array("b"));
  assert.deepEqual(read, ["clearhead", "clearhead-0", "clearhead-1"]);
  assert.ok(page.has("a") && !page.has("c"));
});

test("a compressed array comes back from its planes", async () => {
  const data = bytes(Int32Array.of(1, -2, 70000));
  const planes = Uint8Array.from({ length: 12 }, (_, i) => data[(i % 3) * 4 + Math.floor(i / 3)]);
  const packed = deflateSync(planes);
  const padded = new Uint8Array(Math.ceil(packed.length / 4) * 4);
  padded.set(packed);
  const parts = {
    clearhead: JSON.stringify({ block: 4096, arrays: { a: entry(0, [3], "int32", packed.length) } }),
    "clearhead-0": written(padded),
  };
  const page = openPage((id) => parts[id]);
  assert.deepEqual([...(await load(page, "a")).data], [1, -2, 70000]);
  assert.equal(page.array("a"), await load(page, "a"));
});

test("a compressed float has its sign turned to the lowest bit", async () => {
  for (const [dtype, words] of [
    ["bfloat16", Uint16Array.of(0xc049)],
    ["float32", Uint32Array.of(0xc0490000)],
  ]) {
    const bits = words.BYTES_PER_ELEMENT * 8;
    const turned = bytes(words.map((word) => (word << 1) | (word >>> (bits - 1))));
    const packed = deflateSync(turned); // one number: its bytes are its planes
    const padded = new Uint8Array(Math.ceil(packed.length / 4) * 4);
    padded.set(packed);
    const parts = {
      clearhead: JSON.stringify({ block: 4096, arrays: { a: entry(0, [1], dtype, packed.length) } }),
      "clearhead-0": written(padded),
    };
    assert.deepEqual(
      [
        ...(
          await load(
            openPage((id) => parts[id]),
            "a",
          )
        ).data,
      ],
      [-3.140625],
    );
  }
});

test("halves and brain floats become the numbers they are", () => {
  const half = numbers(bytes(Uint16Array.of(0x3c00, 0xc000, 0x0001, 0x7c00, 0xfc00, 0x3555)), "float16");
  assert.deepEqual([...half], [1, -2, 2 ** -24, Infinity, -Infinity, Math.fround(0.333251953125)]);
  assert.ok(Number.isNaN(numbers(bytes(Uint16Array.of(0x7e00)), "float16")[0]));
  assert.deepEqual([...numbers(bytes(Uint16Array.of(0x3f80, 0xc049)), "bfloat16")], [1, -3.140625]);
});
