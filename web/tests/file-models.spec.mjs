// The user's own models: every format, every precision, and helpful messages for rejected files.
import { copyFileSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { SIZES, XL, checkpoint, safetensors, shapes } from "./checkpoints.mjs";
import { PROGRAM, ROOT, expect, printed, test } from "./support.mjs";

// Checks that the page's completions equal the program's; the displayed command runs in this folder.
async function expectTexts(gpt2, folder) {
  await gpt2.greedily("The dog", 30);
  expect(printed(await gpt2.text("command"), folder)).toBe(`${await gpt2.text()}\n`);
  await gpt2.generate({ greedy: false, seed: 3, temperature: 0.9, "top-k": 40 });
  expect(printed(await gpt2.text("command"), folder)).toBe(`${await gpt2.text()}\n`);
}

// Chooses files and waits until the page describes or rejects them.
async function take(gpt2, files, input = "model-file") {
  await gpt2.page.evaluate(() => { for (const id of ["memory", "error"]) document.getElementById(id).textContent = ""; });
  await gpt2.at(input).setInputFiles(files);
  await expect.poll(async () => await gpt2.text("memory") !== "" || (await gpt2.text("error")) !== "").toBe(true);
}

test("a checkpoint generates the program's text in every precision", async ({ gpt2 }, info) => {
  const files = checkpoint(info.outputPath("own"));
  await take(gpt2, files);
  await gpt2.ready();
  await expect(gpt2.at("memory")).toHaveText(/^model\.safetensors.* kB/);
  for (const dtype of ["", "f32", "f16", "q8", "q4"]) {
    await gpt2.set({ dtype });
    await gpt2.ready();
    await expectTexts(gpt2, dirname(files[0]));
  }
  await gpt2.click("built-in");
  await gpt2.ready();
  await expect(gpt2.at("about")).toContainText("short stories");
});

test("a model folder can be chosen or dropped", async ({ gpt2 }, info) => {
  const [chosen, dropped] = ["chosen", "dropped"].map((name) => dirname(checkpoint(info.outputPath(name))[0]));
  await take(gpt2, chosen, "model-folder");
  await gpt2.ready();
  await expectTexts(gpt2, dirname(chosen));
  const devtools = await gpt2.page.context().newCDPSession(gpt2.page);
  const data = { items: [], files: [dropped], dragOperationsMask: 1 };
  for (const type of ["dragEnter", "dragOver", "drop"]) await devtools.send("Input.dispatchDragEvent", { type, x: 50, y: 50, data });
  await expect(gpt2.at("about")).toHaveText(/^dropped/);
  await gpt2.ready();
  await expectTexts(gpt2, dirname(dropped));
});

test("SentencePiece models and vocab.txt work as tokenizers", async ({ gpt2 }, info) => {
  for (const [fixture, name, vocab_size] of [["bpe.model", "spiece.model", 320], ["cased/vocab.txt", "vocab.txt", 41]]) {
    const folder = info.outputPath(`with ${name}`);
    rmSync(checkpoint(folder, { ...SIZES, vocab_size })[2]);
    copyFileSync(join(ROOT, "crates/testing/fixtures/tokenizers", fixture), join(folder, name));
    await take(gpt2, folder, "model-folder");
    await gpt2.ready();
    await expectTexts(gpt2, dirname(folder));
    expect((await gpt2.text()).trim()).not.toBe("");
  }
});

test("GGUF and PyTorch files are loaded", async ({ gpt2 }, info) => {
  const [weights] = checkpoint(info.outputPath("own")), gguf = info.outputPath("my own.gguf");
  printed(`'${PROGRAM}' convert '${dirname(weights)}' '${gguf}' --dtype q8_0`);
  await take(gpt2, [gguf]);
  await gpt2.ready();
  await expectTexts(gpt2, dirname(gguf));
  const fixtures = join(ROOT, "crates/testing/fixtures"), folder = info.outputPath("pytorch");
  mkdirSync(folder);
  const files = ["formats/pytorch-zip/pytorch_model.bin", "formats/pytorch-zip/config.json", "tiny-checkpoint/tokenizer.json"].map((path) => {
    copyFileSync(join(fixtures, path), join(folder, basename(path)));
    return join(folder, basename(path));
  });
  await take(gpt2, files);
  await gpt2.ready();
  await gpt2.greedily("a", 12);
  expect(printed(await gpt2.text("command"), folder)).toBe(`${await gpt2.text()}\n`);
});

// Checks that the page rejects these files with a message that contains these words, and generates as before.
async function expectRejected(gpt2, files, ...words) {
  const before = await gpt2.generate({ seed: 5 });
  await take(gpt2, files);
  await gpt2.error(/./);
  for (const word of words) await expect(gpt2.at("error")).toContainText(word);
  expect(await gpt2.generate()).toBe(before);
}

test("unreadable files are reported, and the page keeps working", async ({ gpt2 }, info) => {
  const [weights, config, tokenizer] = checkpoint(info.outputPath("own"));
  const file = (name, bytes) => {
    writeFileSync(info.outputPath(name), bytes);
    return info.outputPath(name);
  };
  const bytes = readFileSync(weights);
  // A truncated file, a file that is not a checkpoint, and a checkpoint of another kind of model.
  await expectRejected(gpt2, [file("damaged.safetensors", bytes.subarray(0, bytes.length / 2)), config, tokenizer], "damaged.safetensors");
  await expectRejected(gpt2, [file("photo.bin", "\x89PNG\r\n\x1a\n and so on, for some bytes more")], "photo.bin");
  const bert = checkpoint(info.outputPath("bert"), undefined, [["bert.encoder.layer.0.attention.self.query.weight", [8, 8]]]);
  await expectRejected(gpt2, [bert[0], bert[1], tokenizer], "model.safetensors", "`wte.weight` is missing", " more");
  await take(gpt2, [bert[0], bert[1], tokenizer]);
  await expect(gpt2.find("#error-lines")).toContainText("`bert.encoder.layer.0.attention.self.query.weight` is unexpected");
  // An invalid tokenizer, a configuration for another model, and NaN weights.
  await expectRejected(gpt2, [weights, config, file("no.tokenizer.json", '{"version": "1.0"}')], "a vocabulary or another file");
  const other = checkpoint(info.outputPath("other"), { ...JSON.parse(readFileSync(config)), n_embd: 24, n_head: 3 }, []);
  await expectRejected(gpt2, [weights, other[1], tokenizer], "model.safetensors", "wte.weight", " more");
  const nan = Buffer.from(bytes);
  nan.writeFloatLE(NaN, nan.length - 4);
  await take(gpt2, [file("nan.safetensors", nan), config, tokenizer]);
  await gpt2.error(/not finite/);
  await gpt2.click("built-in");
  await gpt2.ready();
  // The message names missing files; a file chosen later completes the selection.
  await expectRejected(gpt2, [weights, tokenizer], "config.json");
  await expectRejected(gpt2, [weights, config], "tokenizer.json");
  await take(gpt2, [tokenizer]);
  await gpt2.ready();
  await expect(gpt2.at("about")).toHaveText(/^model\.safetensors/);
});

test("models that do not fit into memory are rejected with their size", async ({ gpt2 }, info) => {
  const all = shapes(XL), half = all.length >> 1;
  // A single file larger than WebAssembly can address.
  const [one, config, tokenizer] = checkpoint(info.outputPath("xl"), XL);
  await expectRejected(gpt2, [one, config, tokenizer], "6230498835 bytes", "q8");
  // Shards that can be read, but do not fit into memory in their stored precision.
  const names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
  const parts = [all.slice(0, half), all.slice(half)], shards = names.map((name) => info.outputPath(name)), index = info.outputPath("model.safetensors.index.json");
  parts.forEach((tensors, n) => safetensors(shards[n], tensors));
  writeFileSync(index, JSON.stringify({ weight_map: Object.fromEntries(parts.flatMap((tensors, n) => tensors.map(([name]) => [name, names[n]]))) }));
  await expectRejected(gpt2, [...shards, index, config, tokenizer], "7.6 GB", "q8 (");
  await expect(gpt2.at("memory")).toHaveText(/1\.56 billion .*q8/);
});
