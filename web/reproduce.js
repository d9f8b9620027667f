// @ts-check
// The same text as a command or a program, and the page's state as an address.
import { asCurl, asProgram, asPython } from "./command.js";
import { copies } from "./parts/controls.js";
import { find } from "./parts/dom.js";
import { readModel, writeModel } from "./picker.js";
import { fields, readSettings, writeSettings } from "./settings.js";
import { emit, on, page, prompt } from "./state.js";

/** @type {Record<string, (body: any, address: string, hasKey?: boolean) => string>} */
const REQUESTS = { "as-curl": asCurl, "as-python": asPython };
const LANGUAGES = ["as-program", ...Object.keys(REQUESTS)];
/** The language that is chosen; the program's where the page has its engine inside. */
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
    // The seed of the text that is shown, unless another one is typed.
    const body = { prompt: prompt.value, ...page.lastSeed && { seed: Number(page.lastSeed) }, ...fields() };
    text = isCommand ? asProgram(body, model) : REQUESTS[language]({ ...engine.isShared && { model: model.name }, ...body, stream: true }, engine.address(), engine.hasKey);
  } catch (error) {
    fault = /** @type {Error} */ (error).message;
  }
  find("command").hidden = !isCommand || fault !== "";
  find("request").hidden = isCommand || fault !== "";
  find(isCommand ? "command" : "request").textContent = text;
  find("not-a-request").textContent = fault && `There is no request for these settings. ${fault}`;
  find("not-a-request").hidden = fault === "";
  find("copy").disabled = fault !== "";
  find("by-hand").hidden = !page.written.isByHand;
}

// ---- An address

/** Prompt and settings, as text after # of the address. @param {boolean} [withSeed] also the seed of the text that is shown */
function state(withSeed) {
  const said = new URLSearchParams({ prompt: prompt.value });
  writeSettings(said);
  writeModel(said);
  if (withSeed && page.lastSeed && !said.has("seed")) said.set("first-seed", page.lastSeed);
  return String(said);
}

/** Takes the state of an address, and gives the seed of its first text. @param {string} text @param {string} ownPrompt */
export function restore(text, ownPrompt) {
  const given = new URLSearchParams(text);
  prompt.value = given.get("prompt") ?? ownPrompt;
  readSettings(given);
  readModel(given);
  return given.get("first-seed") ?? undefined;
}

/** The settings that the browser keeps for the page: nothing without storage, as in a private window, and nothing with a server. */
export const kept = {
  read() { try { return page.engine.isShared ? "" : localStorage.getItem("gpt2") ?? ""; } catch { return ""; } },
  /** @param {string} text */
  write(text) { try { if (!page.engine.isShared) localStorage.setItem("gpt2", text); } catch { /* nothing is lost but this */ } },
};

let keeping = 0, original = "";
/** Keeps the state soon. */
function keep() {
  clearTimeout(keeping);
  keeping = setTimeout(() => {
    const text = state() === original ? "" : state(true);
    kept.write(text);
    try { history.replaceState(0, "", text ? `#${text}` : location.href.split("#")[0]); } catch { /* a page in a frame has no address of its own */ }
  }, 300);
}

/** Takes the present state as the page's original one, which no address needs. */
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
