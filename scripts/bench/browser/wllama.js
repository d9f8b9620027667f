import { LoggerWithoutDebug, Wllama } from "/peers/node_modules/@wllama/wllama/esm/index.min.js";

const FILES = { f32: "gpt2-f32.gguf", f16: "gpt2-f16.gguf", q8: "gpt2-q8_0.gguf", q4: "gpt2-q4_0.gguf" };

// With quantized weights, the random model may generate invalid UTF-8, which makes wllama fail. Then a bias
// makes every token the letter a.
const LETTER = 64;

export async function open(dtype) {
  const logit_bias = dtype === "f32" ? {} : { [LETTER]: 1000 };
  const wllama = new Wllama({ default: "/peers/node_modules/@wllama/wllama/esm/wasm/wllama.wasm" }, { suppressNativeLog: true, logger: LoggerWithoutDebug });
  const file = await (await fetch(`/peers/${FILES[dtype]}`)).blob();
  await wllama.loadModel([file], { n_threads: 1, n_gpu_layers: 0, n_ctx: 1024, n_parallel: 1, n_batch: 512 });
  return async (prompt, max_tokens, onToken) => {
    const request = { prompt, max_tokens, temperature: 0, temp: 0, top_k: 1, ignore_eos: true, stream: true, cache_prompt: false, logit_bias };
    let text = "";
    for await (const chunk of await wllama.createCompletion(request)) {
      text += chunk.choices[0]?.text ?? "";
      if (chunk.choices[0]?.finish_reason === null) onToken();
    }
    return text;
  };
}
