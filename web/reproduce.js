// @ts-check
// Reproduces a completion with a command or a program, and the page's state with an address.
import { asCurl, asProgram, asPython } from "./command.js";
import { copies } from "./parts/controls.js";
import { find } from "./parts/dom.js";
import { readModel, writeModel } from "./picker.js";
import { fields, readSettings, writeSettings } from "./settings.js";
import { emit, on, page, prompt } from "./state.js";

/** @type {Record<string, (body: any, address: string, hasKey?: boolean) => string>} */
const REQUESTS = { "as-curl": asCurl, "as-python": asPython };
const LANGUAGES = ["as-program", ...Object.keys(REQUESTS)];
/** The selected language; the command by default if the engine runs inside the page. */
let language = "";

// ---- A command or a program

function showCommand() {
  const { engine, model } = page;
  if (!model) return;
  language ||= engine.load ? "as-program" : "as-curl";
  for (const id of LANGUAGES) find(id).ariaPressed = String(id === language);
  const isCommand = language === "as-program";
  /** @type {string} */
  let text = "", fault = "";
  try {
    // The seed of the displayed text, unless the user has typed another one.
    const body = { prompt: prompt.value, ...page.lastSeed && { seed: Number(page.lastSeed) }, ...fields() };
    text = isCommand ? asProgram(body, model) : REQUESTS[language]({ ...engine.isShared && { model: model.name }, ...body, stream: true }, engine.address(), engine.hasKey);
  } catch (error) {
    fault = /** @type {Error} */ (error).message;
  }
  find("command").hidden = !isCommand || fault !== "";
  find("request").hidden = isCommand || fault !== "";
  find(isCommand ? "command" : "request").textContent = text;
  find("not-a-request").textContent = fault && `These settings are invalid. ${fault}`;
  find("not-a-request").hidden = fault === "";
  find("copy").disabled = fault !== "";
  find("by-hand").hidden = !page.written.isByHand;
}

// ---- An address

/**
 * Returns the prompt and settings for the address fragment.
 * @param {boolean} [withSeed] also the seed of the displayed text
 */
function state(withSeed) {
  const parameters = new URLSearchParams({ prompt: prompt.value });
  writeSettings(parameters);
  writeModel(parameters);
  if (withSeed && page.lastSeed && !parameters.has("seed")) parameters.set("first-seed", page.lastSeed);
  return String(parameters);
}

/**
 * Restores the state from an address; returns the seed for its first completion.
 * @param {string} text
 * @param {string} ownPrompt
 */
export function restore(text, ownPrompt) {
  const given = new URLSearchParams(text);
  prompt.value = given.get("prompt") ?? ownPrompt;
  readSettings(given);
  readModel(given);
  return given.get("first-seed") ?? undefined;
}

/**
 * Settings stored in the browser for the page.
 *
 * Empty with a server, and without storage, as in a private window.
 */
export const kept = {
  read() { try { return page.engine.isShared ? "" : localStorage.getItem("gpt2") ?? ""; } catch { return ""; } },
  /** @param {string} text */
  write(text) { try { if (!page.engine.isShared) localStorage.setItem("gpt2", text); } catch { /* only this state is lost */ } },
};

let keeping = 0, original = "";
/** Stores the state after a short delay. */
function keep() {
  clearTimeout(keeping);
  keeping = setTimeout(() => {
    const text = state() === original ? "" : state(true);
    kept.write(text);
    try { history.replaceState(0, "", text ? `#${text}` : location.href.split("#")[0]); } catch { /* a page in a frame has no address of its own */ }
  }, 300);
}

/** Makes the current state the default, which needs no address. */
export const isOriginal = () => { original = state(); };

const address = () => `${location.href.split("#")[0]}#${state(true)}`;
for (const id of LANGUAGES) find(id).onclick = () => { language = id; showCommand(); };
copies(find("copy"), find("code"), () => find(language === "as-program" ? "command" : "request").textContent);
copies(find("copy-link"), find("link"), address);
find("copy-link").addEventListener("click", () => Object.assign(find("link"), { textContent: address(), hidden: false }));
on("prompt", () => { showCommand(); keep(); });
on("text", () => { showCommand(); keep(); });
on("model", showCommand);
prompt.oninput = () => emit("prompt");
