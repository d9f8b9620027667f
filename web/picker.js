// @ts-check
// The model picker: the built-in model or the server's, the user's own files, and models stored in the
// browser.
import { dropModel, keepModel, keptModels } from "./cache.js";
import { halt, write } from "./generate.js";
import { released } from "./parts/controls.js";
import { element, find } from "./parts/dom.js";
import { checkTokenizer, checkpointText, droppedFiles, sizeText, sourceName, sourceOf } from "./model.js";
import { adopt } from "./settings.js";
import { NOTHING, emit, on, page } from "./state.js";
import { clearError, fail, rest, say } from "./status.js";
import { put, record } from "./undo.js";

/** @typedef {import("./types").Source} Source */

/** The source of a rejected model; files chosen next may complete it. @type {Source | null} */
let refused = null;
/** The name of the model last used on this page. */
let wanted = "";
/** Whether files are being copied into the browser. */
let isKeeping = false;

const isOpen = () => find("picker").open;
const dtype = () => find("dtype").value;
const describe = (/** @type {any} */ about, /** @type {Source} */ source) => { find("memory").textContent = source.isBuiltIn ? "" : checkpointText(about, source); };

/**
 * Switches to a loaded model. The text remains if the model is the same as before.
 * @param {import("./types").Model} loaded
 */
export function take(loaded) {
  const before = page.model;
  adopt(loaded.defaults);
  page.model = loaded;
  refused = null;
  const isSame = before?.name === loaded.name && before.config.n_positions === loaded.config.n_positions;
  if (!isSame && page.written !== NOTHING) {
    record();
    put(NOTHING);
  }
  find("model").textContent = loaded.title;
  find("about").textContent = loaded.about;
  if (page.engine.isShared) document.title = `${loaded.name} · gpt2`;
  find("dtype").value = loaded.source.dtype ?? "";
  describe(loaded, loaded.source);
  drawList();
  emit("model");
}

/** Loads a source and generates with it; on failure the previous model remains. @param {Source} source */
async function load(source) {
  const { engine } = page;
  halt();
  clearError();
  refused = null;
  const name = sourceName(source), bar = find("progress");
  say(page.loading = `loading ${name}`);
  try {
    const loaded = await /** @type {NonNullable<typeof engine.load>} */ (engine.load)(source, about => {
      describe(about, source);
      checkTokenizer(about);
    }, (done, total) => {
      const share = total ? done / total : 0;
      Object.assign(bar, { hidden: false, value: share });
      say(page.loading = `loading ${name}: ${Math.round(100 * share)}%`);
    });
    page.loading = "";
    take(loaded);
    if (isOpen()) find("picker").close();
    write();
  } catch (/** @type {any} */ error) {
    // Another model may be loading by now.
    if (error.replaced) return;
    page.loading = "";
    if (!source.isBuiltIn) refused = source;
    find("dtype").value = page.model?.source.dtype ?? "";
    if (page.model && error.stopped) describe(page.model, page.model.source);
    if (error.stopped) rest();
    else fail(error);
    if (isOpen()) find("picker").close();
  } finally {
    bar.hidden = !page.loading;
  }
}

/** @param {File[] & { folder?: string }} files */
function choose(files) {
  try {
    const source = sourceOf(files, refused ?? (page.model?.source.isBuiltIn ? null : page.model?.source));
    wanted = "";
    load({ ...source, dtype: dtype() });
  } catch (error) {
    fail(error);
  }
}

// ---- The list

/** @type {(name: string, about: string, isChosen: boolean, act: (() => void) | null, ...more: any[]) => any} */
function entry(name, about, isChosen, act, ...more) {
  const button = element("button", { type: "button", ariaPressed: String(isChosen), onclick: act, disabled: isChosen && !act }, name);
  return element("li", {}, button, element("small", {}, about), ...more);
}

