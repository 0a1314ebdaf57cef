// Files and functions stay short enough to be read at once.

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";

const [FILE, FUNCTION] = [400, 80]; // lines

test("no file has more than 400 lines, no function more than 80", () => {
  const long = [];
  const source = new URL("../src/", import.meta.url);
  for (const name of readdirSync(source, { recursive: true }).filter((each) => each.endsWith(".js"))) {
    const lines = readFileSync(new URL(name, source), "utf8").split("\n");
    if (lines.length - 1 > FILE) long.push(`${name} has ${lines.length - 1} lines`);
    for (const [first, line] of lines.entries()) {
      if (!/(\bfunction\b.*|=>|\)) \{$/.test(line)) continue;
      const indent = line.match(/^ */)[0]; // the last line of what begins here has the same, since prettier indents
      const count = lines.slice(first + 1).findIndex((each) => each.startsWith(`${indent}}`)) + 2;
      if (count > FUNCTION) long.push(`${name}:${first + 1}: a function of ${count} lines`);
    }
  }
  assert.deepEqual(long, []);
});
