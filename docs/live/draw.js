"use strict";
// Parts of pictures: tokens, heat maps, strips of numbers and bars, all in SVG.
//
// Positions depend on the number of characters only, so that a picture is the same in every browser. Colors
// are classes of figures.css. A cell's opacity shows its magnitude.
const draw = (() => {
  const LETTER = 7.3, LINE = 18;
  // Opacity above which text on a cell needs the other ink.
  const DARK = 0.55;

  /** Creates an SVG element; children may be nested lists. */
  function svg(name, attributes = {}, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(key, value);
    made.append(...children.flat());
    return made;
  }

  const text = (x, y, words, kind = "", anchor = "start") => svg("text", { x, y, class: kind, "text-anchor": anchor }, words);
  const cut = (words, width) => words.length * LETTER <= width ? words : `${words.slice(0, Math.max(0, Math.floor(width / LETTER) - 1))}…`;

  /** Formats a number with a fixed number of decimals and a minus sign. */
  function fixed(value, digits = 2) {
    if (value === -Infinity) return "−∞";
    const words = value.toFixed(digits);
    return Number(words) === 0 ? words.replace("-", "") : words.replace("-", "−");
  }

  const largest = values => values.reduce((top, value) => Number.isFinite(value) ? Math.max(top, Math.abs(value)) : top, 0) || 1;

  /** Puts parts below each other; each is `{ node, height }`, placed by a transform. */
  function picture(width, name, parts) {
    let y = 0;
    const placed = parts.map(({ node, height }) => {
      const group = svg("g", { transform: `translate(0 ${y})` }, node);
      y += height;
      return group;
    });
    return svg("svg", { class: "live-picture", viewBox: `0 0 ${width} ${y}`, width, height: y, role: "group", "aria-label": name }, placed);
  }

  /** A paragraph, wrapped at spaces. */
  function line(width, words, kind = "quiet") {
    const lines = [""];
    for (const word of words.split(" ")) {
      if ((lines.at(-1).length + word.length + 1) * LETTER > width && lines.at(-1)) lines.push(word);
      else lines[lines.length - 1] += lines.at(-1) ? ` ${word}` : word;
    }
    return { node: svg("g", {}, lines.map((one, n) => text(0, 13 + n * 15, one, kind))), height: 3 + lines.length * 15 };
  }

  /** Lays out tokens in lines, as part -1; `below(token)` is a second text, `chosen` a list of indices. */
  function chips(width, tokens, chosen, { below, gap = 0, name = "tokens" } = {}) {
    const high = below ? 38 : 24;
    const places = [];
    let x = 0, y = gap;
    const boxes = tokens.map((token, n) => {
      const words = [token.label, below?.(token) ?? ""], wide = Math.max(26, Math.max(...words.map(word => word.length)) * LETTER + 12);
      if (x + wide > width && x > 0) [x, y] = [0, y + high + 2 * gap + 6];
      const middle = x + wide / 2, frame = svg("rect", { x, y, width: wide, height: high, rx: 3, class: chosen.includes(n) ? "chip chosen" : "chip" });
      places.push({ x: middle, top: y, bottom: y + high });
      x += wide + 4;
      return svg("g", { "data-cell": `0,${n},-1` }, frame,
        text(middle, y + 16, words[0], "", "middle"), ...below ? [text(middle, y + 31, words[1], "quiet", "middle")] : []);
    });
    const label = `${name}: ${tokens.map(token => token.label).join(" ")}; arrow keys choose one`;
    return { node: svg("g", { tabindex: 0, role: "application", "aria-label": label, "data-at": "chips" }, boxes), height: y + high + gap + 8, places };
  }

  /**
   * A heat map. `value(row, column)` is NaN for a hidden cell, and `words(row, column)` replaces the number.
   *
   * `part` is the number of the map in its figure, which a click passes on. Without a chosen cell, the map
   * cannot be operated.
   */
  function grid({ width, rows, columns, value, top, digits = 2, words, title = words, chosen, part = 0, name, most = 44, high, side, right = 0, foot = true }) {
    const left = side ?? Math.min(9, Math.max(...rows.map(row => row.length))) * LETTER + 8;
    const wide = Math.max(3, Math.min(most, Math.floor((width - left - right) / columns.length))), tall = high ?? Math.min(wide, 30);
    const cells = rows.flatMap((row, r) => columns.map((column, c) => {
      const number = value(r, c), isHidden = Number.isNaN(number), strength = isHidden ? 1 : Math.min(1, Math.abs(number) / top);
      const label = words ? cut(words(r, c), wide - 4) : fixed(number, digits), x = left + c * wide, y = r * tall;
      const fits = !isHidden && tall >= 16 && label && (words ? wide > 4 * LETTER : label.length * LETTER + 3 <= wide);
      return svg("g", { "data-cell": `${r},${c},${part}` },
        svg("rect", { x, y, width: wide, height: tall, class: isHidden ? "none" : number < 0 ? "low" : "high", "fill-opacity": +strength.toFixed(3) }),
        ...fits ? [text(x + wide / 2, y + tall / 2 + 4, label, strength > DARK ? "on" : "", "middle")] : [],
        svg("title", {}, `${row}, ${column}: ${isHidden ? "hidden" : title ? title(r, c) : fixed(number, 4)}`));
    }));
    const upright = columns.some(column => column.length * LETTER > wide - 2), longest = Math.min(9, Math.max(...columns.map(column => column.length)));
    const below = columns.map((column, c) => {
      const x = left + (c + 0.5) * wide, y = rows.length * tall;
      return upright ? svg("text", { transform: `translate(${x + 4} ${y + 6}) rotate(-90)`, "text-anchor": "end" }, cut(column, 9 * LETTER)) : text(x, y + 14, column, "", "middle");
    });
    const size = { width: columns.length * wide, height: rows.length * tall };
    const mark = chosen && svg("rect", { x: left + chosen[1] * wide, y: chosen[0] * tall, width: wide, height: tall, class: "mark" });
    const label = `${name}: ${rows.length} rows, ${columns.length} columns`;
    const role = chosen ? { tabindex: 0, role: "application", "aria-label": `${label}; arrow keys choose a cell`, "data-at": `grid${part}` } : { role: "img", "aria-label": label };
    const node = svg("g", role,
      svg("rect", { x: left, y: 0, ...size, class: "paper" }), ...cells,
      ...left ? rows.map((row, r) => text(left - 5, r * tall + tall / 2 + 4, cut(row, left - 5), "", "end")) : [], ...foot ? below : [], ...mark ? [mark] : []);
    return { node, height: size.height + (!foot ? 6 : upright ? longest * LETTER + 16 : 24), tall, end: left + size.width };
  }

  /** A row of numbers as colors, below its label; `drag` names it for the pointer. */
  function strip({ width, label, values, top, chosen, drag, height = 22 }) {
    const wide = width / values.length;
    const cells = Array.from(values, (value, n) => svg("rect", {
      x: +(n * wide).toFixed(2), y: LINE, width: +wide.toFixed(2), height, class: value < 0 ? "low" : "high", "fill-opacity": +Math.min(1, Math.abs(value) / top).toFixed(3),
    }));
    const mark = chosen === undefined ? [] : [svg("rect", { x: chosen * wide - 1, y: LINE - 1, width: Math.max(4, wide + 2), height: height + 2, class: "mark" })];
    const node = svg("g", { "data-drag": drag, "shape-rendering": "crispEdges" }, text(0, 12, cut(label, width)), svg("rect", { x: 0, y: LINE, width, height, class: "paper" }), cells, mark);
    return { node, height: LINE + height + 8 };
  }

  /** Labeled bars; each is `{ label, value, text, outline }`, and `outline` a second value drawn as a frame. */
  function bars({ width, rows, top, chosen, side = 86, right = 60, part = 0, name }) {
    const room = width - side - right, isSigned = rows.some(row => row.value < 0), unit = room / (isSigned ? 2 : 1) / top;
    const zero = side + (isSigned ? room / 2 : 0);
    const lines = rows.map(({ label, value, text: words, outline }, n) => {
      const y = n * LINE, length = Math.abs(value) * unit;
      return svg("g", { "data-cell": `${n},0,${part}` },
        svg("rect", { x: 0, y, width, height: LINE, class: n === chosen ? "row chosen" : "row" }),
        text(side - 6, y + 13, cut(label, side - 6), "", "end"),
        svg("rect", { x: +(value < 0 ? zero - length : zero).toFixed(2), y: y + 3, width: +length.toFixed(2), height: LINE - 6, class: value < 0 ? "low" : "high", "fill-opacity": 0.6 }),
        ...outline === undefined ? [] : [svg("rect", { x: zero, y: y + 1, width: +(outline * unit).toFixed(2), height: LINE - 2, class: "frame" })],
        text(width, y + 13, words, "", "end"));
    });
    const node = svg("g", { tabindex: 0, role: "application", "aria-label": `${name}: ${rows.length} bars; arrow keys choose one`, "data-at": `bars${part}` }, lines);
    return { node, height: rows.length * LINE + 8 };
  }

  return { LETTER, LINE, svg, text, cut, fixed, largest, picture, line, chips, grid, strip, bars };
})();
