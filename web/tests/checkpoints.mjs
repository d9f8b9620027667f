// Checkpoints for the tests: small ones with patterned weights, and large ones with only a header on disk.
import { closeSync, copyFileSync, ftruncateSync, mkdirSync, openSync, readFileSync, writeFileSync, writeSync } from "node:fs";
import { join } from "node:path";
import { ROOT } from "./support.mjs";

const TINY = join(ROOT, "crates/testing/fixtures/tiny-checkpoint");
// With these sizes, some matrices have a whole number of blocks in every precision, and some do not.
export const SIZES = { n_embd: 64, n_inner: 160, n_layer: 2, n_head: 4, n_positions: 96, n_ctx: 96, vocab_size: 300 };
export const XL = { n_embd: 1600, n_inner: null, n_layer: 48, n_head: 25, n_positions: 1024, n_ctx: 1024, vocab_size: 50257 };

// Returns the name and shape of each tensor in a checkpoint.
export function shapes({ n_embd, n_inner, n_layer, n_positions, vocab_size }) {
  const inner = n_inner ?? 4 * n_embd, all = [["wte.weight", [vocab_size, n_embd]], ["wpe.weight", [n_positions, n_embd]]];
  const norm = (name) => all.push([`${name}.weight`, [n_embd]], [`${name}.bias`, [n_embd]]);
  for (let layer = 0; layer < n_layer; layer++) {
    norm(`h.${layer}.ln_1`);
    norm(`h.${layer}.ln_2`);
    for (const [name, from, to] of [["attn.c_attn", n_embd, 3 * n_embd], ["attn.c_proj", n_embd, n_embd], ["mlp.c_fc", n_embd, inner], ["mlp.c_proj", inner, n_embd]]) {
      all.push([`h.${layer}.${name}.weight`, [from, to]], [`h.${layer}.${name}.bias`, [to]]);
    }
  }
  norm("ln_f");
  return all;
}

const count = (shape) => shape.reduce((product, size) => product * size, 1);

// Writes a file of f32 tensors; without `values`, writes only the header.
export function safetensors(path, tensors, values) {
  const header = {};
  let end = 0;
  for (const [name, shape] of tensors) header[name] = { dtype: "F32", shape, data_offsets: [end, end += 4 * count(shape)] };
  const text = Buffer.from(JSON.stringify(header)), length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  const file = openSync(path, "w");
  writeSync(file, Buffer.concat([length, text, ...(values ? tensors.map(([name, shape]) => values(name, shape)) : [])]));
  ftruncateSync(file, 8 + text.length + end);
  closeSync(file);
}

// Returns numbers around 0, or around 1 for layer norm weights.
function pattern(name, shape) {
  let state = [...name].reduce((sum, letter) => sum * 31 + letter.charCodeAt(0) >>> 0, 7);
  const isNorm = /ln_\w\.weight$/.test(name), scale = isNorm || name.endsWith("bias") ? 0.2 : name.startsWith("wte") ? 1 : 0.6;
  const values = Float32Array.from({ length: count(shape) }, () => {
    state = Math.imul(state, 1664525) + 1013904223 >>> 0;
    return (state / 2 ** 32 - 0.5) * scale + Number(isNorm);
  });
  return Buffer.from(values.buffer);
}

// Writes a checkpoint folder with these sizes and the tiny checkpoint's tokenizer; `tensors` sets its
// tensors' names and shapes.
export function checkpoint(folder, sizes = SIZES, tensors = shapes(sizes)) {
  mkdirSync(folder, { recursive: true });
  const config = JSON.parse(readFileSync(join(TINY, "config.json")));
  writeFileSync(join(folder, "config.json"), JSON.stringify({ ...config, ...sizes }));
  copyFileSync(join(TINY, "tokenizer.json"), join(folder, "tokenizer.json"));
  safetensors(join(folder, "model.safetensors"), tensors, sizes === XL ? null : pattern);
  return ["model.safetensors", "config.json", "tokenizer.json"].map((name) => join(folder, name));
}
