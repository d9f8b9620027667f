"use strict";
// What a page about the inside of a model is drawn with: packed patterns, colours, heatmap, bars, line of tokens, table.
// Values are numbers, row-major; NaN stands for "not there".
const parts = (() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const ZERO = [[255, 255, 255], [50, 55, 65]];
  const BLUE = [[[98, 163, 214], [12, 48, 110]], [[58, 122, 190], [196, 226, 255]]];
  const RED = [[[232, 132, 108], [146, 18, 38]], [[196, 82, 62], [255, 206, 190]]];
  const NONE = [[224, 226, 231], [28, 30, 35]];
  // Larger views have a table of the chosen row only.
  const WHOLE_TABLE = 4096;

  // An element with these properties; those of accessibility (role, ariaLabel) and handlers (onclick) are properties too.
  function element(name, properties, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  // The values of one head of a packed pattern, size x size.
  function decode(pattern, head, size) {
    const text = atob(pattern.heads[head]);
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

  // Red, green, blue of a value; `top` is the magnitude with the strongest colour.
  function colour(value, scale, top) {
    const scheme = Number(dark.matches);
    if (isNaN(value)) return NONE[scheme];
    const ends = (scale === "signed" && value > 0 ? RED : BLUE)[scheme];
    const share = scale === "signed" ? Math.abs(value) / top : value / top;
    const way = clamp(share, 0, 1) * 2;
    const [from, to, part] = way < 1 ? [ZERO[scheme], ends[0], way] : [ends[0], ends[1], way - 1];
    return from.map((start, n) => Math.round(start + (to[n] - start) * part));
  }

  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  const css = rgb => `rgb(${rgb.join()})`;
  const ink = rgb => 0.3 * rgb[0] + 0.59 * rgb[1] + 0.11 * rgb[2] > 118 ? "#000" : "#fff";

  // A value in full: packed ones have so many decimals.
  function full(value, decimals) {
    if (isNaN(value)) return "none";
    return decimals === undefined ? String(value) : value.toFixed(decimals);
  }

  function short(value) {
    return isNaN(value) ? "–" : String(Number(value.toPrecision(3)));
  }

  // The largest magnitude of values, or 1 where all are 0.
  function largest(values) {
    let top = 0;
    for (const value of values) if (Math.abs(value) > top && Math.abs(value) < Infinity) top = Math.abs(value);
    return top || 1;
  }

  // Fills a canvas with one pixel a cell, or one for the strongest of several where there are more than `limit` a side.
  function image(canvas, view, limit) {
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
    strongest.forEach((value, at) => pixels.data.set([...colour(value, view.scale, view.top), 255], at * 4));
    canvas.getContext("2d").putImageData(pixels, 0, 0);
  }

  // A canvas of this size on the page, sharp on every screen, and its pen.
  function canvasOf(width, height, properties) {
    const sharp = Math.min(devicePixelRatio, 16e3 / Math.max(width, height));
    const canvas = element("canvas", { width: Math.ceil(width * sharp), height: Math.ceil(height * sharp), ...properties });
    Object.assign(canvas.style, { width: width + "px", height: height + "px" });
    const pen = canvas.getContext("2d");
    pen.scale(sharp, sharp);
    pen.font = "12px system-ui";
    pen.textBaseline = "middle";
    pen.fillStyle = getComputedStyle(document.body).getPropertyValue("--ink");
    return [canvas, pen];
  }

  // A text cut to a width; the index at its end stays.
  function cut(pen, text, width) {
    if (pen.measureText(text).width <= width) return text;
    const index = /(\s\d+)?$/.exec(text)[0];
    const letters = [...text.slice(0, text.length - index.length)];
    while (letters.length && pen.measureText(letters.join("") + "…\u200e" + index).width > width) letters.pop();
    return letters.join("") + "…\u200e" + index;
  }

  // Which way a key goes, down and right; nothing for other keys and for the browser's own commands.
  function direction(event) {
    const way = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -9999], End: [0, 9999] }[event.key];
    if (!way || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    return way;
  }

  // A heatmap. view: rows, columns (labels), values, texts, scale, top, decimals, bottomUp, name.
  // Calls onPoint(row, column) while a cell is pointed at, onPoint() after it, onChoose(row, column) for click and arrow keys.
  function heatmap(place, view, onPoint, onChoose) {
    const [rows, columns] = [view.rows.length, view.columns.length];
    const [, measure] = canvasOf(1, 1);
    const longest = labels => Math.ceil(Math.min(110, labels.reduce((most, label) => Math.max(most, measure.measureText(label).width), 0))) + 8;
    const [side, foot] = [longest(view.rows), longest(view.columns)];
    const room = Math.max(120, place.clientWidth - side - 20);
    const fit = room / columns;
    const wide = view.texts ? clamp(fit, Math.min(58, 16e3 / columns), 96) : clamp(fit > 4 ? Math.floor(fit) : fit, columns > 512 ? 1 : 2, 30);
    const high = view.texts ? 22 : rows === columns ? wide : Math.max(wide, Math.min(22, 600 / rows));
    const top = row => (view.bottomUp ? rows - 1 - row : row) * high;

    const pixels = element("canvas");
    image(pixels, view, Infinity);
    const [cells, pen] = canvasOf(columns * wide, rows * high);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(pixels, 0, 0, columns * wide, rows * high);
    if (view.texts) view.texts.forEach((text, at) => {
      pen.fillStyle = ink(colour(view.values[at], view.scale, view.top));
      pen.fillText(cut(pen, text, wide - 6), at % columns * wide + 3, top(Math.floor(at / columns)) + high / 2);
    });
    const [left, leftPen] = canvasOf(side, rows * high, { className: "rows" });
    leftPen.textAlign = "right";
    const step = Math.ceil(13 / high), stride = Math.ceil(13 / wide);
    view.rows.forEach((label, row) => {
      if (row % step === step >> 1) leftPen.fillText(cut(leftPen, label, side - 6), side - 5, top(row) + high / 2);
    });
    const [below, belowPen] = canvasOf(columns * wide, foot, { className: "columns" });
    belowPen.rotate(-Math.PI / 2);
    belowPen.textAlign = "right";
    view.columns.forEach((label, column) => {
      if (column % stride === stride >> 1) belowPen.fillText(cut(belowPen, label, foot - 6), -4, (column + 0.5) * wide);
    });

    let chosen = [0, 0];
    const within = (place, count) => clamp(place, 0, count - 1);
    const at = event => {
      const line = within(Math.floor(event.offsetY / high), rows);
      return [view.bottomUp ? rows - 1 - line : line, within(Math.floor(event.offsetX / wide), columns)];
    };
    const show = (row, column) => {
      const [width, height] = [Math.max(wide, 6), Math.max(high, 6)];
      const [x, y] = [(column + 0.5) * wide - width / 2, top(row) + (high - height) / 2];
      Object.assign(mark.style, { left: x + "px", top: y + "px", width: width + "px", height: height + "px" });
    };
    const mark = element("div", { className: "mark" });
    const field = element("div", {
      className: "cells", tabIndex: 0, role: "application", ariaRoleDescription: "heatmap",
      ariaLabel: `${view.name}: ${rows} rows, ${columns} columns; arrow keys choose a cell`,
      onpointermove(event) { show(...at(event)); onPoint(...at(event)); },
      onpointerleave() { show(...chosen); onPoint(); },
      onclick(event) { onChoose(...at(event)); },
      onkeydown(event) {
        const way = direction(event);
        if (!way) return;
        onChoose(within(chosen[0] + (view.bottomUp ? -way[0] : way[0]), rows), within(chosen[1] + way[1], columns));
        mark.scrollIntoView({ block: "nearest", inline: "nearest" });
      },
    }, cells, mark);
    place.replaceChildren(element("div", { className: "heatmap" }, left, field, below));
    return { choose(row, column) { chosen = [row, column]; show(row, column); } };
  }

  // Which colour is which value.
  function scaleBar(place, scale, top, none) {
    const canvas = element("canvas");
    const from = scale === "signed" ? -top : 0;
    const values = Array.from({ length: 101 }, (_, n) => from + (top - from) * n / 100);
    image(canvas, { rows: [0], columns: values, values, scale, top }, Infinity);
    place.className = "scale";
    place.replaceChildren(short(from), canvas, short(top), ...none ? [element("i"), none] : []);
  }

  // Moves the focus among buttons by arrow keys; one of them is in the order of the tab key.
  function roving(buttons, onMove, onAct) {
    buttons.forEach((button, n) => button.onkeydown = event => {
      if (onAct && event.key === "Enter") onAct(n);
      const way = direction(event);
      if (!way) return;
      const next = clamp(n + way[0] + way[1], 0, buttons.length - 1);
      onMove(next);
      buttons[next].focus();
    });
    return chosen => buttons.forEach((button, n) => button.tabIndex = n === chosen ? 0 : -1);
  }

  // The text itself, a button a token. paint(values, ...) colours it; values in full are what hovering says.
  function tokenLine(place, texts, valued, onPoint, onChoose) {
    const small = texts.map(() => element("small"));
    const buttons = texts.map((text, n) => element("button", {
      onpointerenter: () => onPoint(n), onpointerleave: () => onPoint(), onclick: () => onChoose(n),
    }, text, ...valued ? [small[n]] : []));
    const focusable = roving(buttons, onChoose);
    place.className = valued ? "line valued" : "line";
    place.replaceChildren(...buttons.flatMap((button, n) => !valued && texts[n].endsWith("↵") ? [button, element("br")] : [button]));
    return {
      paint(values, view, current) {
        focusable(current);
        buttons.forEach((button, n) => {
          const rgb = isNaN(values[n]) ? null : colour(values[n], view.scale, view.top);
          Object.assign(button.style, { background: rgb ? css(rgb) : "", color: rgb ? ink(rgb) : "" });
          button.title = button.ariaLabel = `${texts[n]} ${n}: ${full(values[n], view.decimals)}`;
          button.ariaCurrent = n === current ? "true" : null;
          small[n].textContent = short(values[n]);
        });
        const above = buttons[current].offsetTop - place.offsetTop;
        if (above < place.scrollTop || above > place.scrollTop + place.clientHeight - 30) place.scrollTop = above - 40;
      },
    };
  }

  // A bar for each label. view: columns (labels), values, texts, scale, top, decimals, name.
  // Calls onChoose(n) for arrow keys, onAct(n) for click and the enter key.
  function bars(place, view, onChoose, onAct = onChoose) {
    const signed = view.scale === "signed";
    const lines = view.columns.map((label, n) => {
      const value = view.values[n];
      const track = element("i", { className: isNaN(value) ? "none" : "" });
      if (!isNaN(value)) {
        const length = Math.min(1, Math.abs(value) / view.top) * (signed ? 50 : 100);
        const left = signed ? 50 - (value < 0 ? length : 0) : 0;
        const background = css(colour(Math.sign(value) * view.top * 0.6, view.scale, view.top));
        track.append(element("b"));
        Object.assign(track.firstChild.style, { left: left + "%", width: length + "%", background });
      }
      const text = full(value, view.decimals) + (view.texts && view.texts[n] ? "  " + view.texts[n] : "");
      return element("div", { role: "option", onclick: () => onAct(n) }, element("span", {}, label), track, element("span", {}, text));
    });
    const focusable = roving(lines, onChoose, onAct);
    Object.assign(place, { className: "bars", role: "listbox", ariaLabel: view.name });
    place.replaceChildren(...lines);
    return {
      choose(chosen) {
        focusable(chosen);
        lines.forEach((line, n) => line.ariaSelected = n === chosen);
      },
    };
  }

  // The values of a view as a table; of a large view, those of one row.
  function table(place, view, row) {
    const columns = view.columns.length;
    const whole = view.values.length <= WHOLE_TABLE;
    const rows = whole ? [...view.rows.keys()] : [row];
    if (view.bottomUp) rows.reverse();
    const line = (first, name, texts) => element("tr", {}, element("th", {}, first), ...texts.map(text => element(name, {}, text)));
    const cell = at => full(view.values[at], view.decimals) + (view.texts ? " " + view.texts[at] : "");
    place.className = "values";
    place.replaceChildren(element("table", {},
      element("caption", {}, view.name + (whole ? "" : ", the chosen row")),
      line("", "th", view.columns),
      ...rows.map(n => line(view.rows[n], "td", view.columns.map((_, column) => cell(n * columns + column))))));
  }

  return { bars, clamp, colour, css, dark, decode, direction, element, full, heatmap, image, ink, largest, scaleBar, table, tokenLine };
})();
