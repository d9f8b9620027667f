// Tests that compare the npm package with the program. usage: node --test web/package/test.mjs
//
// GPT2_PROGRAM is the program (target/debug/gpt2). GPT2_CHECKPOINTS is a folder of published checkpoints;
// without it, their tests are skipped.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

const ROOT = dirname(dirname(dirname(fileURLToPath(import.meta.url))));
const PACKAGE = join(ROOT, "web/dist/npm");
const PROGRAM = process.env.GPT2_PROGRAM ?? join(ROOT, "target/debug/gpt2");
const BUILT_IN = join(ROOT, "models/stories");
const TINY = join(ROOT, "crates/testing/fixtures/tiny-checkpoint");
const NAMES = ["config.json", "generation_config.json", "tokenizer.json", "model.gguf", "model.safetensors"];
// WebAssembly rounds twice when it multiplies f32 weights.
const TOLERANCE = 1e-4;

const { Checkpoint, Files, initSync, last_panic, version } = await import(join(PACKAGE, "gpt2.js"));
const { memory } = initSync({ module: readFileSync(join(PACKAGE, "gpt2_bg.wasm")) });

const namesIn = (folder) => NAMES.filter((name) => existsSync(join(folder, name)));

function files(folder, names = namesIn(folder), name = "a model") {
  const input = new Files(name);
  for (const file of names) input.add_bytes(file, readFileSync(join(folder, file)));
  return input;
}

const load = (folder, dtype, names) => new Checkpoint(files(folder, names)).load(dtype);
const program = (...flags) => execFileSync(PROGRAM, flags, { encoding: "utf8", maxBuffer: 1 << 28 });

function generated(model, body) {
  const completion = model.start("v1/completions", JSON.stringify({ ...body, stream: true }));
  let text = "";
  for (let chunks; (chunks = completion.next()); ) {
    for (const chunk of chunks) text += JSON.parse(chunk).choices[0].text;
  }
  completion.free();
  return text;
}

const SETTINGS = [
  [{ temperature: 0 }, ["--greedy"]],
  [{ seed: 7, temperature: 0.8, top_k: 50 }, ["--seed", "7", "--temperature", "0.8", "--top-k", "50"]],
  [{ seed: 3, top_p: 0.9 }, ["--seed", "3", "--top-p", "0.9"]],
];

function assertSameTexts(folder, model, prompt, types = []) {
  for (const [body, flags] of SETTINGS) {
    const streamed = generated(model, { prompt, max_tokens: 40, ...body });
    const text = program("generate", prompt, "--model", folder, "--max-new-tokens", "40", "--device", "cpu", ...types, ...flags);
    assert.equal(streamed + "\n", text, `${types} ${JSON.stringify(body)}`);
    const whole = JSON.parse(model.ask("v1/completions", JSON.stringify({ prompt, max_tokens: 40, ...body })));
    assert.equal(whole.choices[0].text, streamed);
  }
}

// Returns the program's logits after each token, from `gpt2 cache`.
function programLogits(folder, ids, types) {
  const out = mkdtempSync(join(tmpdir(), "gpt2-"));
  const file = join(out, "logits.safetensors");
  program("cache", "--ids", [...ids].join(","), "--model", folder, "--device", "cpu", "--sites", "logits", "--out", file, ...types);
  const bytes = readFileSync(file);
  rmSync(out, { recursive: true });
  const header = Number(bytes.readBigUInt64LE(0));
  const [tensor] = Object.entries(JSON.parse(bytes.toString("utf8", 8, 8 + header))).filter(([name]) => name !== "__metadata__");
  const [start, end] = tensor[1].data_offsets;
  return new Float32Array(bytes.buffer.slice(bytes.byteOffset + 8 + header + start, bytes.byteOffset + 8 + header + end));
}

function assertSameLogits(folder, model, ids, types = []) {
  const [found, expected] = [model.logits(ids), programLogits(folder, ids, types)];
  assert.equal(found.length, expected.length);
  const difference = found.reduce((largest, logit, n) => Math.max(largest, Math.abs(logit - expected[n])), 0);
  assert.ok(difference < TOLERANCE, `${types}: ${difference}`);
}

