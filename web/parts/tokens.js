// @ts-check
// The tokens of a text: where each is, how surprising it is, and its alternatives.
//
// The model counts characters (code points), a string here counts UTF-16 units. Tokens that hold a part of a character come as
// `bytes:\xe9\x80` and share the offset of that character: together they are one piece.
import { bars } from "./bars.js";
import { colour, fill, percentOf } from "./colors.js";
import { element } from "./dom.js";
import { scaleBar } from "./heatmap.js";

/** @typedef {import("../types").Piece} Piece */

const BYTES = /^bytes:((?:\\x[0-9a-f]{2})+)$/;
/** The token that ends a text. */
export const END = "<|endoftext|>";
// The strongest color: one in 4,096.
const TOP_BITS = 12;

/** The text of a token, or null where it is a part of a character alone. @type {(token: string) => string | null} */
const textOf = token => BYTES.test(token) ? null : token;

/** A token with spaces and line ends visible, and bytes in hex. @param {string} token */
export function shown(token) {
  const bytes = BYTES.exec(token);
  return bytes ? bytes[1] : token.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

/** The lists of `logprobs`, which grow while chunks arrive. */
export class Tokens {
  /** @type {import("../types").Logprobs} */
  lists = { tokens: [], token_logprobs: [], text_offset: [] };

  /** @param {Partial<import("../types").Logprobs>} [logprobs] */
  take(logprobs) {
    this.lists.tokens.push(...logprobs?.tokens ?? []);
    this.lists.token_logprobs.push(...logprobs?.token_logprobs ?? []);
    this.lists.text_offset.push(...logprobs?.text_offset ?? []);
  }

  get count() {
    return this.lists.tokens.length;
  }

  /** The mean of the known log probabilities, and their count. @returns {[number, number]} */
  get mean() {
    const known = /** @type {number[]} */ (this.lists.token_logprobs.filter(logprob => logprob !== null));
    return [known.reduce((sum, logprob) => sum + logprob, 0) / known.length, known.length];
  }

  /**
   * The pieces of a text.
   * @param {string} text
   * @param {number} first the offset of its first character in the model's text
   * @param {number} place the place of its first character here
   */
  pieces(text, first, place) {
    const { tokens, token_logprobs, text_offset } = this.lists;
    const units = [place];
    for (const character of text) units.push(units[units.length - 1] + character.length);
    const at = (/** @type {number} */ offset) => units[Math.max(0, Math.min(offset - first, units.length - 1))];
    /** @type {Piece[]} */
    const pieces = [];
    tokens.forEach((token, n) => {
      const [start, end] = [at(text_offset[n]), at(text_offset[n + 1] ?? Infinity)];
      const one = { token, logprob: token_logprobs[n] };
      const last = pieces.at(-1);
      if (last && last.start === start && last.offset === text_offset[n] && textOf(token) === null) {
        last.tokens.push(one);
        last.end = end;
      } else {
        pieces.push({ start, end, offset: text_offset[n], tokens: [one] });
      }
    });
    return pieces;
  }
}

/** The log probability of a piece, null where it has none. @param {Pick<Piece, "tokens">} piece */
const logprobOf = piece => piece.tokens.reduce((/** @type {number | null} */ sum, one) => sum === null || one.logprob === null ? null : sum + one.logprob, 0);

/** The surprise of a piece in bits; NaN for a piece without a probability. @param {Pick<Piece, "tokens">} piece */
export function bits(piece) {
  const logprob = logprobOf(piece);
  return logprob === null ? NaN : Math.abs(logprob / Math.LN2);
}

/** @type {(bits: number) => string} */
export const bitsText = bits => bits >= 9.95 ? bits.toFixed(0) : bits.toFixed(1);

/** A log probability as a percentage. @type {(logprob: number) => string} */
export const percent = logprob => percentOf(Math.exp(logprob));

/** A piece in words. @param {Piece} piece @param {string} text */
export function told(piece, text) {
  const logprob = logprobOf(piece), name = shown(text || piece.tokens[0].token);
  return logprob === null ? name : `${name}: ${percent(logprob)}, ${bitsText(bits(piece))} bits of surprise`;
}

/** Colors an element by the surprise of a piece. @param {HTMLElement} node @param {Pick<Piece, "tokens">} piece */
export function tint(node, piece) {
  const value = bits(piece);
  fill(node, isNaN(value) ? null : colour(value, "amount", TOP_BITS));
}

/** The legend of surprise. @param {HTMLElement} place */
export function surpriseScale(place) {
  scaleBar(place, "amount", TOP_BITS);
  place.prepend(element("span", {}, "expected"));
  place.append(element("span", {}, "bits, a surprise"));
}

/**
 * A list of tokens to choose one from. If it has the focus it keeps it when it is drawn anew.
 * @param {HTMLElement} list
 * @param {string} name
 * @param {{ token: string, share: number, text: string }[]} ones `share` is the length of the bar, `text` follows its number
 * @param {number} chosen the place of the present one, or -1
 * @param {((one: any) => void) | null} onTake
 */
export function alternatives(list, name, ones, chosen, onTake) {
  const usable = (/** @type {{ token: string }} */ one) => textOf(one.token) !== null;
  const children = () => /** @type {HTMLElement[]} */ ([...list.children]);
  const focused = children().indexOf(/** @type {HTMLElement} */ (document.activeElement));
  const view = { columns: ones.map(one => shown(one.token)), values: ones.map(one => one.share), texts: ones.map(one => one.text), scale: "share", top: 1, name };
  const drawn = bars(list, view, n => drawn.choose(n), n => { if (onTake && usable(ones[n])) onTake(ones[n]); });
  children().forEach((line, n) => line.ariaDisabled = String(!onTake || !usable(ones[n])));
  const current = Math.min(focused < 0 ? chosen : focused, ones.length - 1);
  drawn.choose(current);
  if (focused >= 0) children()[current]?.focus();
  else if (current < 0 && ones.length) children()[0].tabIndex = 0;
}
