// @ts-check
// Transport to the engine in a worker of this page. It serves the same paths and bodies as the server (see
// server.js) with the same answers. Only this transport can load other models.
//
// Each model has its own worker, because WebAssembly memory is freed only when its worker ends. The previous
// model keeps generating until the next one is ready. A worker that crashes (a panic, out of memory) is
// replaced by a new one with the same model.
import { json } from "./command.js";
import { Failure } from "./failure.js";
import { sizeInWords, sizeText, sourceName } from "./model.js";

/** @typedef {import("./types").Source} Source */
/** @typedef {import("./types").Model} Model */

const FILES = ["config.json", "generation_config.json", "tokenizer.json", "model.gguf"];
const BUILT_IN = { folder: "built-in", isBuiltIn: true };
// Paths that need the transcoders of the built-in model, which are loaded on first use.
const TRANSCODED = ["look/features", "look/feature", "look/graph"];
const NEEDED = {
  Worker: "web workers", WebAssembly: "WebAssembly", BigInt64Array: "64-bit integers", DecompressionStream: "DecompressionStream",
};
const VERSIONS = "use Chrome 97, Firefox 119, Safari 16.4 or a later version";

/**
 * Returns a part of the page: inside the single file, or next to the page on a host.
 * @param {string} id
 * @param {string} url
 */
const part = (id, url) => {
  const inside = document.getElementById(id);
  return inside ? { packed: inside.textContent, isSplit: inside.dataset.split !== undefined } : { url };
};

function newWorker() {
  const inside = document.getElementById("worker");
  if (!inside) return new Worker("worker.js");
  const url = URL.createObjectURL(new Blob([inside.textContent], { type: "text/javascript" }));
  const worker = new Worker(url);
  // Firefox reads the URL after the constructor has returned.
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
  return worker;
}

/** The engine module, compiled once for all workers. @type {WebAssembly.Module | undefined} */
let compiled;

/** A worker and its pending messages. */
class Host {
  /** @type {Map<number, { resolve: (value: any) => void, reject: (error: Error) => void, take?: (part: any) => void }>} */
  #pending = new Map();
  #last = 0;
  /** @type {(reason: any) => void} */
  onbreak = () => {};
  /** @type {any} */
  about;
  /** @type {Model} */
  model = /** @type {any} */ (null);
  /** @type {any} */
  ended;
  /** @type {Promise<any> | undefined} */
  transcoding;

  constructor() {
    this.worker = newWorker();
    this.worker.onmessage = event => this.#hear(event.data);
    this.worker.onerror = event => {
      event.preventDefault();
      const why = event.message ? `the engine stopped: ${event.message}` : "the engine's worker could not be started";
      this.end(new Failure(why, { broke: true }));
    };
    this.worker.onmessageerror = () => this.end(new Failure("could not read the engine's answer", { broke: true }));
  }

  /**
   * Sends one message and returns its answer; `take` receives the parts that precede it.
   * @param {string} call
   * @param {any} [more]
   * @param {(part: any) => void} [take]
   * @returns {Promise<any>}
   */
  call(call, more, take) {
    if (this.ended) return Promise.reject(this.ended);
    const id = ++this.#last;
    return new Promise((resolve, reject) => {
      this.#pending.set(id, { resolve, reject, take });
      this.worker.postMessage({ id, call, ...more });
    });
  }

  /** @param {any} answer */
  #hear({ id, value, part, error }) {
    const asked = this.#pending.get(id);
    if (!asked) return;
    if (part !== undefined) {
      asked.take?.(part);
    } else if (error?.broke) {
      this.end(new Failure(error.message, error));
    } else {
      this.#pending.delete(id);
      if (error) asked.reject(new Failure(error.isOld ? `${error.message}; ${VERSIONS}` : error.message, error));
      else asked.resolve(value);
    }
  }

  /** @param {any} reason */
  end(reason) {
    if (this.ended) return;
    this.ended = reason;
    this.worker.terminate();
    for (const asked of this.#pending.values()) asked.reject(reason);
    this.#pending.clear();
    if (reason.broke) this.onbreak(reason);
  }

  /**
   * Starts the engine and opens a checkpoint; returns its inspection and memory needs by precision.
   * @param {Source} source
   */
  async open(source) {
    const starting = this.call("start", compiled ? { module: compiled } : { wasm: part("wasm", "gpt2.wasm") });
    const files = source.isBuiltIn ? FILES.map(file => ({ file, ...part(file, file) })) : source.files;
    // Runs both concurrently: the files are unpacked while the engine is compiled.
    const opening = this.call("open", { name: source.folder ?? "", files });
    const [started, about] = await Promise.all([starting, opening]);
    compiled ??= started.module;
    return this.about = about;
  }

  /** Loads the transcoders of the built-in model, once. */
  async transcode() {
    const files = (/** @type {string} */ name) => Array.from({ length: this.model.config.n_layer ?? 0 }, (_, layer) => `transcoders/layer_${layer}/${name}`).map(path => part(path, path));
    this.transcoding ??= this.call("transcode", { configs: files("cfg.json"), weights: files("sae_weights.safetensors") });
    await this.transcoding.catch(error => {
      this.transcoding = undefined;
      throw error;
    });
  }

  /** @param {Source} source @param {(part: any) => void} [take] @returns {Promise<Model>} */
  async load(source, take) {
    const loaded = await this.call("load", { dtype: source.dtype, kvDtype: source.kvDtype }, take);
    const defaults = (await this.call("ask", { path: "props" })).default_generation_settings.params;
    return { source, ...this.about, ...loaded, defaults, title: source.isBuiltIn ? "built-in" : sourceName(source, this.about.inspection), about: inWords(source, this.about) };
  }
}

