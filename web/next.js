// @ts-check
// Candidates for the next token, and alternatives to generated tokens.
import { paced, popup, released } from "./parts/controls.js";
import { element, find } from "./parts/dom.js";
import { END, alternatives, percent, told } from "./parts/tokens.js";
import { begin, halt } from "./generate.js";
import { currentPiece, goTo, paper, pieceAt, placeOf } from "./paper.js";
import { sampling } from "./settings.js";
import { NOTHING, isCurrent, isFull, on, page, prompt } from "./state.js";
import { fail } from "./status.js";
import { put, record } from "./undo.js";
import { explain, mostExplained } from "./views.js";

/** @typedef {import("./types").Candidate} Candidate */
/** @typedef {import("./types").Written} Written */

// Number of tokens in the bars under the text and in the box next to a token.
const BARS = 8, CHOICES = 20;
// Milliseconds that the pointer rests on a token before its alternatives open, and until they close.
const POINTED_MS = 150, LEFT_MS = 300;
// Milliseconds without typing before a request is sent to a server.
const TYPED_MS = 300;

// ---- Requests and answers

/**
 * Returns the most probable next tokens after ids or a text, under the current settings.
 * @param {string | number[]} after
 * @param {number} top
 * @returns {Promise<import("./types").NextLook>}
 */
const next = (after, top) => {
  const own = typeof after === "string" ? {} : { prompt_tokens: Math.min(page.written.promptIds, after.length) };
  return page.engine.ask("look/next", { ...sampling(), ...own, prompt: after, top });
};
/**
 * Formats a candidate as a bar, with a note if the settings change its probability.
 * @param {Candidate} one
 */
const bar = one => {
  const before = percent(one.logprob), isSame = Math.abs(Math.exp(one.logprob) - one.probability) < 0.05 * one.probability;
  return { ...one, share: one.probability, text: isSame ? "" : one.probability ? `before settings ${before}` : `left out; before settings ${before}` };
};
const keptOf = (/** @type {import("./types").NextLook} */ look) => look.kept === 1 ? "These settings leave one token." : `These settings leave ${look.kept} tokens to sample from.`;

/**
 * Cuts the text before a piece, inserts another token and continues, unless it is the end of text.
 * @type {(from: Written, n: number, ids: number[], one: Candidate) => void}
 */
function take(from, n, ids, one) {
  choices.hide();
  halt();
  const before = from.pieces.slice(0, n), start = before.at(-1)?.end ?? 0;
  const text = one.token === END ? "" : one.token;
  const piece = { start, end: start + text.length, tokens: [{ token: one.token, logprob: one.logprob }] };
  const cut = {
    ...from, prompt: from.prompt ?? prompt.value, text: from.text.slice(0, start) + text, pieces: [...before, piece],
    ids: [...ids, one.id], isByHand: true,
  };
  find("said").replaceChildren();
  if (one.token !== END && !isFull(cut.ids)) {
    begin(cut, cut.ids);
    goTo(n);
    return;
  }
  record();
  put(cut);
}

/** Starts a text with a token chosen right after the prompt. @param {Candidate} one */
async function takeFirst(one) {
  const text = prompt.value;
  try {
    const { tokens } = await page.engine.ask("tokenize", { prompt: text });
    take({ ...NOTHING, prompt: text, ids: tokens, promptIds: tokens.length }, 0, tokens, one);
  } catch (error) {
    fail(error);
  }
}

// ---- Alternatives of a token

const choices = popup(find("choices"), node => goTo(Math.max(0, placeOf(node))));
/** @type {{ n: number, piece: import("./types").Piece, list: any, kept: any, ids: number[], isPinned: boolean } | null} */
let open = null;
const isOpen = () => !find("choices").hidden;

/**
 * Returns the ids before the n-th piece: the ids of the prompt and of the preceding pieces.
 * @param {number} n
 */
function idsBefore(n) {
  const { written } = page, tokens = written.pieces.slice(0, n).reduce((sum, piece) => sum + piece.tokens.length, 0);
  return written.ids.slice(0, written.promptIds + tokens);
}

/** @type {(n: number, isByKey?: boolean, isPointed?: boolean) => Promise<void>} */
async function openChoices(n, isByKey, isPointed) {
  const at = pieceAt(n);
  const ids = idsBefore(n);
  // The first token of a scored text has no preceding tokens.
  if (!page.model || !at || !ids.length) return;
  const { piece, node, text } = at, list = element("div"), kept = element("p", { className: "quiet" });
  const close = element("button", { type: "button", ariaLabel: "close", onclick() { choices.hide(); goTo(n); } }, "×");
  const why = element("button", { type: "button", hidden: ids.length > mostExplained(), onclick() { choices.hide(); explain(ids, page.written.ids[ids.length]); } }, "Explain this token");
  why.title = "The attribution graph of this prediction";
  why.dataset.testid = "explain";
  choices.show(node, element("header", {}, element("p", {}, told(piece, text)), why, close), list, kept);
  open = { n, piece, list, kept, ids, isPinned: !isPointed };
  await moveChoices(true);
  if (open?.list !== list || !isOpen()) return;
  choices.place();
  if (isByKey) (list.querySelector("[tabindex='0']") ?? close).focus();
}

