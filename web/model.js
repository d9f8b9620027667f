// @ts-check
// User-supplied models: turns chosen or dropped files into a checkpoint, and describes it.

/** @typedef {import("./types").Source} Source */
/** @typedef {{ file: string, blob: Blob }} Named */

// Files that accompany weights but contain none.
const BESIDE = /(\.json|\.jinja|\.model|^merges\.txt|^vocab\.txt|^vocab\.bpe)$/i;
// Tokenizer files, some of which need merges. The engine uses only one, so a new one replaces the others.
const TOKENIZER = /^(tokenizer\.json|vocab\.json|encoder\.json|vocab\.txt|.+\.model)$/i;
/** @type {[number, string][]} */
const UNITS = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
/** @type {[number, string][]} */
const AMOUNTS = [[1e9, " billion"], [1e6, " million"], [1e3, " thousand"]];

/** Formats a number of bytes. @param {number} bytes */
export function sizeText(bytes) {
  const [unit, name] = UNITS.find(([unit]) => bytes >= unit) ?? [1, "bytes"];
  return `${Number((bytes / unit).toPrecision(3))} ${name}`;
}

/** Formats a large number in words. @param {number} count */
export function amountText(count) {
  const [unit, name] = AMOUNTS.find(([unit]) => count >= unit) ?? [1, ""];
  return `${Number((count / unit).toPrecision(3))}${name}`;
}

/** Accepts a folder's own files, not those in subfolders. @type {(file: File) => boolean} */
const isOwn = file => (file.webkitRelativePath ?? "").split("/").length <= 2;
const folderOf = (/** @type {File} */ file) => (file.webkitRelativePath ?? "").split("/").slice(0, -1).join("/");

/**
 * Returns the source of files chosen together.
 *
 * Files without weights extend `before`, for example with a missing tokenizer.
 *
 * @param {File[] & { folder?: string }} chosen
 * @param {Source | null | undefined} before
 * @returns {Source}
 */
export function sourceOf(chosen, before) {
  const files = chosen.filter(isOwn).map(blob => ({ file: blob.name, blob }));
  const tokenizer = named(files);
  if (!files.length) throw new Error("the folder has no files, and its subfolders are not searched; choose model.safetensors, config.json and tokenizer.json, or one GGUF file");
  if (before && files.every(one => BESIDE.test(one.file))) {
    // A tokenizer in another format also replaces the previous one.
    const isReplaced = (/** @type {string} */ name) => files.some(one => one.file === name || TOKENIZER.test(name) && TOKENIZER.test(one.file));
    const kept = (before.files ?? []).filter(one => !isReplaced(one.file));
    return { ...before, files: [...kept, ...files], tokenizer: tokenizer ?? before.tokenizer };
  }
  const first = chosen.find(isOwn), folder = (first && folderOf(first)) || chosen.folder;
  return { folder, files, tokenizer: folder && tokenizer ? `${folder}/${tokenizer}` : tokenizer };
}

/**
 * Uses a tokenizer with another name if tokenizer.json is missing, and returns that name.
 * @param {Named[]} files
 */
function named(files) {
  const other = files.find(one => /tokenizer\.json$/i.test(one.file));
  if (!other || files.some(one => one.file === "tokenizer.json")) return undefined;
  const name = other.file;
  other.file = "tokenizer.json";
  return name;
}

/**
 * Returns the dropped files: the files in one folder, or loose files.
 * @param {DataTransfer} transfer
 * @returns {Promise<File[] & { folder?: string }>}
 */
export async function droppedFiles(transfer) {
  const items = /** @type {any[]} */ ([...transfer.items].filter(item => item.kind === "file")), files = [...transfer.files];
  // Must run before the first await, which invalidates the drop. On pages opened from files, Chromium opens
  // folders only as handles; Firefox supports only entries.
  const found = await Promise.all(items.map(item => item.getAsFileSystemHandle?.() ?? item.webkitGetAsEntry?.()));
  const folder = found.find(one => one?.isDirectory || one?.kind === "directory");
  if (!folder) return files;
  if (found.length > 1) throw new Error("drop either one folder or loose files");
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
    // A reader returns at most a hundred entries at a time.
    const some = /** @type {any[]} */ (await new Promise((resolve, reject) => reader.readEntries(resolve, reject)));
    if (!some.length) break;
    inside.push(...some.filter(entry => entry.isFile));
  }
  return Promise.all(inside.map(entry => new Promise((resolve, reject) => entry.file(resolve, reject))));
}

/**
 * Returns the name of a source: its folder, or else the chosen file that was opened, once it is known.
 * @param {Source} source
 * @param {any} [inspection]
 */
export function sourceName({ isBuiltIn, folder, files = [] }, inspection) {
  if (isBuiltIn) return "the built-in model";
  return folder || inspection?.path?.split("/").at(-1) || (files.length === 1 ? files[0].file : "the chosen files");
}

/**
 * Throws if the tokenizer is missing or damaged, with the file's name.
 * @param {{ tokenizer?: string }} about
 */
export function checkTokenizer({ tokenizer }) {
  if (!tokenizer) return;
  throw new Error(`${tokenizer}; choose the missing file to add it to the others`);
}

/**
 * Describes a checkpoint and its memory requirement in a sentence each.
 * @param {any} about
 * @param {Source} source
 */
export function checkpointText({ inspection, memory }, source) {
  const needs = Object.entries(memory).filter(([, bytes]) => bytes !== null).map(([dtype, bytes]) => `${sizeText(bytes)} ${dtype ? `as ${dtype}` : "as stored"}`);
  const needed = needs.length ? ` Memory required: ${needs.join(", ")}.` : "";
  return `${sourceName(source, inspection)}: ${sizeInWords(inspection)}, ${inspection.format}.${needed}`;
}

/** @param {any} inspection */
export const sizeInWords = ({ parameters }) => `a GPT-2 of ${amountText(parameters.unique)} parameters`;
