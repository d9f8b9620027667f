import { AutoModelForCausalLM, AutoTokenizer, BaseStreamer, env } from "/peers/node_modules/@huggingface/transformers/dist/transformers.min.js";

const NAMES = { f32: "fp32", q8: "q8" };

class Counter extends BaseStreamer {
  constructor(onToken) {
    super();
    this.onToken = onToken;
    this.isPrompt = true;
  }
  put() {
    if (!this.isPrompt) this.onToken();
    this.isPrompt = false;
  }
  end() {}
}

export async function open(dtype) {
  env.allowRemoteModels = false;
  env.allowLocalModels = true;
  env.localModelPath = "/peers/";
  env.useBrowserCache = false;
  env.backends.onnx.wasm.wasmPaths = "/peers/node_modules/onnxruntime-web/dist/";
  env.backends.onnx.wasm.numThreads = 1;
  const tokenizer = await AutoTokenizer.from_pretrained("onnx");
  const model = await AutoModelForCausalLM.from_pretrained("onnx", { dtype: NAMES[dtype], device: "wasm" });
  return async (prompt, count, onToken) => {
    const inputs = tokenizer(prompt);
    const numbers = { max_new_tokens: count, min_new_tokens: count, do_sample: false };
    const ids = await model.generate({ ...inputs, ...numbers, streamer: new Counter(onToken) });
    return tokenizer.decode(ids.tolist()[0].slice(inputs.input_ids.dims[1]).map(Number));
  };
}
