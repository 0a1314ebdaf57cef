// How every page starts: read the document, open the shell, draw the page of the document's kind.

import { openPage } from "./container.js";
import { byId } from "./dom.js";
import { openShell } from "./shell.js";

/** @param {(page: import("./container.js").Page) => (shell: import("./shell.js").Shell) => void} open */
export function start(open) {
  const page = openPage((id) => byId(id)?.textContent ?? "");
  openShell(page.header, open(page));
}
