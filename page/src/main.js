// The program of every page: read the document, open the shell, draw the rooms.

import { load, openPage } from "./container.js";
import { byId } from "./dom.js";
import { openRooms } from "./rooms.js";
import { openShell } from "./shell.js";

openPage((id) => byId(id)?.textContent ?? "").then(async (page) => {
  const { arrays, learning } = page.header;
  if (learning) await Promise.all(Object.keys(arrays).map((name) => load(page, name)));
  openShell(page.header, openRooms(page));
});
