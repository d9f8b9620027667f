// @ts-check
// Bars, lines of tokens and tables.
import { color, css, fill, full } from "./colors.js";
import { element, roving } from "./dom.js";

/** @typedef {import("../types").View} View */

// In larger views, the table shows only the selected row.
const WHOLE_TABLE = 4096;

/**
 * The text itself, one button per token. `paint(values, …)` colors it.
 * @param {HTMLElement} place
 * @param {string[]} texts
 * @param {boolean} valued whether each token shows its value below it
 * @param {(n?: number) => void} onPoint
 * @param {(n: number) => void} onChoose
 */
export function tokenLine(place, texts, valued, onPoint, onChoose) {
  const small = texts.map(() => element("small"));
  const buttons = texts.map((text, n) => element("button", {
    onpointerenter: () => onPoint(n), onpointerleave: () => onPoint(), onclick: () => onChoose(n),
  }, text, ...valued ? [small[n]] : []));
  const focusable = roving(buttons, onChoose);
  place.className = valued ? "line valued" : "line";
  place.replaceChildren(...buttons.flatMap((button, n) => !valued && texts[n].endsWith("↵") ? [button, element("br")] : [button]));
  return {
    paint(/** @type {ArrayLike<number>} */ values, /** @type {View} */ view, /** @type {number} */ current) {
      focusable(current);
      buttons.forEach((button, n) => {
        fill(button, isNaN(values[n]) ? null : color(values[n], view.scale, view.top));
        button.title = button.ariaLabel = `${texts[n]} ${n}: ${full(values[n], view.scale)}`;
        button.ariaCurrent = n === current ? "true" : null;
        small[n].textContent = isNaN(values[n]) ? "–" : full(values[n], view.scale);
      });
      // Tokens attend to earlier ones, so this scrolls the current token near the end of the visible part.
      const above = buttons[current].offsetTop - place.offsetTop;
      if (above < place.scrollTop || above > place.scrollTop + place.clientHeight - 30) place.scrollTop = above - 0.7 * place.clientHeight;
    },
  };
}

/**
 * Draws a bar for each label.
 * @param {HTMLElement} place
 * @param {Omit<View, "rows"> & { told?: string[] }} view `told` replaces the value's text
 * @param {(n: number) => void} onChoose called for the arrow keys
 * @param {(n: number) => void} [onAct] called for a click and the Enter key
 */
export function bars(place, view, onChoose, onAct = onChoose) {
  const signed = view.scale === "signed" && view.values.some(value => value < 0);
  const lines = view.columns.map((label, n) => {
    const value = view.values[n];
    const track = element("i", { className: isNaN(value) ? "none" : "" });
    if (!isNaN(value)) {
      const length = Math.min(1, Math.abs(value) / view.top) * (signed ? 50 : 100);
      const left = signed ? 50 - (value < 0 ? length : 0) : 0;
      const background = css(color(Math.sign(value) * view.top * 0.6, view.scale, view.top));
      track.append(element("b"));
      Object.assign(track.firstChild.style, { left: `${left}%`, width: `${length}%`, background });
    }
    const words = view.told ? [view.told[n]] : [element("data", {}, full(value, view.scale)), view.texts?.[n] ? `  ${view.texts[n]}` : ""];
    return element("div", { role: "option", onclick: () => onAct(n) }, element("span", {}, label), track, element("span", {}, ...words));
  });
  const focusable = roving(lines, onChoose, onAct);
  Object.assign(place, { className: "bars", role: "listbox", ariaLabel: view.name });
  place.replaceChildren(...lines);
  return {
    choose(/** @type {number} */ chosen) {
      focusable(chosen);
      lines.forEach((line, n) => line.ariaSelected = String(n === chosen));
    },
  };
}

/**
 * Shows the values of a view as a table; for a large view, shows only one row.
 * @param {HTMLElement} place
 * @param {View} view
 * @param {number} row
 */
export function table(place, view, row) {
  const columns = view.columns.length;
  const whole = view.values.length <= WHOLE_TABLE;
  const rows = whole ? [...view.rows.keys()] : [row];
  if (view.bottomUp) rows.reverse();
  const line = (/** @type {string} */ first, /** @type {string} */ name, /** @type {string[]} */ texts) =>
    element("tr", {}, element("th", {}, first), ...texts.map(text => element(name, {}, text)));
  const cell = (/** @type {number} */ at) => full(view.values[at], view.scale) + (view.texts ? ` ${view.texts[at].replace("\n", " ")}` : "");
  place.className = "values";
  place.replaceChildren(element("table", {},
    element("caption", {}, view.name + (whole ? "" : ", the chosen row")),
    line("", "th", view.columns),
    ...rows.map(n => line(view.rows[n], "td", view.columns.map((_, column) => cell(n * columns + column))))));
}