async function drawList() {
  const { engine, model } = page;
  if (!model) return;
  if (!engine.load) {
    find("models").replaceChildren(entry(model.name, "this server's model", true, null));
    return;
  }
  const kept = await keptModels(), { source } = model;
  await released(find("models"));
  const builtIn = entry("The built-in model", "small, inside this page", Boolean(source.isBuiltIn), () => load({ .../** @type {Source} */ (engine.BUILT_IN), dtype: dtype() }));
  builtIn.firstChild.id = builtIn.firstChild.dataset.testid = "built-in";
  const own = source.isBuiltIn ? [] : [entry(sourceName(source, model.inspection), "from your files", true, null)];
  find("models").replaceChildren(builtIn, ...own, ...kept.map(one => {
    const drop = element("button", { type: "button", onclick: () => dropModel(one.name).then(drawList, fail) }, "Remove");
    drop.ariaLabel = `Remove ${one.name} from the browser`;
    return entry(one.name, `stored in this browser, ${sizeText(one.bytes)}`, false, () => load({ ...one.source, dtype: dtype() }), drop);
  }));
  find("keep-model").hidden = Boolean(source.isBuiltIn) || isKeeping || kept.some(one => one.name === sourceName(source, model.inspection));
}

async function keep() {
  const { model } = page;
  if (!model) return;
  isKeeping = true;
  find("keep-model").hidden = true;
  find("kept").textContent = "copying the files";
  try {
    await keepModel(sourceName(model.source, model.inspection), model.source);
    find("kept").textContent = "stored; it stays in the list above when you open this page again";
  } catch (error) {
    find("kept").textContent = `the browser could not store it: ${/** @type {Error} */ (error).message}`;
  }
  isKeeping = false;
  drawList();
}

// ---- An address that names a model

/** Adds the model and precision to an address. @param {URLSearchParams} parameters */
export function writeModel(parameters) {
  const { model } = page;
  if (model?.source.dtype) parameters.set("dtype", model.source.dtype);
  const own = wanted || (model && !model.source.isBuiltIn ? sourceName(model.source, model.inspection) : "");
  if (own) parameters.set("model", own);
}

/** Reads the model and precision from an address. @param {URLSearchParams} given */
export function readModel(given) {
  wanted = given.get("model") ?? "";
  const asked = given.get("dtype");
  if (!page.model && [...find("dtype").options].some(one => one.value === asked)) find("dtype").value = asked;
}

/** Returns the source of the built-in model that an address requests. */
export const opening = () => ({ ...page.engine.BUILT_IN, dtype: wanted ? "" : dtype() });

/** Loads the model that an address names: the built-in one in another precision, or a stored one. */
export async function openWanted() {
  const { engine, model } = page;
  if (!engine.load || !model) return false;
  if (!wanted) {
    const asked = new URLSearchParams(location.hash.slice(1)).get("dtype") ?? "";
    if (!model.source.isBuiltIn || asked === (model.source.dtype ?? "")) return false;
    load({ ...engine.BUILT_IN, dtype: asked });
    return true;
  }
  const kept = (await keptModels()).find(one => one.name === wanted);
  if (kept) {
    wanted = "";
    load({ ...kept.source });
    return true;
  }
  find("memory").textContent = `This page was last used with ${wanted}. A page cannot open files by itself: choose them again to use that model. Until then, the page uses the built-in one.`;
  return false;
}

// ---- Buttons and drops

find("picker-open").onclick = () => {
  drawList();
  find("picker").showModal();
};
find("picker-close").onclick = () => find("picker").close();
find("picker").onclick = (/** @type {MouseEvent} */ event) => { if (event.target === find("picker")) find("picker").close(); };
find("keep-model").onclick = keep;
find("stop-loading").onclick = () => page.engine.cancel?.();
on("busy", () => { find("stop-loading").hidden = !page.loading; });
for (const id of ["model-file", "model-folder"]) find(id).onchange = () => {
  const files = [...find(id).files];
  // Allows choosing the same files again.
  find(id).value = "";
  if (files.length) choose(files);
};
find("dtype").onchange = () => { if (page.model) load({ ...refused ?? page.model.source, dtype: dtype() }); };

const isFiles = (/** @type {DragEvent} */ event) => page.engine?.load && event.dataTransfer?.types.includes("Files");
addEventListener("dragover", event => {
  if (!isFiles(event)) return;
  event.preventDefault();
  document.body.classList.add("dropping");
});
addEventListener("dragleave", event => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
addEventListener("drop", async event => {
  if (!isFiles(event)) return;
  event.preventDefault();
  document.body.classList.remove("dropping");
  try {
    choose(await droppedFiles(/** @type {DataTransfer} */ (event.dataTransfer)));
  } catch (error) {
    fail(error);
  }
});
