"use strict";
// The worker: unpacks the engine and its model, answers requests, and generates token by token. It runs after
// wasm-bindgen's glue code, which defines the classes in `wasm_bindgen`.
//
// A message is { id, call, … }. Its answer is { id, value } or
// { id, error: { message, status, param, broke } }, preceded by any number of { id, part }.
(() => {
  const DTYPES = ["", "f32", "f16", "q8", "q4"];
  let started, checkpoint, model, writing = null;

  // ---- Packed data

  // Decodes base 85, five letters for four bytes. Digits are the letters from # to w, with ~ for < and } for \.
  function fromBase85(text) {
    const bytes = new Uint8Array(Math.floor(text.length * 4 / 5));
    for (let start = 0, at = 0; start < text.length; start += 5) {
      let value = 0;
      for (let n = start; n < start + 5; n++) {
        const code = text.charCodeAt(n), digit = code === 126 ? 25 : code === 125 ? 57 : code - 35;
        value = value * 85 + (n < text.length ? digit : 84);
      }
      for (let shift = 24; shift >= 0 && at < bytes.length; shift -= 8) bytes[at++] = value >>> shift;
    }
    return bytes;
  }

  async function fetched(url) {
    let answer;
    try {
      answer = await fetch(url);
    } catch {
      throw new Error(`could not load ${url}; reload this page when its host responds`);
    }
    if (!answer.ok) throw new Error(`could not load ${url}: the host answered ${answer.status}`);
    return answer.arrayBuffer();
  }

  // Interleaves the bytes of 16-bit numbers. In the packed data, the lower bytes precede the upper bytes,
  // because they compress better this way.
  function joined(split) {
    const half = split.length >> 1, bytes = new Uint8Array(split.length);
    for (let n = 0; n < half; n++) {
      bytes[2 * n] = split[n];
      bytes[2 * n + 1] = split[half + n];
    }
    return bytes;
  }

  async function bytesOf({ packed, isSplit, url }) {
    if (url) return fetched(url);
    const stream = new Blob([fromBase85(packed)]).stream().pipeThrough(new DecompressionStream("gzip"));
    const bytes = await new Response(stream).arrayBuffer();
    return isSplit ? joined(new Uint8Array(bytes)) : bytes;
  }

  // ---- Requests

  async function compiled(wasm) {
    try {
      return await WebAssembly.compile(await bytesOf(wasm));
    } catch (error) {
      if (!(error instanceof WebAssembly.CompileError)) throw error;
      throw Object.assign(new Error("this browser's WebAssembly has no 128-bit SIMD"), { isOld: true });
    }
  }

  async function start({ module, wasm }) {
    started = module ? Promise.resolve(module) : compiled(wasm);
    wasm_bindgen.initSync({ module: await started });
    return { module: await started };
  }

  // Unpacks the files while the engine is compiled.
  async function open({ name, files }) {
    const parts = await Promise.all(files.map(one => one.blob ? null : bytesOf(one)));
    await started;
    const given = new wasm_bindgen.Files(name);
    files.forEach(({ file, blob }, n) => {
      if (blob) given.add_file(file, blob);
      else given.add_bytes(file, new Uint8Array(parts[n]));
    });
    checkpoint = new wasm_bindgen.Checkpoint(given);
    return { inspection: JSON.parse(checkpoint.inspect()), tokenizer: checkpoint.tokenizer_fault(), memory: Object.fromEntries(DTYPES.map(dtype => [dtype, memory(dtype)])) };
  }

  // Returns the bytes that a precision needs; null if the checkpoint cannot be loaded in it.
  function memory(dtype) {
    try {
      return checkpoint.memory(dtype || undefined);
    } catch (error) {
      if (isBreak(error)) throw error;
      return null;
    }
  }

  function load({ id, dtype, kvDtype }) {
    model = checkpoint.load(dtype || undefined, kvDtype, (done, total) => postMessage({ id, part: [done, total] }));
    return { name: model.name, config: JSON.parse(model.config()) };
  }

  async function transcode({ configs, weights }) {
    const [texts, tensors] = await Promise.all([configs, weights].map(files => Promise.all(files.map(bytesOf))));
    model.set_transcoders(texts.map(bytes => new TextDecoder().decode(bytes)), tensors.map(bytes => new Uint8Array(bytes)));
  }

  const header = ({ bytes }) => JSON.parse(wasm_bindgen.compressed_header(bytes));
  const sizes = ({ bytes }) => JSON.parse(model.token_sizes(bytes));
  const compress = ({ id, bytes }) => model.compress(bytes, (...part) => postMessage({ id, part }));
  const decompress = ({ id, bytes }) => model.decompress(bytes, (...part) => postMessage({ id, part }));

  const ask = ({ path, body }) => JSON.parse(model.ask(path, body));
  const activations = ({ ids, hooks }) => model.activations(ids, hooks);

  // Yields after each token, so that other messages can arrive. Another completion or a stop ends this one.
  async function write({ id, path, body }) {
    stop();
    const run = writing = model.start(path, body);
    try {
      while (writing === run) {
        const chunks = run.next();
        if (!chunks) break;
        postMessage({ id, part: chunks.map(chunk => JSON.parse(chunk)) });
        await turn();
      }
    } catch (error) {
      // After a crash, nothing in the engine may be called.
      if (isBreak(error)) writing = null;
      throw error;
    } finally {
      if (writing === run) stop();
    }
  }

  // Frees the completion immediately; otherwise the engine would finish it before it answers other requests.
  function stop() {
    writing?.free();
    writing = null;
  }

  // Waits behind all queued messages; a timer would take at least 4 ms.
  const channel = new MessageChannel(), turns = [];
  channel.port1.onmessage = () => turns.shift()();
  const turn = () => new Promise(resolve => {
    turns.push(resolve);
    channel.port2.postMessage(0);
  });

  // ---- Errors

  // Errors after which the engine's memory is unreliable: a panic, out of memory, stack overflow.
  const isBreak = error => error instanceof WebAssembly.RuntimeError || error instanceof RangeError || error?.name === "InternalError";

  function describe(error) {
    if (!isBreak(error)) return { message: error?.message ?? String(error), status: error?.status, param: error?.param, isOld: error?.isOld };
    let panic;
    try {
      panic = wasm_bindgen.last_panic();
    } catch {
      // No further information is available.
    }
    const why = panic ? `the engine crashed: ${panic}` : "the engine crashed, most likely because it ran out of memory";
    return { message: why, broke: true };
  }

  const calls = { start, open, load, transcode, ask, activations, write, stop, header, sizes, compress, decompress };
  onmessage = async ({ data }) => {
    try {
      postMessage({ id: data.id, value: await calls[data.call](data) });
    } catch (error) {
      postMessage({ id: data.id, error: describe(error) });
    }
  };
})();
