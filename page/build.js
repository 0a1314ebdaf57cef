// Builds src/ into what the Python package carries: a program and a style for each kind of page, so that a page carries
// no more than it needs. The same sources give the same bytes.
import { build } from "esbuild";
import { readdir, readFile, writeFile } from "node:fs/promises";

const out = new URL("../src/clearhead/view/", import.meta.url);
const options = { bundle: true, minify: true, write: false, charset: "utf8", format: "iife", legalComments: "none" };
const inject = ["src/short.js"];
const target = ["chrome123", "firefox121", "safari17.5"];
const kinds = (await readdir(new URL("src/kinds", import.meta.url))).sort();

for (const entry of kinds.map((name) => `src/kinds/${name}`)) {
  const { outputFiles } = await build({ ...options, target, inject, entryPoints: [entry] });
  const text = outputFiles[0].text;
  const name = entry.split("/").at(-1);
  if (/<\/(script|style)|<!--/i.test(text))
    throw new Error(`${name} cannot stand inside a page: it holds </script, </style or <!--`);
  const place = new URL(name, out);
  if (process.argv.includes("--check")) {
    const committed = await readFile(place, "utf8").catch(() => "");
    if (committed !== text) throw new Error(`${name} is not what src/ builds: run npm run build in page/`);
  } else await writeFile(place, text);
  console.log(`${name} ${Buffer.byteLength(text)} bytes`);
}
