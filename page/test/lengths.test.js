// Files and functions stay short enough to be read at once.

import assert from "node:assert/strict";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { SyntaxKind } from "typescript/unstable/ast";
import { API } from "typescript/unstable/sync";

const [FILE, FUNCTION] = [400, 80]; // lines
const FUNCTIONS = new Set(["FunctionDeclaration", "FunctionExpression", "ArrowFunction", "MethodDeclaration"]);

/** Each function of a part of a source, as its first line and its number of lines. */
function* functionsIn(node, source) {
  if (FUNCTIONS.has(SyntaxKind[node.kind])) {
    const [first, last] = [node.getStart(source), node.end].map(
      (place) => source.text.slice(0, place).split("\n").length,
    );
    yield [first, last - first + 1];
  }
  const parts = [];
  node.forEachChild((part) => void parts.push(part));
  for (const part of parts) yield* functionsIn(part, source);
}

test("no file has more than 400 lines, no function more than 80", () => {
  const place = fileURLToPath(new URL("../tsconfig.json", import.meta.url));
  const api = new API();
  const [project] = api.updateSnapshot({ openProjects: [place] }).getProjects();
  const long = [];
  for (const path of project.rootFiles) {
    const source = project.program.getSourceFile(path);
    const lines = source.text.split("\n").length - 1;
    if (lines > FILE) long.push(`${path} has ${lines} lines`);
    for (const [first, count] of functionsIn(source, source))
      if (count > FUNCTION) long.push(`${path}:${first}: a function of ${count} lines`);
  }
  api.close();
  assert.deepEqual(long, []);
});
