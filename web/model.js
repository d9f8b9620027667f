// @ts-check
// A user's own model: from what is chosen or dropped to the files of a checkpoint, and its description.

/** @typedef {import("./types").Source} Source */
/** @typedef {{ file: string, blob: Blob }} Named */

// Files next to weights, which hold none.
const BESIDE = /(\.json|\.jinja|\.model|^merges\.txt|^vocab\.txt|^vocab\.bpe)$/i;
// Files that alone or with merges are a tokenizer. Of several the engine takes one, so a new one replaces the others.
const TOKENIZER = /^(tokenizer\.json|vocab\.json|encoder\.json|vocab\.txt|.+\.model)$/i;
/** @type {[number, string][]} */
const UNITS = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
/** @type {[number, string][]} */
const AMOUNTS = [[1e9, " billion"], [1e6, " million"], [1e3, " thousand"]];

/** A number of bytes in words. @param {number} bytes */
export function sizeText(bytes) {
  const [unit, name] = UNITS.find(([unit]) => bytes >= unit) ?? [1, "bytes"];
  return `${Number((bytes / unit).toPrecision(3))} ${name}`;
}

/** A large number in words. @param {number} count */
export function amountText(count) {
  const [unit, name] = AMOUNTS.find(([unit]) => count >= unit) ?? [1, ""];
  return `${Number((count / unit).toPrecision(3))}${name}`;
}

/** A folder's own files count, those of folders inside it do not. @type {(file: File) => boolean} */
const isOwn = file => (file.webkitRelativePath ?? "").split("/").length <= 2;
const folderOf = (/** @type {File} */ file) => (file.webkitRelativePath ?? "").split("/").slice(0, -1).join("/");

/**
 * The source of a checkpoint: files that were chosen together. Where they hold no weights, they join those of `before`, as a tokenizer that
 * was missing does.
 * @param {File[] & { folder?: string }} chosen
 * @param {Source | null | undefined} before
 * @returns {Source}
 */
export function sourceOf(chosen, before) {
  const files = chosen.filter(isOwn).map(blob => ({ file: blob.name, blob }));
  const tokenizer = named(files);
  if (!files.length) throw new Error("there is no file in what was chosen itself, and folders inside it are not searched; choose model.safetensors, config.json and tokenizer.json, or one GGUF file");
  if (before && files.every(one => BESIDE.test(one.file))) {
    // A tokenizer in another form takes the place of the one before, too.
    const isReplaced = (/** @type {string} */ name) => files.some(one => one.file === name || TOKENIZER.test(name) && TOKENIZER.test(one.file));
    const kept = (before.files ?? []).filter(one => !isReplaced(one.file));
    return { ...before, files: [...kept, ...files], tokenizer: tokenizer ?? before.tokenizer };
  }
  const first = chosen.find(isOwn), folder = (first && folderOf(first)) || chosen.folder;
  return { folder, files, tokenizer: folder && tokenizer ? `${folder}/${tokenizer}` : tokenizer };
}

/** A tokenizer under another name, such as my.tokenizer.json, serves where there is no tokenizer.json: gives its own name. @param {Named[]} files */
function named(files) {
  const other = files.find(one => /tokenizer\.json$/i.test(one.file));
  if (!other || files.some(one => one.file === "tokenizer.json")) return undefined;
  const name = other.file;
  other.file = "tokenizer.json";
  return name;
}

/** The files of a drop: of one folder, or files alone. @param {DataTransfer} transfer @returns {Promise<File[] & { folder?: string }>} */
export async function droppedFiles(transfer) {
  const items = /** @type {any[]} */ ([...transfer.items].filter(item => item.kind === "file")), files = [...transfer.files];
  // Asked for before anything is awaited, when the drop is gone. On pages from files Chromium opens folders as handles alone; Firefox
  // has entries.
  const found = await Promise.all(items.map(item => item.getAsFileSystemHandle?.() ?? item.webkitGetAsEntry?.()));
  const folder = found.find(one => one?.isDirectory || one?.kind === "directory");
  if (!folder) return files;
  if (found.length > 1) throw new Error("drop one folder, or files without one: a model's files are all in one place");
  return Object.assign(await (folder.isDirectory ? ofEntry(folder) : ofHandle(folder)), { folder: folder.name });
}

/** @param {any} folder @returns {Promise<File[]>} */
async function ofHandle(folder) {
  const files = [];
  for await (const one of folder.values()) if (one.kind === "file") files.push(await one.getFile());
  return files;
}

/** @param {any} folder @returns {Promise<File[]>} */
async function ofEntry(folder) {
  const reader = folder.createReader(), inside = [];
  for (;;) {
    // A reader gives a hundred at a time.
    const some = /** @type {any[]} */ (await new Promise((resolve, reject) => reader.readEntries(resolve, reject)));
    if (!some.length) break;
    inside.push(...some.filter(entry => entry.isFile));
  }
  return Promise.all(inside.map(entry => new Promise((resolve, reject) => entry.file(resolve, reject))));
}

/** The name of a source: its folder, or else the file that was opened of those that were chosen, once that is known. @param {Source} source @param {any} [inspection] */
export function sourceName({ isBuiltIn, folder, files = [] }, inspection) {
  if (isBuiltIn) return "the built-in model";
  return folder || inspection?.path?.split("/").at(-1) || (files.length === 1 ? files[0].file : "the files that were chosen");
}

/** Fails where a page could not write with it: names the file that is missing or damaged. @param {{ tokenizer?: string }} about */
export function checkTokenizer({ tokenizer }) {
  if (!tokenizer) return;
  throw new Error(`${tokenizer}; what is missing may be chosen alone, and joins the files that were chosen`);
}

/** A checkpoint and the memory it needs, in a sentence each. @param {any} about @param {Source} source */
export function checkpointText({ inspection, memory }, source) {
  const needs = Object.entries(memory).filter(([, bytes]) => bytes !== null).map(([dtype, bytes]) => `${sizeText(bytes)} ${dtype ? `as ${dtype}` : "as stored"}`);
  const needed = needs.length ? ` Memory it needs: ${needs.join(", ")}.` : "";
  return `${sourceName(source, inspection)}: ${sizeInWords(inspection)}, ${inspection.format}.${needed}`;
}

/** @param {any} inspection */
export const sizeInWords = ({ parameters }) => `a GPT-2 of ${amountText(parameters.unique)} parameters`;
