// @ts-check
// Undo and redo for prompts and texts.
import { find } from "./parts/dom.js";
import { drawText } from "./paper.js";
import { emit, on, page, prompt } from "./state.js";

/** @typedef {{ before: string, text: import("./types").Written }} Step */

// Maximum number of undo steps.
const STEPS = 500;
/** @type {Step[]} */
const past = [];
/** @type {Step[]} */
const future = [];
const step = () => ({ before: prompt.value, text: page.written });

/** Records the current state, so that the next change can be undone. */
export function record() {
  past.push(step());
  if (past.length > STEPS) past.shift();
  future.length = 0;
}

/** Shows a complete text. @param {import("./types").Written} text */
export function put(text) {
  page.written = text;
  find("texts").replaceChildren();
  find("numbers").textContent = "";
  drawText();
  emit("text", true);
  emit("busy");
}

/** @type {(from: Step[], to: Step[]) => void} */
function travel(from, to) {
  const last = from.pop();
  if (!last) return;
  to.push(step());
  prompt.value = last.before;
  put(last.text);
  emit("prompt");
}
export const undo = () => travel(past, future);
export const redo = () => travel(future, past);

on("busy", () => {
  find("undo").disabled = !past.length;
  find("redo").disabled = !future.length;
});