// The fingerprints are the same for every processor's instruction sets; see
// crates/engine/tests/fingerprints.rs.
test("logits match the reference fingerprints", () => {
  for (const { config, fingerprints } of JSON.parse(readFileSync(join(ROOT, "crates/engine/tests/fingerprints.json")))) {
    for (const dtype of ["f16", "q8", "q6", "q4"]) {
      const input = new Files("a model");
      const folder = config ? TINY : BUILT_IN;
      for (const name of namesIn(folder)) {
        const bytes = readFileSync(join(folder, name));
        const isChanged = config && name === "config.json";
        input.add_bytes(name, isChanged ? Buffer.from(JSON.stringify({ ...JSON.parse(bytes), ...config })) : bytes);
      }
      const model = new Checkpoint(input).load(dtype, "f16");
      assert.equal(model.fingerprint(), fingerprints[dtype], `${JSON.stringify(config)}, ${dtype}`);
      model.free();
    }
  }
});

test("completions and logits of the built-in model match the program in every dtype", () => {
  for (const dtype of [undefined, "f32", "q8", "q4"]) {
    const model = load(BUILT_IN, dtype);
    const types = dtype ? ["--dtype", dtype] : [];
    assertSameTexts(BUILT_IN, model, "One day", types);
    assertSameLogits(BUILT_IN, model, model.encode("But soft, what light"), types);
    model.free();
  }
});

function safetensors(path) {
  const bytes = readFileSync(path);
  const start = 8 + Number(bytes.readBigUInt64LE(0));
  const { __metadata__: metadata, ...tensors } = JSON.parse(bytes.toString("utf8", 8, start));
  const data = name => bytes.subarray(...tensors[name].data_offsets.map(offset => start + offset));
  return { metadata, tensors, data };
}

// Returns the weights of a model as a standalone file.
function packed({ tensors, data }) {
  const header = {}, parts = [];
  let end = 0;
  for (const [name, tensor] of Object.entries(tensors).filter(([name]) => /^(transformer|lm_head)\./.test(name))) {
    parts.push(data(name));
    header[name] = { ...tensor, data_offsets: [end, end += parts.at(-1).length] };
  }
  const text = Buffer.from(JSON.stringify(header)), length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  return Buffer.concat([length, text, ...parts]);
}

test("logits match transformers for every configuration option", () => {
  const folder = join(ROOT, "crates/testing/fixtures/gpt2");
  const names = readdirSync(folder);
  assert.ok(names.length >= 14, `${names}`);
  for (const name of names) {
    const file = safetensors(join(folder, name));
    const { config } = JSON.parse(file.metadata.reference);
    const input = new Files(name);
    input.add_bytes("config.json", Buffer.from(JSON.stringify(config)));
    input.add_bytes("model.safetensors", packed(file));
    const model = new Checkpoint(input).load();
    const [rows, tokens] = file.tensors.input_ids.shape;
    const [ids, bytes] = [file.data("input_ids"), file.data("expected.logits")];
    for (let row = 0; row < rows; row++) {
      const found = model.logits(Uint32Array.from({ length: tokens }, (_, n) => Number(ids.readBigInt64LE(8 * (row * tokens + n)))));
      assert.equal(rows * found.length * 4, bytes.length);
      found.forEach((logit, n) => {
        const expected = bytes.readFloatLE(4 * (row * found.length + n));
        assert.ok(Math.abs(logit - expected) < TOLERANCE, `${name}: ${logit}, transformers has ${expected}`);
      });
    }
    model.free();
  }
});

