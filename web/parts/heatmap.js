// @ts-check
// Heatmaps on canvases, and their color scale.
import { color, full, ink } from "./colors.js";
import { clamp, direction, element } from "./dom.js";

/** @typedef {import("../types").View} View */

// Minimum width of cells that show their values.
const PRINTED_WIDTH = 34;

/**
 * Unpacks the values of one head of a pattern, size x size.
 * @param {import("../types").Pattern} pattern
 * @param {number} head
 * @param {number} size
 */
export function decode(pattern, head, size) {
  const text = atob(/** @type {string} */ (pattern.heads[head]));
  const bytes = Uint8Array.from(text, character => character.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  const values = new Float32Array(size * size).fill(NaN);
  let at = 0;
  for (let row = 0; row < size; row++) {
    const count = pattern.form === "strongest" ? Math.min(pattern.strongest, row + 1) : row + 1;
    for (let n = 0; n < count; n++) {
      if (pattern.form === "u16") {
        values[row * size + n] = view.getUint16(at, true) / 65535;
        at += 2;
      } else if (pattern.form === "u8") {
        values[row * size + n] = bytes[at++] / 255;
      } else {
        values[row * size + view.getUint16(at, true)] = bytes[at + 2] / 255;
        at += 3;
      }
    }
  }
  return values;
}

/**
 * Fills a canvas with a pixel per cell; beyond `limit` per side, with one for the strongest of several cells.
 * @param {HTMLCanvasElement} canvas
 * @param {any} view
 * @param {number} limit
 */
export function image(canvas, view, limit) {
  const rows = view.rows.length, columns = view.columns.length;
  const high = canvas.height = Math.min(rows, limit);
  const wide = canvas.width = Math.min(columns, limit);
  const strongest = new Float64Array(high * wide).fill(NaN);
  for (let row = 0; row < rows; row++) {
    const line = Math.floor((view.bottomUp ? rows - 1 - row : row) * high / rows) * wide;
    for (let column = 0; column < columns; column++) {
      const value = view.values[row * columns + column];
      const at = line + Math.floor(column * wide / columns);
      if (!isNaN(value) && !(Math.abs(strongest[at]) >= Math.abs(value))) strongest[at] = value;
    }
  }
  const pixels = new ImageData(wide, high);
  strongest.forEach((value, at) => pixels.data.set([...color(value, view.scale, view.top), 255], at * 4));
  /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d")).putImageData(pixels, 0, 0);
}

/**
 * Returns a canvas of this size, sharp on every screen, and its context.
 * @param {number} width
 * @param {number} height
 * @param {Record<string, any>} [properties]
 * @returns {[HTMLCanvasElement, CanvasRenderingContext2D]}
 */
function canvasOf(width, height, properties) {
  const sharp = Math.min(devicePixelRatio, 16e3 / Math.max(width, height));
  const canvas = element("canvas", { width: Math.ceil(width * sharp), height: Math.ceil(height * sharp), ...properties });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const pen = canvas.getContext("2d");
  pen.scale(sharp, sharp);
  pen.font = "12px system-ui";
  pen.textBaseline = "middle";
  pen.fillStyle = getComputedStyle(document.body).getPropertyValue("--ink");
  return [canvas, pen];
}

/**
 * Cuts a text to a width, but keeps the index at its end.
 * @param {CanvasRenderingContext2D} pen
 * @param {string} text
 * @param {number} width
 */
function cut(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  const [index] = /** @type {RegExpExecArray} */ (/(\s\d+)?$/.exec(text));
  const letters = [...text.slice(0, text.length - index.length)];
  while (letters.length && pen.measureText(`${letters.join("")}…\u200e${index}`).width > width) letters.pop();
  return `${letters.join("")}…\u200e${index}`;
}

/**
 * Returns the width and height of a cell.
 * @param {View} view
 * @param {number} room
 */
function cellSize(view, room) {
  const [rows, columns] = [view.rows.length, view.columns.length], fit = room / columns;
  const lines = view.texts?.some(text => text.includes("\n")) ? 2 : 1;
  if (view.texts) return [clamp(fit, Math.min(64, 16e3 / columns), 110), 8 + 15 * lines];
  const wide = clamp(fit > 4 ? Math.floor(fit) : fit, columns > 512 ? 1 : 2, 44);
  return [wide, rows === columns ? wide : Math.max(Math.min(wide, 30), Math.min(24, 600 / rows))];
}

/**
 * Prints the texts of cells, or the values in cells that are wide enough.
 * @param {CanvasRenderingContext2D} pen
 * @param {View} view
 * @param {number} wide
 * @param {number} high
 * @param {(row: number) => number} top
 */
function printCells(pen, view, wide, high, top) {
  const columns = view.columns.length;
  if (!view.texts && (wide < PRINTED_WIDTH || high < 16)) return;
  view.values.forEach((value, at) => {
    if (!view.texts && isNaN(value)) return;
    const lines = view.texts ? view.texts[at].split("\n") : [view.scale === "share" ? `${Math.round(100 * value)}%` : full(value, view.scale)];
    pen.fillStyle = ink(color(value, view.scale, view.top));
    const x = at % columns * wide + 4, middle = top(Math.floor(at / columns)) + high / 2;
    lines.forEach((line, n) => pen.fillText(cut(pen, line, wide - 7), x, middle + (n - (lines.length - 1) / 2) * 15));
  });
}

/**
 * Draws the labels of rows and columns.
 * @param {View} view
 * @param {number} wide
 * @param {number} high
 * @param {(row: number) => number} top
 */
function labels(view, wide, high, top) {
  const [rows, columns] = [view.rows, view.columns], [, measure] = canvasOf(1, 1);
  const longest = (/** @type {string[]} */ texts) => Math.ceil(Math.min(110, texts.reduce((most, text) => Math.max(most, measure.measureText(text).width), 0))) + 8;
  const [side, foot] = [longest(rows), longest(columns)];
  const [left, leftPen] = canvasOf(side, rows.length * high, { className: "rows" });
  leftPen.textAlign = "right";
  const step = Math.ceil(13 / high), stride = Math.ceil(13 / wide);
  rows.forEach((label, row) => {
    if (row % step === step >> 1) leftPen.fillText(cut(leftPen, label, side - 6), side - 5, top(row) + high / 2);
  });
  const [below, belowPen] = canvasOf(columns.length * wide, foot, { className: "columns" });
  belowPen.rotate(-Math.PI / 2);
  belowPen.textAlign = "right";
  columns.forEach((label, column) => {
    if (column % stride === stride >> 1) belowPen.fillText(cut(belowPen, label, foot - 6), -4, (column + 0.5) * wide);
  });
  return { left, below, side };
}

/**
 * Draws a heatmap.
 * @param {HTMLElement} place
 * @param {View} view
 * @param {(row?: number, column?: number) => void} onPoint called while the pointer is on a cell, and without a cell when it leaves
 * @param {(row: number, column: number) => void} onChoose called for a click and for the arrow keys
 */
export function heatmap(place, view, onPoint, onChoose) {
  const [rows, columns] = [view.rows.length, view.columns.length];
  const [wide, high] = cellSize(view, Math.max(120, place.clientWidth - 130));
  const top = (/** @type {number} */ row) => (view.bottomUp ? rows - 1 - row : row) * high;

  const pixels = element("canvas");
  image(pixels, view, Infinity);
  const [cells, pen] = canvasOf(columns * wide, rows * high);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(pixels, 0, 0, columns * wide, rows * high);
  printCells(pen, view, wide, high, top);
  const { left, below } = labels(view, wide, high, top);

  let chosen = [0, 0];
  const within = (/** @type {number} */ place, /** @type {number} */ count) => clamp(place, 0, count - 1);
  const at = (/** @type {MouseEvent} */ event) => {
    const line = within(Math.floor(event.offsetY / high), rows);
    return /** @type {[number, number]} */ ([view.bottomUp ? rows - 1 - line : line, within(Math.floor(event.offsetX / wide), columns)]);
  };
  const show = (/** @type {number} */ row, /** @type {number} */ column) => {
    const [width, height] = [Math.max(wide, 6), Math.max(high, 6)];
    const [x, y] = [(column + 0.5) * wide - width / 2, top(row) + (high - height) / 2];
    Object.assign(mark.style, { left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${height}px` });
  };
  const mark = element("div", { className: "mark" });
  const field = element("div", {
    className: "cells", tabIndex: 0, role: "application", ariaRoleDescription: "heatmap",
    ariaLabel: `${view.name}: ${rows} rows, ${columns} columns; arrow keys choose a cell`,
    onpointermove(/** @type {PointerEvent} */ event) { show(...at(event)); onPoint(...at(event)); },
    onpointerleave() { show(chosen[0], chosen[1]); onPoint(); },
    onclick(/** @type {MouseEvent} */ event) { onChoose(...at(event)); },
    onkeydown(/** @type {KeyboardEvent} */ event) {
      const way = direction(event);
      if (!way) return;
      onChoose(within(chosen[0] + (view.bottomUp ? -way[0] : way[0]), rows), within(chosen[1] + way[1], columns));
    },
  }, cells, mark);
  const frame = element("div", { className: "heatmap" }, left, field, below);
  place.replaceChildren(frame);
  return {
    choose(/** @type {number} */ row, /** @type {number} */ column) {
      chosen = [row, column];
      show(row, column);
      // Scrolls the selected cell into view without moving the page.
      const seen = frame.clientWidth - left.offsetWidth, x = column * wide;
      if (x < frame.scrollLeft || x + wide > frame.scrollLeft + seen) frame.scrollLeft = x - seen / 2;
      const deep = frame.clientHeight - below.offsetHeight, y = top(row);
      if (y < frame.scrollTop || y + high > frame.scrollTop + deep) frame.scrollTop = y - deep / 2;
    },
  };
}

/**
 * Shows the color scale with its values.
 * @param {HTMLElement} place
 * @param {string} scale
 * @param {number} top
 * @param {string | false} [none] name of the cells without a value
 */
export function scaleBar(place, scale, top, none) {
  const canvas = element("canvas", { ariaHidden: "true" });
  const from = scale === "signed" ? -top : 0;
  const values = Array.from({ length: 101 }, (_, n) => from + (top - from) * n / 100);
  image(canvas, { rows: [0], columns: values, values, scale, top }, Infinity);
  place.className = "scale";
  place.replaceChildren(full(from, scale), canvas, full(top, scale), ...none ? [element("span", {}, element("i"), none)] : []);
}

