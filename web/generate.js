// @ts-check
// Generates completions: after the prompt, after the text, or several in parallel.
import { announce, newSeed } from "./parts/controls.js";
import { element, find } from "./parts/dom.js";
import { short } from "./parts/colors.js";
import { Tokens, tint } from "./parts/tokens.js";
import { drawText } from "./paper.js";
import { fields, seed } from "./settings.js";
import { NOTHING, emit, isFull, isStale, on, page, prompt } from "./state.js";
import { clearError, fail, rest, say } from "./status.js";
import { put, record } from "./undo.js";

/** @typedef {import("./types").Written} Written */
/**
 * One completion of a run.
 * @typedef {{ tokens: Tokens, added: string, ids: number[], finish?: string }} One
 */
/** @typedef {import("./types").Run & { from: Written, texts: One[], promptIds: number[], cards: any[], begun: number, first: number, last: number, frame: number }} Writing */

/** Ends the current run on the page. @param {any} [failure] */
export function settle(failure) {
  page.running = null;
  if (failure && !failure.stopped) fail(failure);
  else rest();
}

/** Stops the current run and keeps its output. */
export function halt() {
  if (!page.running) return;
  page.engine.stop();
  page.running.close(null);
}

/** Generates a new completion of the prompt. @param {string} [withSeed] */
export const write = withSeed => begin({ ...NOTHING, prompt: prompt.value }, prompt.value, withSeed);

/** Continues the text. If the prompt has changed, the text is tokenized again. */
export function goOn() {
  const { written } = page;
  if (!page.model || page.running || !written.text) return undefined;
  if (isStale() && written.isWhole) return write();
  const isKnown = !isStale() && written.ids.length > 0;
  return begin({ ...written, prompt: prompt.value, isByHand: true }, isKnown ? written.ids : prompt.value + written.text);
}

/**
 * Limits the length to the context of a server's model.
 * @param {any} asked
 * @param {string | number[]} body
 */
async function fit(asked, body) {
  if (!page.engine.isShared || !page.model) return;
  const count = typeof body === "string" ? (await page.engine.ask("tokenize", { prompt: body })).count : body.length;
  asked.max_tokens = Math.max(1, Math.min(asked.max_tokens, page.model.config.n_positions - count));
}

/**
 * Starts a run.
 * @param {Written} from the part of the text to keep
 * @param {string | number[]} body the text or ids that the model continues
 * @param {string} [withSeed] the seed if the field is empty; random by default
 */
export async function begin(from, body, withSeed) {
  if (!page.model) return;
  if (page.running) halt();
  clearError();
  /** @type {any} */
  let asked;
  try {
    asked = { seed: Number(withSeed ?? newSeed()), ...fields(), prompt: body, logprobs: 0, return_token_ids: true, stream: true };
  } catch (error) {
    fail(error);
    return;
  }
  record();
  page.lastSeed = String(asked.seed);
  const texts = Array.from({ length: asked.n ?? 1 }, () => ({ tokens: new Tokens(), added: "", ids: [] }));
  /** @type {Writing} */
  const run = { from, texts, promptIds: from.ids, cards: [], begun: performance.now(), first: 0, last: 0, frame: 0, close: failure => end(run, failure) };
  if (texts.length > 1) run.cards = texts.map((one, n) => card(run, one, n));
  find("texts").replaceChildren(...run.cards.map(one => one.node));
  find("numbers").textContent = "";
  if (!from.text) find("said").replaceChildren();
  page.running = run;
  page.written = from;
  drawText();
  say("writing");
  emit("text", false);
  let failure = null;
  try {
    await fit(asked, body);
    if (page.running !== run) return;
    await page.engine.stream("v1/completions", asked, chunk => { if (page.running === run) hear(run, chunk); });
  } catch (error) {
    failure = error;
  }
  if (page.running === run) end(run, failure);
}