test("a checkpoint reports its contents and memory needs", () => {
  const checkpoint = new Checkpoint(files(BUILT_IN, namesIn(BUILT_IN), "stories"));
  const found = JSON.parse(checkpoint.inspect());
  assert.equal(found.format, "gguf");
  assert.equal(found.parameters.unique, 6_708_480);
  const [asStored, q8] = [checkpoint.memory(), checkpoint.memory("q8")];
  assert.ok(q8 > 6_708_480 && q8 < asStored && asStored < 40_000_000, `${q8} ${asStored}`);
  let last = [0, 0];
  const model = checkpoint.load("q8", undefined, (done, total) => { last = [done, total]; });
  assert.ok(last[0] === last[1] && last[1] > 6_300_000, `${last}`);
  assert.equal(model.name, "stories");
  assert.equal(JSON.parse(model.config()).n_layer, 7);
  assert.throws(() => checkpoint.inspect(), /was consumed/);
  model.free();
  checkpoint.free();
  const stopped = new Checkpoint(files(BUILT_IN));
  assert.throws(() => stopped.load(undefined, undefined, () => { throw new Error("no more"); }), /interrupted/);
  stopped.free();
});

test("encoding and decoding round-trip", () => {
  const model = load(BUILT_IN);
  const text = "But soft, what light through yonder window breaks?";
  const ids = model.encode(text);
  assert.ok(ids instanceof Uint32Array && ids.length > 5);
  assert.equal(model.decode(ids), text);
  assert.deepEqual(JSON.parse(model.ask("tokenize", JSON.stringify({ content: text }))).tokens, [...ids]);
  assert.equal(JSON.parse(model.ask("v1/models")).data[0].id, "a model");
  assert.throws(() => model.decode(new Uint32Array([70_000])), /token 70000 is outside the vocabulary of 4096/);
  assert.throws(() => model.logits(new Uint32Array(513)), /512/);
  assert.throws(() => model.logits(new Uint32Array()), /tokens/);
  model.free();
});

test("analyses return results, and errors name the invalid parameter", () => {
  const model = load(BUILT_IN);
  const ask = (path, body) => JSON.parse(model.ask(path, JSON.stringify(body)));
  const ids = [...model.encode("But soft, what light")];
  assert.equal(ask("look/attention", { prompt: ids }).axes.length, 4);
  assert.equal(ask("look/lens", { prompt: ids, show: "entropy" }).values.length, 7 * ids.length);
  const head = ask("look/head", { prompt: ids, layer: 1, head: 2, key: 1 });
  assert.ok(Math.abs(head.products.reduce((sum, product) => sum + product, 0) * head.scale - head.scaled) < 1e-4);
  assert.ok(Math.abs(head.weights.reduce((sum, weight) => sum + weight, 0) - 1) < 1e-5);
  const next = ask("look/next", { prompt: ids, top_k: 3, top: 5 });
  assert.equal(next.kept, 3);
  assert.deepEqual(next.tokens.map((token) => token.probability > 0), [true, true, true, false, false]);
  const refused = (path, body) => {
    try {
      ask(path, body);
    } catch (error) {
      assert.ok(error instanceof Error);
      return [error.status, error.param, error.message.slice(0, 40)];
    }
    assert.fail(`${path} was not rejected`);
  };
  assert.deepEqual(refused("nothing", {}), [404, undefined, "path not found: nothing"]);
  assert.deepEqual(refused("look/head", { prompt: ids, layer: 9, head: 0 }).slice(0, 2), [400, "layer"]);
  assert.deepEqual(refused("v1/completions", { prompt: ids, temperature: 9 }).slice(0, 2), [400, "temperature"]);
  assert.deepEqual(refused("look/features", { prompt: ids })[0], 400);
  const folders = readdirSync(join(BUILT_IN, "transcoders")).sort().map((layer) => join(BUILT_IN, "transcoders", layer));
  const configs = folders.map((folder) => readFileSync(join(folder, "cfg.json"), "utf8"));
  const weights = folders.map((folder) => new Uint8Array(readFileSync(join(folder, "sae_weights.safetensors"))));
  assert.throws(() => model.set_transcoders(configs.slice(1), weights.slice(1)), Error);
  model.set_transcoders(configs, weights);
  assert.equal(ask("look/features", { prompt: ids, top: 2 }).values.length, 2 * weights.length * ids.length);
  assert.ok(ask("look/graph", { prompt: ids }).points.length > ids.length);
  assert.deepEqual(refused("v1/completions", { prompt: "ball ".repeat(600) }).slice(0, 2), [400, "prompt"]);
  model.free();
});

