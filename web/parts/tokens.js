// @ts-check
// Tokens of a text: their positions, their surprise and their alternatives.
//
// The model counts characters (code points), but JavaScript strings count UTF-16 units. Tokens that contain
// part of a character arrive as `bytes:\xe9\x80` and share the offset of that character; together they form
// one piece.
import { bars } from "./bars.js";
import { color, fill, percentOf } from "./colors.js";
import { element } from "./dom.js";
import { scaleBar } from "./heatmap.js";

/** @typedef {import("../types").Piece} Piece */

const BYTES = /^bytes:((?:\\x[0-9a-f]{2})+)$/;
/** The end-of-text token. */
export const END = "<|endoftext|>";
// Number of bits with the strongest color: a probability of one in 4,096.
const TOP_BITS = 12;

/**
 * Returns the text of a token, or null if it is part of a character.
 * @type {(token: string) => string | null}
 */
const textOf = token => BYTES.test(token) ? null : token;

/** Makes spaces and line ends of a token visible; bytes are shown in hex. @param {string} token */
export function shown(token) {
  const bytes = BYTES.exec(token);
  return bytes ? bytes[1] : token.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

/** Lists of `logprobs`, which grow as chunks arrive. */
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

  /** Returns the mean of the known log-probabilities, and their count. @returns {[number, number]} */
  get mean() {
    const known = /** @type {number[]} */ (this.lists.token_logprobs.filter(logprob => logprob !== null));
    return [known.reduce((sum, logprob) => sum + logprob, 0) / known.length, known.length];
  }

  /**
   * Splits a text into pieces.
   * @param {string} text
   * @param {number} first the offset of its first character in the model's text
   * @param {number} place the index of its first character in this page's text
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

/** Returns the log-probability of a piece, null if unknown. @param {Pick<Piece, "tokens">} piece */
const logprobOf = piece => piece.tokens.reduce((/** @type {number | null} */ sum, one) => sum === null || one.logprob === null ? null : sum + one.logprob, 0);

/**
 * Returns the surprise of a piece in bits; NaN for a piece without a probability.
 * @param {Pick<Piece, "tokens">} piece
 */
export function bits(piece) {
  const logprob = logprobOf(piece);
  return logprob === null ? NaN : Math.abs(logprob / Math.LN2);
}

/** @type {(bits: number) => string} */
export const bitsText = bits => bits >= 9.95 ? bits.toFixed(0) : bits.toFixed(1);

/** Formats a log-probability as a percentage. @type {(logprob: number) => string} */
export const percent = logprob => percentOf(Math.exp(logprob));

/** Describes a piece in words. @param {Piece} piece @param {string} text */
export function told(piece, text) {
  const logprob = logprobOf(piece), name = shown(text || piece.tokens[0].token);
  return logprob === null ? name : `${name}: ${percent(logprob)}, ${bitsText(bits(piece))} bits of surprise`;
}

/**
 * Colors an element by the surprise of a piece.
 * @param {HTMLElement} node
 * @param {Pick<Piece, "tokens">} piece
 */
export function tint(node, piece) {
  const value = bits(piece);
  fill(node, isNaN(value) ? null : color(value, "amount", TOP_BITS));
}

/** Draws the color scale of surprise. @param {HTMLElement} place */
export function surpriseScale(place) {
  scaleBar(place, "amount", TOP_BITS);
  place.prepend(element("span", {}, "expected"));
  place.append(element("span", {}, "bits: surprising"));
}

/**
 * Lists tokens to choose from. If the list has the focus, it stays focused when redrawn.
 * @param {HTMLElement} list
 * @param {string} name
 * @param {{ token: string, share: number, text: string }[]} ones `share` is the length of the bar, `text` follows its number
 * @param {number} chosen the index of the current one, or -1
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
