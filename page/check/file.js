// A page's file, read as the browser would.
import { readFileSync } from "node:fs";
import { openPage } from "../src/container.js";

globalThis.requestAnimationFrame = (then) => setTimeout(then);

export function openFile(path) {
  const parts = readFileSync(path, "utf8").matchAll(/<script type="[^"]+" id="([^"]+)">([^<]*)/g);
  const texts = new Map([...parts].map(([, id, text]) => [id, text]));
  return openPage((id) => texts.get(id));
}
