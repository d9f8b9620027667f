// @ts-check
// A tour of the page in seven steps. Each step highlights a part and suggests something to try. Esc ends the
// tour and restores the focus.
import { clamp, element, find } from "./parts/dom.js";

/** @type {[string, string, string, string?][]} */
const STEPS = [
  ["#prompt", "A model that continues a text", "This box holds the prompt. Change it and press Generate, or Ctrl+Enter: the model continues it, "
    + "one token at a time. A token is a word or a piece of one."],
  ["#paper", "The surprise of each token", "The stronger a token's color, the less the model expected it. Click one, or go to it with the arrow keys and press Enter, "
    + "to see its alternatives. Choose one, and the text continues from it."],
  ["#sliders", "How it chooses", "At each position the model gives every token of its vocabulary a probability. A low temperature makes the probable ones more probable. "
    + "Move the slider and watch the bars under the text. Top-k, top-p and the seed are under More settings."],
  ["#inside", "Where it looks", "Before the model predicts, each token looks back at earlier ones. Every small picture is one attention head. Choose one, then a row: "
    + "the text is colored by how much that token attends to each.", "attention"],
  ["#inside", "The same by hand", "One number of that picture in six steps: query, key, their product, the scaled score, softmax, and the values. Every number is shown, so you can recompute it, "
    + "and there is a worked example with six words.", "head"],
  ["#inside", "What it reacts to", "After each look back, an MLP changes each token. Its features are things that it reacts to: each cell shows one of the strongest at a token, "
    + "and the token that it makes more probable. The attribution graph shows what features add to the next token.", "features"],
  ["#picker-open", "Another model", "The page also runs your own GPT-2, which stays in your browser. The command at the end of the page generates the same text without a browser."],
];
let at = 0;
/** @type {any} */
let before = null;
/** @type {any} */
let target = null;
const title = element("h2", { id: "tour-title", tabIndex: -1 });
const text = element("p", { id: "tour-text" });
const back = element("button", { type: "button", onclick: () => show(at - 1) }, "Back");
const next = element("button", { type: "button", className: "main", onclick: () => at + 1 < STEPS.length ? show(at + 1) : close() });
const panel = element("section", { id: "tour-panel", role: "dialog", ariaModal: "false", hidden: true }, title, text,
  element("div", { className: "actions" }, back, next, element("button", { type: "button", onclick: close }, "Close")));
panel.setAttribute("aria-labelledby", "tour-title");
panel.setAttribute("aria-describedby", "tour-text");
panel.dataset.testid = "tour-panel";
document.body.append(panel);

/** @param {number} step */
function show(step) {
  at = clamp(step, 0, STEPS.length - 1);
  const [selector, name, words, button] = STEPS[at];
  target?.classList.remove("toured");
  target = document.querySelector(selector);
  target.classList.add("toured");
  if (button) find(button).click();
  title.textContent = `${at + 1} of ${STEPS.length}: ${name}`;
  text.textContent = words;
  back.disabled = at === 0;
  next.textContent = at + 1 < STEPS.length ? "Next" : "Done";
  target.scrollIntoView({ block: "start", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  title.focus({ preventScroll: true });
}

/** Starts the tour. */
export function startTour() {
  before = document.activeElement;
  panel.hidden = false;
  show(0);
}

function close() {
  panel.hidden = true;
  target?.classList.remove("toured");
  before?.focus({ preventScroll: true });
}

panel.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
  if (event.key !== "Escape") return;
  event.stopPropagation();
  close();
});
