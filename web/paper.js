// @ts-check
// The generated text, one span per token.
import { clamp, direction, element, find } from "./parts/dom.js";
import { bits, bitsText, surpriseScale, tint, told } from "./parts/tokens.js";
import { isStale, on, page } from "./state.js";

/**
 * A piece of the text on the page.
 * @typedef {{ piece: import("./types").Piece, text: string, bits: number, node: any }} Drawn
 */

export const paper = find("text");
/** @type {Drawn[]} */
let drawn = [];
let at = 0;

/** Returns the n-th piece. @type {(n: number) => Drawn | undefined} */
export const pieceAt = n => drawn[n];
/** @type {(node: any) => number} */
export const placeOf = node => drawn.findIndex(one => one.node === node);
/** Returns the index of the piece that has or last had the focus. */
export const currentPiece = () => at;

/** Renders the changes since the last call. @param {boolean} [everything] */
export function drawText(everything = false) {
  const now = page.written.pieces.map(piece => ({ piece, text: page.written.text.slice(piece.start, piece.end), bits: bits(piece), node: /** @type {any} */ (null) }));
  let same = 0;
  while (!everything && same < now.length && same < drawn.length && now[same].text === drawn[same].text && Object.is(now[same].bits, drawn[same].bits)) now[same].node = drawn[same++].node;
  const gone = drawn.slice(same);
  gone.forEach(one => one.node.remove());
  for (const one of now.slice(same)) one.node = span(one);
  paper.append(...now.slice(same).map(one => one.node));
  // Hides the details of a removed token.
  if (gone.length) find("token").textContent = "";
  drawn = now;
  find("legend").hidden = !drawn.length;
  showStale();
  if (!drawn[at]) at = Math.max(0, drawn.length - 1);
  if (drawn[at]) drawn[at].node.tabIndex = 0;
}

/** @param {Drawn} one */
function span({ piece, text, bits }) {
  const kind = text.startsWith("\n") ? "line" : text ? "" : "end";
  const node = element("span", { className: kind, role: "option", tabIndex: -1, ariaLabel: told(piece, text), ariaSelected: "false" }, text);
  if (!isNaN(bits)) node.dataset.bits = bitsText(bits);
  tint(node, piece);
  return node;
}

/** Marks text that belongs to an earlier prompt. */
export function showStale() {
  paper.classList.toggle("stale", isStale());
  find("stale").hidden = !isStale() || page.running !== null;
}

/** Moves the focus to a piece. @param {number} n */
export function goTo(n) {
  if (drawn.length) drawn[clamp(n, 0, drawn.length - 1)].node.focus();
}

paper.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
  const way = drawn.length && !event.defaultPrevented && direction(event);
  if (way) goTo(at + way[0] + way[1]);
});
paper.addEventListener("focusin", (/** @type {FocusEvent} */ event) => {
  const n = placeOf(event.target);
  if (n < 0 || n === at) return;
  if (drawn[at]) drawn[at].node.tabIndex = -1;
  at = n;
  drawn[at].node.tabIndex = 0;
});
for (const type of ["pointerover", "focusin"]) paper.addEventListener(type, (/** @type {Event} */ event) => {
  const one = drawn[placeOf(event.target)];
  if (one) find("token").textContent = told(one.piece, one.text);
});
find("show-bits").onchange = () => paper.classList.toggle("numbered", find("show-bits").checked);
surpriseScale(find("scale"));
on("colors", () => {
  surpriseScale(find("scale"));
  drawText(true);
});
on("prompt", showStale);
on("busy", showStale);

