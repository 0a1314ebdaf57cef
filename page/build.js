// Builds src/ into the two files that the Python package carries; the same sources give the same bytes.
import { build } from "esbuild";
import { readFile, writeFile } from "node:fs/promises";

const out = new URL("../src/clearhead/view/", import.meta.url);
const options = { bundle: true, minify: true, write: false, charset: "utf8", target: ["chrome123", "firefox121", "safari17.5"] };

for (const [entry, name] of [["src/main.js", "page.js"], ["src/page.css", "page.css"]]) {
  const { outputFiles } = await build({ ...options, entryPoints: [entry], format: "iife", legalComments: "none" });
  const text = outputFiles[0].text;
  if (/<\/(script|style)|<!--/i.test(text)) throw new Error(`${name} cannot stand inside a page: it holds </script, </style or <!--`);
  const place = new URL(name, out);
  if (process.argv.includes("--check")) {
    const committed = await readFile(place, "utf8").catch(() => "");
    if (committed !== text) throw new Error(`${name} is not what src/ builds: run npm run build in page/`);
  } else await writeFile(place, text);
  console.log(`${name} ${Buffer.byteLength(text)} bytes`);
}
