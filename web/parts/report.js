// @ts-check
// Draws a report into report.html: a list or thumbnails of heads to select from, the selected part, and its
// values as a table.
import { bars, table, tokenLine } from "./bars.js";
import { full, largest } from "./colors.js";
import { clamp, direction, element, find } from "./dom.js";
import { bestHead, headRoles, roleInWords } from "./heads.js";
import { decode, heatmap, image, scaleBar } from "./heatmap.js";

/** @typedef {import("../types").Report} Report */
/** @typedef {import("../types").View} View */

const box = (/** @type {string} */ name) => find(`report-${name}`);

// Names of axes in captions.
/** @type {Record<string, string>} */
const AXES = { query: "the token that attends (query)", key: "the token it attends to (key)" };

/** A report with its axes split up, and the selected part of it. */
class Panels {
  /**
   * @param {Report} report
   * @param {URLSearchParams} given
   */
  constructor(report, given) {
    const { axes, tokens, pattern } = report;
    this.report = report;
    this.leading = axes.slice(0, -2);
    const [rowAxis, columnAxis] = axes.slice(-2);
    this.rowAxis = rowAxis;
    this.columnAxis = columnAxis;
    this.sizes = axes.map(axis => axis.labels.length);
    this.rows = axes.length > 1 ? this.sizes[axes.length - 2] : 1;
    this.columns = this.sizes[axes.length - 1];
    this.values = pattern ? [] : report.values.map(value => value ?? NaN);
    this.top = report.scale === "share" ? 1 : largest(this.values);
    this.roles = pattern && tokens.length === this.rows ? headRoles(pattern, tokens.map(token => token.id)) : null;
    const number = (/** @type {string} */ name, /** @type {number} */ end) => clamp(Number(given.get(name)) | 0, 0, end - 1);
    this.places = this.leading.map(axis => Math.max(0, axis.labels.indexOf(given.get(axis.name) ?? "")));
    this.row = number("row", axes.length > 1 ? this.rows : this.columns);
    this.column = number("column", this.columns);
    this.withoutFirst = given.get("first") === "hidden";
    if (this.roles && !given.has("layer")) this.#openBest();
    if (pattern && !this.exists(this.panel())) this.#placesOf(Math.max(0, pattern.heads.findIndex(head => head !== null)));
  }

  /** @param {number} panel */
  #placesOf(panel) { this.places = [Math.floor(panel / this.sizes[1]), panel % this.sizes[1]]; }

  #openBest() {
    const roles = /** @type {import("./heads.js").HeadRole[]} */ (this.roles), best = bestHead(roles);
    this.#placesOf(best);
    [this.row, this.column] = [roles[best].row, roles[best].column];
  }

  panel(places = this.places) { return places.reduce((panel, place, n) => panel * this.sizes[n] + place, 0); }
  exists(/** @type {number} */ panel) { return !this.report.pattern || this.report.pattern.heads[panel] !== null; }
  name(places = this.places) { return this.leading.map((axis, n) => `${axis.name} ${axis.labels[places[n]]}`).join(", "); }
  /** Describes the role of the head at these indices on the leading axes. */
  role(places = this.places) { return this.roles ? roleInWords(this.roles[this.panel(places)], this.report.tokens.map(token => token.text)) : ""; }

  /** Returns the last two axes at these indices on the leading axes. @returns {View} */
  view(places = this.places) {
    const { report, rows, columns } = this, panel = this.panel(places), size = rows * columns;
    const own = report.pattern ? decode(report.pattern, panel, rows) : this.values.slice(panel * size, (panel + 1) * size);
    if (this.withoutFirst) for (let row = 0; row < rows; row++) own[row * columns] = NaN;
    // A number before a token moves to its own line.
    const texts = report.texts?.slice(panel * size, (panel + 1) * size).map(text => text.replace(/^(\d+) (?=.)/, "$1\n"));
    return {
      rows: report.axes.length > 1 ? ordered(this.rowAxis) : [report.title], columns: ordered(this.columnAxis ?? this.rowAxis), values: own,
      texts: texts?.length ? texts : undefined, scale: report.scale, top: this.withoutFirst ? largest(own) : this.top,
      bottomUp: report.bottom_up, name: this.name(places) || report.title,
    };
  }

  /** Returns the selection as text, such as layer=3&head=1&row=5&column=2. */
  selection() {
    const said = new URLSearchParams(this.leading.map((axis, n) => [axis.name, axis.labels[this.places[n]]]));
    said.set("row", String(this.row));
    if (this.report.axes.length > 1) said.set("column", String(this.column));
    if (this.withoutFirst) said.set("first", "hidden");
    return said;
  }
}

