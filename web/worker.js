"use strict";
// The worker: unpacks the engine and its model, answers questions, and writes token by token. It follows wasm-bindgen's glue,
// whose classes are in `wasm_bindgen`.
//
// A message is { id, call, … }; its answer { id, value } or { id, error: { message, status, param, broke } }, before it { id, part }.
(() => {
  const DTYPES = ["", "f32", "f16", "q8", "q4"];
  let started, checkpoint, model, writing = null;

  // ---- What comes packed

  function fromBase64(text) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
    const binary = atob(text), bytes = new Uint8Array(binary.length);
    for (let n = 0; n < binary.length; n++) bytes[n] = binary.charCodeAt(n);
    return bytes;
  }

  async function fetched(url) {
    let answer;
    try {
      answer = await fetch(url);
    } catch {
      throw new Error(`${url} could not be read; load this page again when its host answers`);
    }
    if (!answer.ok) throw new Error(`${url} could not be read: the host answered ${answer.status}`);
    return answer.arrayBuffer();
  }

  // The bytes of 16-bit numbers, of which all lower ones came first and then all upper ones: so they pack better.
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
    const stream = new Blob([fromBase64(packed)]).stream().pipeThrough(new DecompressionStream("gzip"));
    const bytes = await new Response(stream).arrayBuffer();
    return isSplit ? joined(new Uint8Array(bytes)) : bytes;
  }

  // ---- What can be asked

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

  // Unpacks while the engine is compiled.
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

  // Bytes that a precision needs; none where the checkpoint cannot be held in it.
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

  // A token at a time, so that other messages are heard in between; another text, or a stop, ends this one.
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
      // Then nothing in the engine may be called any more.
      if (isBreak(error)) writing = null;
      throw error;
    } finally {
      if (writing === run) stop();
    }
  }

  // At once: the engine would finish a text that is still there before it answers anything else.
  function stop() {
    writing?.free();
    writing = null;
  }

  // The end of the queue of messages; a timer would wait for 4 ms.
  const channel = new MessageChannel(), turns = [];
  channel.port1.onmessage = () => turns.shift()();
  const turn = () => new Promise(resolve => {
    turns.push(resolve);
    channel.port2.postMessage(0);
  });

  // ---- What goes wrong

  // After these the engine's memory cannot be trusted: a panic, no memory, too deep a stack.
  const isBreak = error => error instanceof WebAssembly.RuntimeError || error instanceof RangeError || error?.name === "InternalError";

  function told(error) {
    if (!isBreak(error)) return { message: error?.message ?? String(error), status: error?.status, param: error?.param, isOld: error?.isOld };
    let panic;
    try {
      panic = wasm_bindgen.last_panic();
    } catch {
      // Then nothing more can be known.
    }
    const why = panic ? `the engine stopped by a fault of its own: ${panic}` : "the engine stopped, most likely because the browser gave it no more memory";
    return { message: why, broke: true };
  }

  const calls = { start, open, load, transcode, ask, write, stop, header, sizes, compress, decompress };
  onmessage = async ({ data }) => {
    try {
      postMessage({ id: data.id, value: await calls[data.call](data) });
    } catch (error) {
      postMessage({ id: data.id, error: told(error) });
    }
  };
})();
