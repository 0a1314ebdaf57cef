// The program of every page: read the document, open the shell, draw the rooms.

import { openPage } from "./container.js";
import { byId } from "./dom.js";
import { openRooms } from "./rooms.js";
import { openShell } from "./shell.js";

const page = openPage((id) => byId(id)?.textContent ?? "");
openShell(page.header, openRooms(page));
