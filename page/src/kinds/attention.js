// The program of every page.

import "../long/words.js";
import "../storywords.js";
import { start } from "../main.js";
import { openRooms } from "../rooms.js";

start(openRooms);
