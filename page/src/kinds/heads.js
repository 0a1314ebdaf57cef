// The program of a page of kind "heads".

import "../long/words.js";
import { openLong } from "../long/page.js";
import { start } from "../main.js";

start(openLong);
