// @ts-check
// The probability of a text, and its number of tokens.
import { short } from "./parts/colors.js";
import { find } from "./parts/dom.js";
import { Tokens } from "./parts/tokens.js";
import { halt, settle } from "./generate.js";
import { length } from "./settings.js";
import { on, page, prompt, wholeText } from "./state.js";
import { clearError, say } from "./status.js";
import { put, record } from "./undo.js";

// Milliseconds without typing before the tokens of a text are counted.
const TYPED_MS = 300;

/** Colors the prompt and the text by the probability of each token. */
export async function score() {
  if (!page.model) return;
  halt();
  clearError();
  const text = wholeText(), run = page.running = { close: settle };
  say("scoring");
  let failure = null;
  try {
    if (!text) throw new Error("there is no text to score; write something first");
    const body = { prompt: text, max_tokens: 0, echo: true, logprobs: 0, return_token_ids: true };
    const [{ logprobs, prompt_token_ids: ids }] = (await page.engine.ask("v1/completions", body)).choices;
    if (page.running !== run) return;
    const tokens = new Tokens();
    tokens.take(logprobs);
    record();
    put({ prompt: prompt.value, text, pieces: tokens.pieces(text, 0, 0), ids, promptIds: 0, isByHand: true, isWhole: true });
    const [mean, count] = tokens.mean;
    find("numbers").textContent = count
      ? `perplexity ${short(Math.exp(-mean))} · ${short(-mean / Math.LN2)} bits per token, over ${count} tokens`
      : "a single token has no probability";
  } catch (error) {
    failure = error;
  }
  if (page.running === run) settle(failure);
}

// ---- The number of tokens

let counting = 0, tokens = NaN;

async function count() {
  const place = find("count"), text = wholeText();
  if (!page.model) return;
  try {
    const answer = await page.engine.ask("tokenize", { prompt: text });
    if (text !== wholeText()) return;
    tokens = answer.count;
    place.textContent = `${tokens} of ${page.model.config.n_positions} tokens`;
  } catch {
    // The error is not shown; the next request for text reports it.
    place.textContent = "";
    tokens = NaN;
  }
  showRoom();
}

function showRoom() {
  const left = (page.model?.config.n_positions ?? NaN) - tokens;
  find("room").textContent = left < 0 ? `${-left} too many` : left < length() ? `${left} more fit` : "";
}

const countSoon = () => {
  clearTimeout(counting);
  if (!page.running) counting = setTimeout(count, TYPED_MS);
};

find("score").onclick = score;
on("busy", () => { find("score").disabled = !page.model; });
on("prompt", () => { showRoom(); countSoon(); });
on("text", isEnd => { if (isEnd) countSoon(); });
on("model", countSoon);
