// @ts-check
// Entry point of the page with the engine inside, which also compresses and shows how the built-in model
// learned.
import { startCompression } from "./compression.js";
import { engine } from "./engine.js";
import { startLearning } from "./learning.js";
import { start } from "./page.js";

startCompression(engine);
startLearning(engine);
start(engine);
