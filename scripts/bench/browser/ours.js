import init, { Checkpoint, Files } from "/ours/gpt2.js";

export async function open(dtype) {
  await init();
  const files = new Files("gpt2-124m");
  for (const name of ["model.safetensors", "config.json", "tokenizer.json"]) {
    files.add_file(name, await (await fetch(`/checkpoint/${name}`)).blob());
  }
  const model = new Checkpoint(files).load(dtype);
  return (prompt, max_tokens, onToken) => {
    const request = { prompt, max_tokens, temperature: 0, ignore_eos: true, stream: true, logprobs: 0 };
    const completion = model.start("v1/completions", JSON.stringify(request));
    let text = "";
    for (let chunks = completion.next(); chunks !== undefined; chunks = completion.next()) {
      for (const chunk of chunks) {
        const [choice] = JSON.parse(chunk).choices;
        text += choice?.text ?? "";
        // A token may be an incomplete character, whose text arrives with the next token.
        for (const _ of choice?.logprobs?.tokens ?? []) onToken();
      }
    }
    return text;
  };
}
