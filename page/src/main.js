// Chooses by the document's kind what to draw.

import { openPage } from "./container.js";
import { openShell } from "./shell.js";
import { openStory } from "./steps.js";

/** @type {Record<string, (page: import("./container.js").Page) => (shell: import("./shell.js").Shell) => void>} */
const KINDS = { trace: openStory };

const page = openPage((id) => document.getElementById(id)?.textContent ?? "");
const kind = KINDS[page.header.kind];
if (!kind) document.body.append(`clearhead: this page is of kind ${page.header.kind}, which its program does not know`);
else openShell(page.header, kind(page));
