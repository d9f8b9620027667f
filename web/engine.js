"use strict";
// The transport to the engine in a worker of this page. The page asks it what it would ask a server, by the same paths and bodies, and
// gets the same answers; see server.js. Only this one loads other models.
//
// Each model has a worker of its own: memory that WebAssembly has taken is given back only with its worker, and the model before
// writes on until the next one is ready. A worker that broke (a panic, no memory) is replaced by another with the same model.
const engine = (() => {
  const PARTS = { weights: "model.safetensors", config: "config.json", tokenizer: "tokenizer.json" };
  const BUILT_IN = { folder: "built-in", isBuiltIn: true };
  // What needs the transcoders of the built-in model, which are read when the first of these is asked for.
  const TRANSCODED = ["look/features", "look/feature", "look/graph"];
  const NEEDED = {
    Worker: "web workers", WebAssembly: "WebAssembly", BigInt64Array: "64-bit integers", DecompressionStream: "DecompressionStream",
  };
  const VERSIONS = "Chrome 97, Firefox 119 and Safari 16.4 or newer run this page";

  // What went wrong, in a sentence. `broke` where the worker is gone.
  class Failure extends Error {
    constructor(message, more) {
      super(message);
      Object.assign(this, more);
    }
  }

  // A part of the page inside its one file, or beside it on a host.
  const part = (id, url) => {
    const inside = document.getElementById(id);
    return inside ? { packed: inside.textContent, isSplit: inside.dataset.split !== undefined } : { url };
  };

  function newWorker() {
    const inside = document.getElementById("worker");
    if (!inside) return new Worker("worker.js");
    const url = URL.createObjectURL(new Blob([inside.textContent], { type: "text/javascript" }));
    const worker = new Worker(url);
    // Firefox reads it later than the constructor returns.
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
    return worker;
  }

  // Compiled once, for all workers.
  let compiled;

  // One worker, and what it was asked.
  class Host {
    #pending = new Map();
    #last = 0;
    onbreak = () => {};

    constructor() {
      this.worker = newWorker();
      this.worker.onmessage = event => this.#hear(event.data);
      this.worker.onerror = event => {
        event.preventDefault();
        const why = event.message ? `the engine stopped: ${event.message}` : "the engine's worker could not be started";
        this.end(new Failure(why, { broke: true }));
      };
      this.worker.onmessageerror = () => this.end(new Failure("an answer of the engine could not be read", { broke: true }));
    }

    // The answer to one message; `take` gets what comes before it.
    call(call, more, take) {
      if (this.ended) return Promise.reject(this.ended);
      const id = ++this.#last;
      return new Promise((resolve, reject) => {
        this.#pending.set(id, { resolve, reject, take });
        this.worker.postMessage({ id, call, ...more });
      });
    }

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

    end(reason) {
      if (this.ended) return;
      this.ended = reason;
      this.worker.terminate();
      for (const asked of this.#pending.values()) asked.reject(reason);
      this.#pending.clear();
      if (reason.broke) this.onbreak(reason);
    }

    // Starts the engine and opens the files of a checkpoint: what it is, and the memory it needs by precision.
    async open(source) {
      const starting = this.call("start", compiled ? { module: compiled } : { wasm: part("wasm", "gpt2.wasm") });
      const files = source.isBuiltIn ? Object.entries(PARTS).map(([id, file]) => ({ file, ...part(id, file) })) : source.files;
      // Both at once: the files are unpacked while the engine is compiled.
      const opening = this.call("open", { name: source.folder ?? "", files });
      const [started, about] = await Promise.all([starting, opening]);
      compiled ??= started.module;
      return this.about = about;
    }

    // Gives the built-in model its transcoders, once.
    async transcode() {
      const files = name => Array.from({ length: this.model.config.n_layer }, (_, layer) => `transcoders/layer_${layer}/${name}`).map(path => part(path, path));
      this.transcoding ??= this.call("transcode", { configs: files("cfg.json"), weights: files("sae_weights.safetensors") });
      await this.transcoding.catch(error => {
        this.transcoding = undefined;
        throw error;
      });
    }

    async load(source, take) {
      const loaded = await this.call("load", { dtype: source.dtype, kvDtype: source.kvDtype }, take);
      return { source, ...this.about, ...loaded, title: "in this page", about: inWords(source, this.about) };
    }
  }

  // What a model is, in one line.
  function inWords(source, { inspection, memory }) {
    const name = source.isBuiltIn ? "a small model of short stories, inside this page" : models.nameOf(source, inspection);
    const size = `${models.size(memory[source.dtype ?? ""] ?? 0)} of memory`;
    return [name, models.about(inspection), size, source.dtype, "nothing leaves this page"].filter(Boolean).join(" · ");
  }

  // The worker that answers, and the promise of its model: the next question waits for it.
  let current = null, ready = null, next = null;
  let tell = () => {};

  // What this browser lacks, in a sentence; nothing where it has all.
  function lacking() {
    const missing = Object.keys(NEEDED).filter(name => !(name in globalThis)).map(name => NEEDED[name]);
    return missing.length ? `this browser has no ${missing.join(" and no ")}; ${VERSIONS}` : "";
  }

  function take(host) {
    current?.end(new Failure("another model was loaded"));
    current = host;
    host.onbreak = reason => again(host.model.source, reason);
  }

  // Begins with a model, in place of one that is gone.
  async function begin(source) {
    const host = new Host();
    await host.open(source);
    host.model = await host.load(source);
    take(host);
    return host.model;
  }

  // After a break: the same model once more, or else the built-in one.
  function again(source, { message }) {
    const reason = words => new Failure(`${message}; the engine ${words}`);
    current = null;
    tell(null, reason("is being restarted"));
    ready = begin(source).catch(error => {
      if (source.isBuiltIn) throw error;
      return begin(BUILT_IN);
    });
    ready.then(model => tell(model, reason("was restarted")), error => tell(null, reason(`could not be restarted: ${error.message}`)));
  }

  // What compresses: a worker with the present model in the precision of the file, so that the page writes on meanwhile.
  const COMPRESSING = { dtype: "q8", kvDtype: "f16" };
  let compressing = null;

  async function compressor(types) {
    const { source } = await ready;
    const isSame = compressing && !compressing.ended && compressing.model?.source.of === source
      && Object.entries(types).every(([name, type]) => compressing.model.source[name] === type);
    if (isSame) return compressing;
    compressing?.end(new Failure("stopped"));
    const host = compressing = new Host(), own = { ...source, ...types, of: source };
    await host.open(own);
    host.model = await host.load(own);
    return host;
  }

  // On a static host: after the first visit it works without the host.
  const isHosted = !document.getElementById("worker") && location.protocol.startsWith("http");
  if (isHosted && "serviceWorker" in navigator) navigator.serviceWorker.register("service-worker.js").catch(() => {});

  return {
    BUILT_IN,
    opening: { prompt: "One day", seed: "2" },
    // What the built-in model could do at each of its checkpoints.
    async history() {
      const inside = document.getElementById("history");
      return inside ? JSON.parse(inside.textContent) : (await fetch("history.json")).json();
    },
    // That of `gpt2 serve`, for the requests that are shown.
    address: () => "http://127.0.0.1:8080/v1",

    // Begins with a source. Calls heard(null, reason) when a worker broke, and heard(model, reason) when the model came back.
    start(source, heard) {
      tell = heard;
      const missing = lacking();
      ready = missing ? Promise.reject(new Failure(missing)) : begin(source);
      return ready;
    },

    async ask(path, body) {
      await ready;
      const host = current;
      if (TRANSCODED.includes(path) && host.model.source.isBuiltIn) await host.transcode();
      return host.call("ask", { path, body: command.json(body) });
    },

    // Calls take(chunk) for each chunk of a text, until it ends or is stopped.
    async stream(path, body, take) {
      await ready;
      return current.call("write", { path, body: command.json(body) }, chunks => chunks.forEach(take));
    },

    // The tokens of bytes with the bits that each costs: [{ id, bytes, bits }].
    async sizes(bytes) {
      return (await compressor(COMPRESSING)).call("sizes", { bytes });
    },

    // What `gpt2 compress` writes; progress(done, total) is called as it advances.
    async compress(bytes, progress) {
      return (await compressor(COMPRESSING)).call("compress", { bytes }, part => progress(...part));
    },

    // The bytes that were compressed.
    async decompress(bytes, progress) {
      await ready;
      const { dtype, kv_dtype: kvDtype } = await current.call("header", { bytes });
      return (await compressor({ dtype, kvDtype })).call("decompress", { bytes }, part => progress(...part));
    },

    // Ends what is compressed or decompressed.
    stopCompressing() {
      compressing?.end(new Failure("stopped", { stopped: true }));
    },

    stop() {
      current?.call("stop").catch(() => {});
    },

    // Opens a source in a worker next to the present one: see(about) is called with what it is before it is loaded and may refuse it,
    // progress(done, total) as it advances. The present model keeps writing meanwhile, and stays if this fails.
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

    // Ends a load; the model before stays. Whether there was one.
    cancel() {
      const host = next;
      next = null;
      host?.end(new Failure("loading was stopped", { stopped: true }));
      return Boolean(host);
    },

    get worker() { return current?.worker; },
  };
})();
