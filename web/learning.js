// @ts-check
// Shows how the built-in model learned, when its section of the page is opened.
import { find } from "./parts/dom.js";
import { drawLearned } from "./parts/learned.js";
import { on } from "./state.js";

/** @param {import("./types").Engine} engine */
export function startLearning(engine) {
  let draw = () => {};
  find("learning").addEventListener("toggle", async () => {
    if (!find("learning").open || !find("learned").hidden) return;
    try {
      const history = await /** @type {NonNullable<typeof engine.history>} */ (engine.history)();
      draw = () => drawLearned(history);
      find("learned").hidden = false;
      find("learned-error").textContent = "";
      draw();
    } catch (error) {
      find("learned-error").textContent = /** @type {Error} */ (error).message;
    }
  });
  on("colors", () => draw());
}
