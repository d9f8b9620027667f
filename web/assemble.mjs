// Assembles the page and the npm package from the output of scripts/build_web.sh.
//
// usage: node web/assemble.mjs
//
// Writes web/dist/gpt2.html, the page as a single file; web/dist/, the page for a static host; web/dist/npm/,
// the package; web/dist/book/engine.js, the engine for the book's figures.

import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

const ROOT = dirname(dirname(fileURLToPath(import.meta.url)));
const MOST_BYTES = 15_000_000;

const MODEL_FOLDER = "models/stories";
const MODEL = ["config.json", "generation_config.json", "tokenizer.json", "model.gguf"];
// Names of the files with the transcoders of the model's MLPs, which the transport requests.
const TRANSCODERS = readdirSync(join(ROOT, MODEL_FOLDER, "transcoders")).sort()
  .flatMap((layer) => ["cfg.json", "sae_weights.safetensors"].map((name) => `transcoders/${layer}/${name}`));
// File with measurements of the model's abilities at each checkpoint of its training.
const HISTORY = "history.json";

// Content security policies that forbid all outside requests. In a file the scripts are inline; on a host
// they are separate files.
const NOTHING_ELSE = "img-src data:; base-uri 'none'; form-action 'none'";
const FILE_POLICY =
  `default-src 'none'; script-src 'unsafe-inline' 'wasm-unsafe-eval'; style-src 'unsafe-inline'; worker-src blob:; ${NOTHING_ELSE}`;
const HOST_POLICY =
  "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; connect-src 'self'; worker-src 'self'; " + NOTHING_ELSE;

const bytes = (path) => readFileSync(join(ROOT, path));
const text = (path) => bytes(path).toString("utf8");
const ofModel = (name) => bytes(`${MODEL_FOLDER}/${name}`);

// Escapes a script for a page, so that HTML finds neither an end tag nor a comment inside the script.
const inside = (script) => script.replaceAll("</script", "<\\/script").replaceAll("<!--", "<\\!--");

// Replaces the names between pairs of `@@` in a template.
function filled(template, places) {
  const pieces = template.split("@@");
  return pieces.map((piece, index) => {
    if (index % 2 === 0) return piece;
    if (!(piece in places)) throw new Error(`unknown placeholder @@${piece}@@`);
    return places[piece];
  }).join("");
}

// Encodes bytes in base 85, which is 6% shorter than base 64; `fromBase85` in worker.js decodes it.
function base85(bytes) {
  const letters = Buffer.alloc(5 * Math.ceil(bytes.length / 4)), padded = Buffer.concat([bytes, Buffer.alloc(3)]);
  for (let start = 0, group = 0; start < bytes.length; start += 4, group += 5) {
    let value = padded.readUInt32BE(start);
    for (let n = group + 4; n >= group; n--) {
      const code = value % 85 + 35;
      letters[n] = code === 60 ? 126 : code === 92 ? 125 : code;
      value = Math.floor(value / 85);
    }
  }
  return letters.toString("latin1", 0, bytes.length + Math.ceil(bytes.length / 4));
}

// Moves the lower bytes of 16-bit numbers before the upper bytes, which are similar, so that gzip saves
// another twelfth.
const split = (data) => Buffer.concat([0, 1].map((half) => data.filter((_, place) => place % 2 === half)));
const packed = (data) => base85(gzipSync(data, { level: 9 }));
const data = (id, content, kind = "") => `<script type="text/plain" id="${id}"${kind}>${content}</script>\n`;
const plain = (id, content) => data(id, packed(content));
const numbers = (id, content) => data(id, packed(split(content)), " data-split");

const index = text("web/index.html");
const own = (name) => text(`web/${name}`);
const ENTRY = "file-page.js";

// Patterns for a line that imports another module, and for a declaration that exports one name.
const IMPORT = /^import (?:(\{.*\}) from )?"\.\/(.*)";$/gm, EXPORT = /^export (?:async )?(?:function|class|const) (\w+)/gm;

// Returns the paths of a module and of its imports, dependencies first.
function collected(path, paths = []) {
  if (paths.includes(path)) return paths;
  for (const [, , from] of own(path).matchAll(IMPORT)) collected(join(dirname(path), from), paths);
  paths.push(path);
  return paths;
}