/** Describes a hook point in the residual stream in words. @type {(label: string) => string} */
const stage = label => label === "0_pre" ? "embedding" : label === "final_post" ? "last layer" : label.replace(/^(\d+)_pre$/, (_, layer) => `after layer ${layer - 1}`);

/**
 * Returns labels with the index at the end, regardless of text direction.
 * @param {import("../types").Axis} axis
 */
const ordered = axis => axis.labels.map(label => axis.name === "layer" ? stage(label) : label.replace(/\s\d+$/, "\u200e$&"));

/**
 * Returns the axis and the label, such as layer 3; omits the axis if the label names it.
 * @type {(axis: import("../types").Axis, label: string) => string}
 */
const named = (axis, label) => axis.name === "layer" && /[a-z]{5}/.test(label) ? label : `${axis.name} ${label}`;

/**
 * Describes a cell by its value and text; a number and a token denote a feature.
 * @type {(value: string, text?: string) => string}
 */
function cellText(value, text = "") {
  const [, feature, token] = /^(\d+)\n(.*)$/.exec(text) ?? [];
  return feature ? `feature ${feature} (→ ${token}), activation ${value}` : `${value}${text && `  ${text}`}`;
}

/** Shows a list for each leading axis. @type {(panels: Panels, draw: () => void) => void} */
function lists(panels, draw) {
  box("choice").replaceChildren(...panels.leading.map((axis, n) => {
    const list = element("select", {}, ...axis.labels.map((label, value) => element("option", { value }, label)));
    list.value = panels.places[n];
    list.onchange = () => { panels.places[n] = Number(list.value); draw(); };
    return element("label", {}, `${axis.name} `, list);
  }));
}

/**
 * Shows a thumbnail of each head, with layers downward; a few are painted at a time.
 * @type {(panels: Panels, draw: () => void) => void}
 */
function smallHeads(panels, draw) {
  const [layers, across] = panels.sizes, { axes } = panels.report;
  const placesOf = (/** @type {number} */ n) => [Math.floor(n / across), n % across];
  const buttons = Array.from({ length: layers * across }, (_, n) => {
    const places = placesOf(n), name = panels.name(places);
    return element("button", {
      title: name, ariaLabel: `${name}. ${panels.role(places)}`, disabled: !panels.exists(n),
      onclick() { panels.places = places; draw(); press(); },
      onkeydown(/** @type {KeyboardEvent} */ event) {
        const way = direction(event);
        if (!way) return;
        const step = way[0] * across + way[1];
        let next = n + step;
        while (buttons[next]?.disabled) next += step;
        buttons[next]?.focus();
        buttons[next]?.click();
      },
    }, element("canvas"));
  });
  const grid = element("div", { className: "heads" }, element("span", {}, "layer"), ...axes[1].labels.map(label => element("span", {}, `head ${label}`)));
  grid.style.gridTemplateColumns = `max-content repeat(${across}, minmax(18px, 4rem))`;
  axes[0].labels.forEach((label, layer) => grid.append(element("span", {}, label), ...buttons.slice(layer * across, (layer + 1) * across)));
  const press = () => buttons.forEach((button, n) => {
    const chosen = n === panels.panel();
    Object.assign(button, { ariaPressed: String(chosen), tabIndex: chosen ? 0 : -1 });
  });
  const check = element("input", {
    type: "checkbox", checked: panels.withoutFirst,
    onchange() { panels.withoutFirst = check.checked; draw(); paintFrom(0); },
  });
  box("choice").replaceChildren(grid, element("label", {}, check, " hide the first token, where idle heads attend"));
  let rest = 0;
  const paintFrom = (/** @type {number} */ n) => {
    clearTimeout(rest);
    buttons.slice(n, n + 8).forEach((button, k) => {
      if (panels.exists(n + k)) image(button.firstChild, panels.view(placesOf(n + k)), 64);
    });
    if (n < buttons.length) rest = setTimeout(paintFrom, 0, n + 8);
  };
  press();
  paintFrom(0);
}

