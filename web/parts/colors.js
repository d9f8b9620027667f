// @ts-check
// Palette of all pictures: white to blue for amounts, red to blue for signed values, gray for masked cells.
import { clamp, dark } from "./dom.js";

const ZERO = [[255, 255, 255], [50, 55, 65]];
const BLUE = [[[98, 163, 214], [12, 48, 110]], [[58, 122, 190], [196, 226, 255]]];
const RED = [[[232, 132, 108], [146, 18, 38]], [[196, 82, 62], [255, 206, 190]]];
const NONE = [[224, 226, 231], [28, 30, 35]];

/**
 * Returns the color of a value as red, green and blue.
 * @param {number} value
 * @param {string} scale signed values have two ends, others one
 * @param {number} top the magnitude with the strongest color
 * @returns {number[]}
 */
export function color(value, scale, top) {
  const scheme = Number(dark.matches);
  if (isNaN(value)) return NONE[scheme];
  const ends = (scale === "signed" && value < 0 ? RED : BLUE)[scheme];
  const way = clamp((scale === "signed" ? Math.abs(value) : value) / top, 0, 1) * 2;
  const [from, to, part] = way < 1 ? [ZERO[scheme], ends[0], way] : [ends[0], ends[1], way - 1];
  return from.map((start, n) => Math.round(start + (to[n] - start) * part));
}

/** @type {(rgb: number[]) => string} */
export const css = rgb => `rgb(${rgb.join()})`;

const linear = (/** @type {number} */ channel) => channel <= 10 ? channel / 3294 : ((channel / 255 + 0.055) / 1.055) ** 2.4;

/** Black or white, whichever has the higher contrast (WCAG) on a background. @type {(rgb: number[]) => string} */
export const ink = ([red, green, blue]) => 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue) > 0.179 ? "#000" : "#fff";

/** @type {(node: any, rgb: number[] | null) => void} */
export const fill = (node, rgb) => Object.assign(node.style, { background: rgb ? css(rgb) : "", color: rgb ? ink(rgb) : "" });

/**
 * Formats a value: fractions as percentages, others with at most three digits.
 * @param {number} value
 * @param {string} scale
 */
export function full(value, scale) {
  if (isNaN(value)) return "masked";
  return scale === "share" ? percentOf(value) : short(value);
}

/** Formats a value with at most three digits; integers in full. @type {(value: number) => string} */
export const short = value => isNaN(value) ? "–" : String(Number.isInteger(value) ? value : Math.abs(value) >= 1000 ? Math.round(value) : Number(value.toPrecision(3)));

/** @type {(value: number) => string} */
export const signedText = value => (value < 0 ? "−" : "+") + short(Math.abs(value));

/** Formats a fraction as a percentage with at most three digits. @type {(share: number) => string} */
export const percentOf = share => share > 0 && share < 0.0001 ? "< 0.01%" : `${Number((share * 100).toPrecision(3))}%`;

/**
 * Returns the largest finite magnitude, or 1 if all values are 0.
 * @type {(values: Iterable<number>) => number}
 */
export function largest(values) {
  let top = 0;
  for (const value of values) if (Math.abs(value) > top && Math.abs(value) < Infinity) top = Math.abs(value);
  return top || 1;
}