/** Updates the box after a change to the settings. */
const moveChoices = paced(async () => {
  if (!open || !isOpen()) return;
  const { n, piece, list, kept, ids } = open, from = page.written;
  try {
    const look = await next(ids, CHOICES);
    await released(find("choices"));
    if (open?.list !== list) return;
    const present = look.tokens.findIndex(one => one.token === piece.tokens[0].token);
    alternatives(list, "alternatives; Enter continues from one", look.tokens.map(bar), Math.max(0, present), one => take(from, n, ids, one));
    kept.textContent = `${keptOf(look)} Choose one, and the text continues from it.`;
  } catch (error) {
    kept.textContent = /** @type {Error} */ (error).message;
  }
});

// Resting the mouse on a token opens its alternatives until the mouse leaves. After a click or a key press,
// they stay open.
let pointed = 0;
/** @param {number} [ms] @param {() => void} [act] */
function pointLater(ms, act) {
  clearTimeout(pointed);
  if (act) pointed = setTimeout(() => { if (!page.running && !(isOpen() && open?.isPinned)) act(); }, ms);
}
const leave = () => pointLater(LEFT_MS, choices.hide);
paper.addEventListener("click", (/** @type {MouseEvent} */ event) => {
  const n = placeOf(event.target);
  if (n < 0) return;
  goTo(n);
  pointLater();
  openChoices(n);
});
paper.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
  const isOpening = event.key === "Enter" && !event.ctrlKey && !event.metaKey || event.key === " " || event.key === "ArrowDown" && event.altKey;
  if (!isOpening || !pieceAt(currentPiece())) return;
  event.preventDefault();
  openChoices(currentPiece(), true);
});
// Ignores tokens that move under a resting mouse.
let under = -1;
paper.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
  const n = placeOf(event.target);
  if (event.pointerType !== "mouse" || event.buttons || n === under) return;
  under = n;
  if (n < 0) leave();
  else pointLater(POINTED_MS, () => openChoices(n, false, true));
});
paper.addEventListener("pointerleave", () => { under = -1; leave(); });
find("choices").addEventListener("pointerenter", () => pointLater());
find("choices").addEventListener("pointerleave", leave);
addEventListener("pointerdown", event => {
  // The box depends on the settings, so it stays open while the user changes them.
  if (isOpen() && !(/** @type {HTMLElement} */ (event.target)).closest("#choices, #settings, #sliders, #text span")) choices.hide();
});
addEventListener("keydown", event => { if (event.key === "Escape") choices.hide(); });
addEventListener("resize", choices.hide);

// ---- The bars

const moveNext = paced(async () => {
  if (!page.model) return;
  const from = page.written, isText = isCurrent();
  if (!isText && !prompt.value) {
    find("next").replaceChildren();
    find("next-about").textContent = "Write a prompt to see the model's first choices.";
    return;
  }
  try {
    const look = await next(isText ? from.ids : prompt.value, BARS);
    await released(find("next"));
    const onTake = (/** @type {Candidate} */ one) => isText ? take(from, from.pieces.length, from.ids, one) : takeFirst(one);
    alternatives(find("next"), "what comes next; Enter continues with it", look.tokens.map(bar), -1, page.running ? null : onTake);
    find("next-about").textContent = `After the ${isText ? "text" : "prompt"} above. ${keptOf(look)} Choose one to continue with it.`;
  } catch (error) {
    find("next").replaceChildren();
    find("next-about").textContent = isFull(from.ids) ? "The model's context is full." : /** @type {Error} */ (error).message;
  }
});

let typing = 0;
on("prompt", () => {
  if (page.running || !page.model) return;
  clearTimeout(typing);
  const move = () => { moveNext(true); moveChoices(true); };
  if (page.engine.isShared) typing = setTimeout(move, TYPED_MS);
  else move();
});
// With a server, the bars are updated only at the end of a completion.
on("text", isEnd => {
  if (!isEnd) choices.hide();
  if (isEnd || !page.engine.isShared) moveNext(isEnd);
});
on("model", () => moveNext(true));
on("colors", () => moveNext(true));