/** Describes the subject of a report in a line. @param {Report} report */
function aboutOf({ model, bos, pattern, metric }) {
  const change = metric && `${metric.name}: ${full(metric.before, "")}${metric.after == null ? "" : ` → ${full(metric.after, "")}`}`;
  // The default form `u16` needs no note, because it has more digits than are displayed.
  return [model, bos && "with a BOS token", pattern && pattern.form !== "u16" && pattern.about, change].filter(Boolean).join(" · ");
}

/**
 * Draws a report. Another width, color scheme or selection requires a new call.
 * @param {Report} report
 * @param {string} chosen a selection as text, such as layer=3&head=1&row=5&column=2
 * @param {(selection: URLSearchParams) => void} onChosen
 */
export function drawReport(report, chosen, onChosen) {
  const { axes, tokens, pattern } = report;
  const panels = new Panels(report, new URLSearchParams(chosen));
  const { rowAxis, columnAxis, columns } = panels;
  const isText = (/** @type {import("../types").Axis} */ axis) =>
    axis.labels.length === tokens.length && tokens.every((token, n) => axis.labels[n] === `${token.text} ${token.index}`);
  const texts = tokens.map(token => token.text);
  /** @type {View} */
  let view;
  /** @type {(row: number, column: number) => void} */
  let show;

  function read(/** @type {number} */ row, /** @type {number} */ column) {
    const at = row * columns + column, value = view.values[at];
    const where = axes.length < 2 ? view.columns[column] : `${named(rowAxis, view.rows[row])}${pattern ? " → " : ", "}${columnAxis.name} ${view.columns[column]}`;
    const away = isNaN(value) && pattern && column <= row ? (column || !panels.withoutFirst ? "not stored" : "hidden") : "";
    box("readout").textContent = `${where}: ${cellText(away || full(value, view.scale), view.texts?.[at])}`;
  }

  function choose(/** @type {number} */ row, /** @type {number} */ column) {
    Object.assign(panels, { row, column });
    onChosen(panels.selection());
    show(row, column);
    table(box("values"), view, axes.length > 1 ? row : 0);
  }

  function line() {
    const list = isText(axes[0]) && tokenLine(box("line"), texts, true, n => read(0, n ?? panels.row), n => choose(n, 0));
    const drawn = bars(box("picture"), view, n => choose(n, 0));
    show = n => { if (list) list.paint(view.values, view, n); drawn.choose(n); read(0, n); };
  }

  function map() {
    const paint = (/** @type {number} */ row) => tokenRow?.paint(Array.from(view.values).slice(row * columns, (row + 1) * columns), view, row);
    const point = (row = panels.row, column = panels.column) => { paint(row); read(row, column); };
    const tokenRow = pattern && tokenLine(box("line"), isText(rowAxis) ? texts : rowAxis.labels, false,
      row => point(row, Math.min(panels.column, row ?? panels.row)), row => choose(row, Math.min(panels.column, row)));
    const drawn = heatmap(box("picture"), view, point, choose);
    show = (row, column) => { drawn.choose(row, column); point(row, column); };
  }

  function draw() {
    onChosen(panels.selection());
    view = panels.view();
    box("name").textContent = panels.name();
    box("role").textContent = panels.role();
    if (axes.length === 1) line();
    else map();
    scaleBar(box("scale"), view.scale, view.top, view.values.some(isNaN) && (pattern ? "masked: a token never attends to later ones" : "no value"));
    choose(panels.row, panels.column);
  }

  box("about").textContent = aboutOf(report);
  box("axes").textContent = axes.length > 1 ? `Rows: ${AXES[rowAxis.name] ?? rowAxis.name}. Columns: ${AXES[columnAxis.name] ?? columnAxis.name}.` : "";
  box("notes").replaceChildren(...report.notes.map(note => element("li", {}, note)));
  if (!panels.sizes.length || panels.sizes.includes(0)) return;
  if (pattern) smallHeads(panels, draw);
  else lists(panels, draw);
  box("line").replaceChildren();
  draw();
}
