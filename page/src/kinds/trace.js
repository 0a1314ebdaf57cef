// The program of a page of kind "trace".

import { start } from "../main.js";
import "../storywords.js";
import { openStory } from "../steps.js";

start(openStory);
