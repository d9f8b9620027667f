// Measures one engine. Each engine is a module with
//   open(dtype) -> generate(prompt, newTokens, onToken) -> the generated text, greedy, without end of text
// `generate` calls `onToken` after each new token.
const { engine, dtype, prefill, decode } = Object.fromEntries(new URLSearchParams(location.search));
const promptTokens = Number(prefill);
const newTokens = Number(decode);

// The checkpoint's tokenizer has bytes and byte pairs, but no pair with a leading space, so each word has two
// tokens. After these letters its random weights generate text; wllama fails at invalid UTF-8.
const WARM_UP = "u";
const MEASURED = "k";
const promptOf = (letter) => ` ${letter}`.repeat(promptTokens / 2);

async function measured(generate, letter) {
  const times = [performance.now()];
  const text = await generate(promptOf(letter), newTokens + 1, () => times.push(performance.now()));
  if (times.length !== newTokens + 2) throw new Error(`${times.length - 1} tokens instead of ${newTokens + 1}`);
  const seconds = (from, to) => (times[to] - times[from]) / 1000;
  return { prefill: promptTokens / seconds(0, 1), decode: newTokens / seconds(1, newTokens + 1), text };
}

try {
  const start = performance.now();
  const { open } = await import(`./${engine}.js`);
  const generate = await open(dtype);
  const load = (performance.now() - start) / 1000;
  await measured(generate, WARM_UP);
  postMessage({ load, ...(await measured(generate, MEASURED)) });
} catch (error) {
  postMessage({ error: String(error?.stack ?? error) });
}
