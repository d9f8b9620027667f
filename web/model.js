"use strict";
// A user's own model: from what is chosen or dropped to the files of a checkpoint, and what it is in words.
const models = (() => {
  // Files that stand beside weights and hold none.
  const BESIDE = /(\.json|\.jinja|^merges\.txt|^vocab\.bpe)$/i;
  const UNITS = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
  const AMOUNTS = [[1e9, " thousand million"], [1e6, " million"], [1e3, " thousand"]];

  function size(bytes) {
    const [unit, name] = UNITS.find(([unit]) => bytes >= unit) ?? [1, "bytes"];
    return `${Number((bytes / unit).toPrecision(3))} ${name}`;
  }

  function amount(count) {
    const [unit, name] = AMOUNTS.find(([unit]) => count >= unit) ?? [1, ""];
    return `${Number((count / unit).toPrecision(3))}${name}`;
  }

  // A folder's own files count, those of folders inside it do not.
  const isOwn = file => (file.webkitRelativePath ?? "").split("/").length <= 2;
  const folderOf = file => (file.webkitRelativePath ?? "").split("/").slice(0, -1).join("/");

  // The source of a checkpoint: files that were chosen together. Where they hold no weights, they join those of `before`, as a tokenizer
  // that was missing does.
  function source(chosen, before) {
    const files = chosen.filter(isOwn).map(blob => ({ file: blob.name, blob }));
    const tokenizer = named(files);
    if (!files.length) throw new Error("there is no file in what was chosen; choose model.safetensors, config.json and tokenizer.json, or one GGUF file");
    if (before && files.every(one => BESIDE.test(one.file))) {
      const kept = before.files.filter(one => !files.some(other => other.file === one.file));
      return { ...before, files: [...kept, ...files], tokenizer: tokenizer ?? before.tokenizer };
    }
    const largest = files.reduce((most, one) => one.blob.size > most.blob.size ? one : most);
    const folder = folderOf(chosen.find(isOwn)) || chosen.folder;
    return { name: folder || largest.file, files, tokenizer: folder && tokenizer ? `${folder}/${tokenizer}` : tokenizer };
  }

  // A tokenizer under another name, such as my.tokenizer.json, serves where there is no tokenizer.json: gives its own name.
  function named(files) {
    const other = files.find(one => /tokenizer\.json$/i.test(one.file));
    if (!other || files.some(one => one.file === "tokenizer.json")) return undefined;
    const name = other.file;
    other.file = "tokenizer.json";
    return name;
  }

  // The files of a drop, and of the one folder in it.
  async function dropped(transfer) {
    const entries = [...transfer.items].map(item => item.webkitGetAsEntry?.()).filter(Boolean);
    const folder = entries.find(entry => entry.isDirectory);
    if (!folder) return [...transfer.files];
    const reader = folder.createReader(), inside = [];
    for (;;) {
      // A reader gives a hundred at a time.
      const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
      if (!some.length) break;
      inside.push(...some.filter(entry => entry.isFile));
    }
    const files = await Promise.all(inside.map(entry => new Promise((resolve, reject) => entry.file(resolve, reject))));
    return Object.assign(files, { folder: folder.name });
  }

  // Fails where a page could not write with it: which file is missing.
  function check({ inspection }, name) {
    if (inspection.vocabulary.tokenizer === null) {
      throw new Error(`${name} has no tokenizer; choose tokenizer.json too (or vocab.json and merges.txt), from where the checkpoint comes from: alone, it joins the files that were chosen`);
    }
  }

  // What a checkpoint is and the memory it needs, in a sentence each.
  function told({ inspection, memory }, name) {
    const needs = Object.entries(memory).filter(([, bytes]) => bytes !== null).map(([dtype, bytes]) => `${size(bytes)} ${dtype ? `as ${dtype}` : "as stored"}`);
    return `${name}: ${about(inspection)}, ${inspection.format}. Memory it needs: ${needs.join(", ")}.`;
  }

  const about = ({ parameters }) => `a GPT-2 of ${amount(parameters.unique)} parameters`;

  return { about, check, dropped, size, source, told };
})();