test("damaged, foreign and missing files are reported by name", () => {
  const whole = readFileSync(join(TINY, "model.safetensors"));
  const open = (changes) => {
    const input = new Files("mine");
    for (const name of namesIn(TINY)) {
      const bytes = name in changes ? changes[name] : readFileSync(join(TINY, name));
      if (bytes) input.add_bytes(name, bytes);
    }
    return new Checkpoint(input).load();
  };
  const cases = [
    [{ "model.safetensors": whole.subarray(0, 1000) }, /mine\/model\.safetensors/],
    [{ "model.safetensors": Buffer.from("<!doctype html>not found") }, /mine\/model\.safetensors/],
    [{ "model.safetensors": new Uint8Array() }, /mine\/model\.safetensors/],
    [{ "model.safetensors": null }, /mine/],
    [{ "config.json": Buffer.from("{") }, /mine\/config\.json/],
    [{ "config.json": Buffer.from('{"model_type": "llama"}') }, /mine\/config\.json.*llama/s],
    [{ "tokenizer.json": Buffer.from("[]") }, /mine\/tokenizer\.json/],
  ];
  for (const [changes, expected] of cases) assert.throws(() => open(changes), expected, JSON.stringify(Object.keys(changes)));
  const model = open({ "tokenizer.json": null });
  assert.throws(() => model.encode("a"), /tokenizer\.json/, "the missing file is named");
  const text = JSON.parse(model.ask("v1/completions", JSON.stringify({ prompt: [1, 2], max_tokens: 3, temperature: 0 })));
  assert.equal(text.usage.completion_tokens, 3);
  model.free();
  assert.throws(() => new Checkpoint(files(BUILT_IN)).load("q3"), /q3|f32, f16/);
  assert.equal(last_panic(), undefined);
});

test("a second completion ends the first, and an unfinished one can be freed", () => {
  const model = load(BUILT_IN);
  const start = () => model.start("v1/completions", JSON.stringify({ prompt: "A", max_tokens: 50, temperature: 0, stream: true }));
  const first = start();
  first.next();
  const second = start();
  assert.throws(() => first.next(), /another completion was started/);
  assert.equal(first.next(), undefined);
  first.free();
  second.next();
  second.free();
  assert.equal(generated(model, { prompt: "One day", max_tokens: 5, temperature: 0 }).length > 0, true);
  model.free();
});

test("a hundred loaded and freed models do not leak memory", () => {
  let half;
  for (let n = 0; n < 100; n++) {
    const model = load(BUILT_IN, n % 2 ? "q8" : undefined);
    generated(model, { prompt: "One day", max_tokens: 2, temperature: 0 });
    model.free();
    if (n === 49) half = memory.buffer.byteLength;
  }
  // Free memory may be fragmented; fifty leaked models would take 350 MB.
  assert.ok(memory.buffer.byteLength <= half + (4 << 20), `${half} ${memory.buffer.byteLength}`);
});

test("completions of published checkpoints match the program", { skip: !process.env.GPT2_CHECKPOINTS && "GPT2_CHECKPOINTS names no folder" }, () => {
  const folder = join(process.env.GPT2_CHECKPOINTS, "tarotble");
  const tokenizer = join(folder, "aitextgen.tokenizer.json");
  for (const weights of ["model.safetensors", "pytorch_model.bin"]) {
    const input = files(folder, ["config.json", weights]);
    input.add_bytes("tokenizer.json", readFileSync(tokenizer));
    const model = new Checkpoint(input).load();
    assertSameTexts(join(folder, weights), model, "The", ["--tokenizer", tokenizer]);
    assertSameLogits(join(folder, weights), model, model.encode("The cards are"));
    model.free();
  }
});

test("version() returns the package version", () => {
  assert.equal(version(), JSON.parse(readFileSync(join(PACKAGE, "package.json"))).version);
});