/** Describes a model in one line. @param {Source} source @param {any} about */
function inWords(source, { inspection, memory }) {
  const name = source.isBuiltIn ? "A small model of short stories, inside this page" : sourceName(source, inspection);
  const size = `${sizeText(memory[source.dtype ?? ""] ?? 0)} of memory`;
  return [name, sizeInWords(inspection), size, source.dtype, "nothing leaves this page"].filter(Boolean).join(" · ");
}

/** The worker that answers requests. @type {Host | null} */
let current = null;
/** Promise for the current model; requests wait for it. @type {Promise<Model> | null} */
let ready = null;
/** The worker for the model that is being loaded. @type {Host | null} */
let next = null;
/** @type {(model: Model | null, reason: Error) => void} */
let tell = () => {};
/** Returns the active worker once its model is ready. */
async function host() {
  await ready;
  return /** @type {Host} */ (current);
}

/** Names the features that this browser lacks, in a sentence. */
function lacking() {
  const missing = Object.entries(NEEDED).filter(([name]) => !(name in globalThis)).map(([, words]) => words);
  return missing.length ? `this browser lacks ${missing.join(" and ")}; ${VERSIONS}` : "";
}

/** @param {Host} host */
function take(host) {
  current?.end(new Failure("another model was loaded"));
  current = host;
  host.onbreak = reason => again(host.model.source, reason);
}

/** Loads a model into a new worker and makes it the current one. @param {Source} source */
async function begin(source) {
  const host = new Host();
  await host.open(source);
  host.model = await host.load(source);
  take(host);
  return host.model;
}

/**
 * Recovers from a crash: reloads the same model, or else the built-in one.
 * @param {Source} source
 * @param {Error} reason
 */
function again(source, { message }) {
  const reason = (/** @type {string} */ words) => new Failure(`${message}; the engine ${words}`);
  current = null;
  tell(null, reason("is being restarted"));
  ready = begin(source).catch(error => {
    if (source.isBuiltIn) throw error;
    return begin(BUILT_IN);
  });
  ready.then(model => tell(model, reason("was restarted")), error => tell(null, reason(`could not be restarted: ${error.message}`)));
}

// Compression runs in its own worker with the current model, in the precision of the file format, so that the
// page can keep generating.
const COMPRESSING = { dtype: "q8", kvDtype: "f16" };
/** @type {Host | null} */
let compressing = null;

/** @param {Record<string, string>} types */
async function compressor(types) {
  const { source } = (await host()).model, before = compressing;
  const isSame = before && !before.ended && before.model?.source.of === source
    && Object.entries(types).every(([name, type]) => /** @type {any} */ (before.model.source)[name] === type);
  if (isSame) return before;
  compressing?.end(new Failure("stopped"));
  const other = compressing = new Host(), own = { ...source, ...types, of: source };
  await other.open(own);
  other.model = await other.load(own);
  return other;
}

// On a static host, the page works offline after the first visit.
const isHosted = !document.getElementById("worker") && location.protocol.startsWith("http");
if (isHosted && "serviceWorker" in navigator) navigator.serviceWorker.register("service-worker.js").catch(() => {});

/** The transport to the engine inside the page. @type {import("./types").Engine} */
export const engine = {
  BUILT_IN,
  async history() {
    const inside = document.getElementById("history");
    return inside ? JSON.parse(inside.textContent ?? "") : (await fetch("history.json")).json();
  },
  // The default address of `gpt2 serve`, for the displayed requests.
  address: () => "http://127.0.0.1:8080/v1",

  start(source, heard) {
    tell = heard;
    const missing = lacking();
    ready = missing ? Promise.reject(new Failure(missing)) : begin(source);
    return ready;
  },

  async ask(path, body) {
    const asked = await host();
    if (TRANSCODED.includes(path) && asked.model.source.isBuiltIn) await asked.transcode();
    return asked.call("ask", { path, body: json(body) });
  },

  async stream(path, body, take) {
    await (await host()).call("write", { path, body: json(body) }, chunks => chunks.forEach(take));
  },

  async sizes(bytes) {
    return (await compressor(COMPRESSING)).call("sizes", { bytes });
  },

  async compress(bytes, progress) {
    return (await compressor(COMPRESSING)).call("compress", { bytes }, ([done, total]) => progress(done, total));
  },

  async decompress(bytes, progress) {
    const { dtype, kv_dtype: kvDtype } = await (await host()).call("header", { bytes });
    return (await compressor({ dtype, kvDtype })).call("decompress", { bytes }, ([done, total]) => progress(done, total));
  },

  stopCompressing() {
    compressing?.end(new Failure("stopped", { stopped: true }));
  },

  stop() {
    current?.call("stop").catch(() => {});
  },

  async load(source, see, progress) {
    next?.end(new Failure("another model was chosen", { replaced: true }));
    const host = next = new Host();
    try {
      await ready?.catch(() => {});
      see(await host.open(source));
      host.model = await host.load(source, ([done, total]) => progress(done, total));
      if (next !== host) throw host.ended;
      take(host);
      ready = Promise.resolve(host.model);
      return host.model;
    } catch (error) {
      host.end(new Failure("ended"));
      throw error;
    } finally {
      if (next === host) next = null;
    }
  },

  cancel() {
    const host = next;
    next = null;
    host?.end(new Failure("loading was stopped", { stopped: true }));
    return Boolean(host);
  },
};