/** @param {Writing} run @param {any} chunk */
function hear(run, chunk) {
  for (const choice of chunk.choices) {
    const one = run.texts[choice.index];
    run.last = performance.now();
    run.first ||= run.last;
    one.added += choice.text;
    one.tokens.take(choice.logprobs);
    one.ids.push(...choice.token_ids ?? []);
    one.finish ??= choice.finish_reason;
    if (choice.prompt_token_ids) run.promptIds = choice.prompt_token_ids;
  }
  run.frame ||= requestAnimationFrame(() => show(run, false));
}

/** @type {(one: One, place: number) => import("./types").Piece[]} */
const piecesOf = (one, place) => one.tokens.pieces(one.added, one.tokens.lists.text_offset[0] ?? 0, place);

/** Returns the whole text after one completion of a run. @type {(run: Writing, one: One) => Written} */
function textOf({ from, promptIds }, one) {
  return {
    ...from, text: from.text + one.added, pieces: from.pieces.concat(piecesOf(one, from.text.length)), ids: promptIds.concat(one.ids),
    promptIds: from.text ? from.promptIds : promptIds.length, seed: page.lastSeed,
  };
}

/** Shows the output of a run so far. @type {(run: Writing, isEnd: boolean) => void} */
function show(run, isEnd) {
  cancelAnimationFrame(run.frame);
  run.frame = 0;
  for (const one of run.cards) one.draw();
  if (!run.cards.length) page.written = textOf(run, run.texts[0]);
  drawText();
  announce(find("said"), run.texts.map(one => run.from.text + one.added), isEnd);
  emit("text", isEnd);
}

/** @param {Writing} run @param {any} failure */
function end(run, failure) {
  page.running = null;
  show(run, true);
  find("numbers").textContent = inWords(run);
  settle(failure);
}

/** Finish reasons in words. @type {Record<string, string>} */
const ENDS = { length: "ended at the maximum length or the end of the context", stop: "ended at the end-of-text token or a stop string" };

/** Describes the speed of a run in words. @param {Writing} run */
function inWords(run) {
  const count = run.texts.reduce((sum, one) => sum + one.tokens.count, 0);
  if (!run.first) return "";
  const seconds = (run.last - run.begun) / 1000, wait = run.first - run.begun;
  // Averages over the whole time, because chunks of a short completion arrive together and reveal nothing
  // about the model's speed.
  const pace = count / seconds;
  return [`${count} new ${count === 1 ? "token" : "tokens"}`, `${short(pace)} tokens/s`, `first after ${wait < 1000 ? `${short(Math.round(wait))} ms` : `${short(wait / 1000)} s`}`,
    run.texts.length === 1 && ENDS[run.texts[0].finish ?? ""], `seed ${page.lastSeed}`].filter(Boolean).join(" · ");
}

/**
 * A card for one of several completions, which the user can adopt.
 * @type {(run: Writing, one: One, n: number) => { node: any, draw(): void }}
 */
function card(run, one, n) {
  const words = element("p");
  const taken = element("button", {
    type: "button",
    onclick() {
      halt();
      record();
      put(textOf(run, one));
      prompt.focus();
    },
  }, "Use this one");
  taken.dataset.testid = `take-${n}`;
  return {
    node: element("article", { ariaLabel: `completion ${n + 1}` }, words, taken),
    draw() {
      words.replaceChildren(...piecesOf(one, 0).map(piece => {
        const span = element("span", {}, one.added.slice(piece.start, piece.end));
        tint(span, piece);
        return span;
      }));
    },
  };
}

find("write").onclick = () => write();
find("stop").onclick = () => page.loading ? page.engine.cancel?.() : halt();
find("go-on").onclick = goOn;
find("keep-seed").onclick = () => {
  seed.value = page.lastSeed;
  emit("prompt");
};
on("busy", () => {
  find("stop").disabled = !page.running && !page.loading;
  find("write").disabled = !page.model;
  find("go-on").disabled = !page.model || page.running !== null || !page.written.text || isFull(page.written.ids);
  find("keep-seed").disabled = !page.lastSeed;
});
