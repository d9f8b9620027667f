// @ts-check
// The page: generates, shows each token's alternatives and the next candidates, scores, looks inside and
// loads other models.
//
// It talks to a transport, a server (server.js) or the engine in a worker (engine.js), through the same paths
// and bodies. Parts of the page for only one of them have `data-only`; page.css hides them from the other.
import { dark, element, find } from "./parts/dom.js";
import { halt, write } from "./generate.js";
import "./next.js";
import { openWanted, opening, take } from "./picker.js";
import { isOriginal, kept, restore } from "./reproduce.js";
import "./score.js";
import { emit, page, prompt } from "./state.js";
import { clearError, fail, rest, say } from "./status.js";
import { startTour } from "./tour.js";
import { redo, undo } from "./undo.js";
import "./views.js";

// The page opens with the first example and this seed.
const EXAMPLES = [
  "One day, Mia had a red ball and Tom had a blue ball.",
  "red blue green red blue green red",
  "When Mia and Tom went to the park, Tom gave the ball to",
];
const OPENING_SEED = "2";

/** The seed of the first completion. @type {string | undefined} */
let firstSeed;

/** Restores the prompt and settings from an address, or uses the page's defaults. @param {string} text */
function open(text) {
  firstSeed = restore(text, EXAMPLES[0]) ?? (text ? undefined : OPENING_SEED);
}

/** Generates a first completion if the page has a prompt. */
function writeFirst() {
  emit("prompt");
  if (prompt.value) write(firstSeed);
  else if (!page.running) rest();
}

async function begin() {
  try {
    take(await page.engine.start(opening(), heard));
    // Keeps an existing text, for example after the key is entered again.
    if (!await openWanted() && !page.written.text) writeFirst();
  } catch (error) {
    fail(error);
  }
}

/**
 * Handles a crash of the engine and then the reloaded model.
 *
 * Prompt and text stay, and a completion requested in between is generated, unless another model was loaded.
 *
 * @param {import("./types").Model | null} loaded
 * @param {Error} reason
 */
function heard(loaded, reason) {
  if (!loaded || loaded.source !== page.model?.source) page.running = null;
  if (loaded) take(loaded);
  if (page.running) say("writing");
  else fail(reason);
}

// ---- Buttons and keys

find("examples").append(...EXAMPLES.map((text, n) => {
  const chip = element("button", {
    type: "button",
    onclick() {
      prompt.value = text;
      emit("prompt");
      write();
    },
  }, text);
  chip.dataset.testid = `example-${n}`;
  return chip;
}));
find("undo").onclick = () => { halt(); undo(); };
find("redo").onclick = () => { halt(); redo(); };
find("tour").onclick = startTour;
find("start-over").onclick = () => {
  open("");
  writeFirst();
};
find("key-use").onclick = () => {
  page.engine.setKey?.(find("key-value").value.trim());
  find("key-value").value = "";
  find("key").hidden = true;
  clearError();
  prompt.focus();
  begin();
};
find("key-value").onkeydown = (/** @type {KeyboardEvent} */ event) => { if (event.key === "Enter") find("key-use").click(); };

addEventListener("keydown", event => {
  const isCommand = event.ctrlKey || event.metaKey, isField = /** @type {HTMLElement} */ (event.target).matches("input, textarea");
  if (event.key === "Escape") {
    find("stop").click();
  } else if (event.key === "Enter" && isCommand) {
    event.preventDefault();
    write();
  } else if (/^[zy]$/i.test(event.key) && isCommand && !isField) {
    // Text fields have their own undo.
    event.preventDefault();
    find(event.shiftKey || event.key === "y" ? "redo" : "undo").click();
  }
});
dark.addEventListener("change", () => emit("colors"));
addEventListener("hashchange", async () => {
  open(location.hash.slice(1));
  if (!await openWanted()) writeFirst();
});

/** Starts the page with a transport. @param {import("./types").Engine} engine */
export function start(engine) {
  page.engine = engine;
  rest();
  open("");
  isOriginal();
  const text = location.hash.slice(1) || kept.read();
  if (text) open(text);
  begin();
}