// Removes types and whole-line comments from a module.
const withoutComments = (text) => text.replace(/\/\*\*[^]*?\*\//g, "").replace(/^\s*\/\/.*$/gm, "").replace(/^\s*\n/gm, "");

// Bundles a module and its imports into one classic script, because a page opened from a file cannot load
// modules. `script` in the crate candle-gpt2-web does the same.
function script(entry) {
  const wrapped = (path) => {
    const names = [...own(path).matchAll(EXPORT)].map(([, name]) => name);
    if (names.length !== own(path).split(/^export /m).length - 1) throw new Error(`${path} has an export without a single name`);
    const body = withoutComments(own(path)).replace(IMPORT, (_, list, from) =>
      list ? `const ${list.replaceAll(" as ", ": ")} = modules[${JSON.stringify(join(dirname(path), from))}];` : "").replace(/^export /gm, "");
    return `modules[${JSON.stringify(path)}] = (() => {\n${body}return { ${names.join(", ")} };\n})();\n`;
  };
  return `"use strict";\nconst modules = {};\n${collected(entry).map(wrapped).join("")}`;
}

const LINK = /<link rel="stylesheet" href="(.*)">/g, SCRIPT = /<script type="module" src="@@script@@"><\/script>/;
const loaded = [...[...index.matchAll(LINK)].map(([, name]) => name), ...collected(ENTRY)].map((name) => [name, own(name)]);
const worker = text("target/browser/page/gpt2.js") + text("web/worker.js");
const wasm = bytes("target/browser/page/gpt2_bg.wasm");
const elements = Object.fromEntries(["report", "head", "graph", "feature", "learned"].map((name) => [name, own(`parts/${name}.html`)]));

const page = (html, policy, data) => {
  const meta = `<meta http-equiv="Content-Security-Policy" content="${policy}">\n`;
  return filled(html, { transport: "engine", script: ENTRY, policy: meta, ...elements, data });
};

function oneFile() {
  const whole = index
    .replace(LINK, (_, name) => `<style>${own(name)}</style>`)
    .replace(SCRIPT, () => `<script>${inside(script(ENTRY))}</script>`);
  const packs = data("worker", inside(worker)) + data("wasm", packed(wasm)) +
    [...MODEL, ...TRANSCODERS].map((name) => (name.endsWith(".safetensors") ? numbers : plain)(name, ofModel(name))).join("") +
    data("history", ofModel(HISTORY).toString("utf8").replaceAll("<", "\\u003c"));
  return page(whole, FILE_POLICY, packs);
}

// Returns the files for a static host, with their names.
function hosted() {
  const files = [["index.html", page(index, HOST_POLICY, "")], ...loaded, ["worker.js", worker], ["gpt2.wasm", wasm]];
  files.push(...[...MODEL, HISTORY, ...TRANSCODERS].map((name) => [name, ofModel(name)]));
  const hash = createHash("sha256");
  for (const [name, content] of files) hash.update(name).update("\0").update(content).update("\0");
  const names = files.map(([name]) => (name === "index.html" ? "./" : name));
  const places = { version: hash.digest("hex").slice(0, 16), files: JSON.stringify(names) };
  return [...files, ["service-worker.js", filled(text("web/service-worker.js"), places)]];
}

// Returns the engine and its model as a classic script, the only kind of file that a page opened from a file
// can load.
function bookEngine() {
  const files = MODEL.map((file) => ({ file, packed: packed(ofModel(file)) }));
  const parts = { worker, wasm: { packed: packed(wasm) }, files, history: JSON.parse(ofModel(HISTORY)), tokenizer: JSON.parse(ofModel("tokenizer.json")) };
  return `window.gpt2Engine = ${JSON.stringify(parts)};\n`;
}

function npmPackage() {
  const version = /^\[workspace\.package\]\nversion = "([^"]+)"/m.exec(text("Cargo.toml"))[1];
  const manifest = { ...JSON.parse(text("web/package/package.json")), version };
  const built = ["gpt2.js", "gpt2.d.ts", "gpt2_bg.wasm", "gpt2_bg.wasm.d.ts"];
  return [
    ["package.json", JSON.stringify(manifest, null, 2) + "\n"],
    ["README.md", text("web/package/README.md")],
    ...["LICENSE-APACHE", "LICENSE-MIT"].map((name) => [name, text(name)]),
    ...built.map((name) => [name, bytes(`target/browser/module/${name}`)]),
  ];
}

function write(folder, files) {
  for (const [name, content] of files) {
    const path = join(folder, name);
    mkdirSync(dirname(path), { recursive: true });
    writeFileSync(path, content);
  }
}

const sizes = (files) => {
  const sum = (of) => files.reduce((bytes, [, content]) => bytes + of(Buffer.from(content)), 0);
  return `${sum((content) => content.length)} bytes, ${sum((content) => gzipSync(content, { level: 9 }).length)} with gzip`;
};

const dist = join(ROOT, "web/dist");
rmSync(dist, { recursive: true, force: true });
const file = Buffer.from(oneFile());
const [host, npm] = [hosted(), npmPackage()];
write(dist, [...host, ["gpt2.html", file]]);
write(join(dist, "npm"), npm);
write(join(dist, "book"), [["engine.js", bookEngine()]]);
console.log(`gpt2_bg.wasm: ${sizes([["", wasm]])}`);
console.log(`web/dist/gpt2.html: ${file.length} bytes`);
console.log(`web/dist/: ${host.length} files, ${sizes(host)}`);
console.log(`web/dist/npm/: ${npm.length} files, ${sizes(npm)}`);
if (file.length >= MOST_BYTES) {
  console.error(`gpt2.html has ${file.length} bytes; expected less than ${MOST_BYTES}`);
  process.exit(1);
}
