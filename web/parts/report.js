// A report, drawn into what report.html puts on a page: a list or small heads to choose from, the chosen part, its values as a table.
// A selection can be kept as text, such as layer=3&head=1&row=5&column=2: `chosen` is such a text, and onChosen is called with new ones.
// For another width, other colours or another selection it is drawn anew.
parts.report = (report, chosen, onChosen) => {
  const { element } = parts;
  const { axes, tokens, pattern } = report;
  const leading = axes.slice(0, -2), [rowAxis, columnAxis] = axes.slice(-2);
  const sizes = axes.map(axis => axis.labels.length);
  const [rows, columns] = axes.length > 1 ? sizes.slice(-2) : [1, sizes[0]];
  const isText = axis => axis.labels.length === tokens.length && tokens.every((token, n) => axis.labels[n] === `${token.text} ${token.index}`);
  const exists = panel => !pattern || pattern.heads[panel] !== null;
  const panelOf = places => places.reduce((panel, place, n) => panel * sizes[n] + place, 0);
  const values = pattern ? [] : report.values.map(value => value ?? NaN);
  const top = report.scale === "share" ? 1 : parts.largest(values);
  const given = new URLSearchParams(chosen);
  const number = (name, end) => parts.clamp(given.get(name) | 0, 0, end - 1);
  const state = {
    places: leading.map(axis => Math.max(0, axis.labels.indexOf(given.get(axis.name)))),
    row: number("row", axes.length > 1 ? rows : columns),
    column: number("column", columns),
    withoutFirst: given.get("first") === "hidden",
  };
  let view, drawn;
  const box = name => document.getElementById("report-" + name);

  function tellChosen() {
    const said = new URLSearchParams(leading.map((axis, n) => [axis.name, axis.labels[state.places[n]]]));
    said.set("row", state.row);
    if (axes.length > 1) said.set("column", state.column);
    if (state.withoutFirst) said.set("first", "hidden");
    onChosen(said);
  }

  // Labels whose index stays at the end, whatever the direction of the text.
  const ordered = axis => axis.labels.map(label => label.replace(/\s\d+$/, "\u200e$&"));
  const nameOf = places => leading.map((axis, n) => `${axis.name} ${axis.labels[places[n]]}`).join(", ");

  // The last two axes at these places of the leading ones.
  function viewAt(places) {
    const panel = panelOf(places), size = rows * columns;
    const own = pattern ? parts.decode(pattern, panel, rows) : values.slice(panel * size, (panel + 1) * size);
    if (state.withoutFirst) for (let row = 0; row < rows; row++) own[row * columns] = NaN;
    return {
      rows: axes.length > 1 ? ordered(rowAxis) : [report.title], columns: ordered(axes.at(-1)), values: own,
      texts: report.texts && report.texts.slice(panel * size, (panel + 1) * size),
      scale: report.scale, top: state.withoutFirst ? parts.largest(own) : top, bottomUp: report.bottom_up,
      decimals: pattern && (pattern.form === "u16" ? 5 : 3), name: nameOf(places) || report.title,
    };
  }

  function read(row, column) {
    const at = row * columns + column;
    const where = axes.length > 1 ? `${rowAxis.name} ${view.rows[row]}${pattern ? " → " : ", "}${columnAxis.name} ${view.columns[column]}` : view.columns[column];
    const away = pattern && isNaN(view.values[at]) && column <= row && (column || !state.withoutFirst ? "not stored" : "left out");
    box("readout").textContent = `${where}: ${away || parts.full(view.values[at], view.decimals)}${view.texts ? "  " + view.texts[at] : ""}`;
  }

  function choose(row, column) {
    Object.assign(state, { row, column });
    tellChosen();
    drawn(row, column);
    parts.table(box("values"), view, axes.length > 1 ? row : 0);
  }

  function draw() {
    tellChosen();
    view = viewAt(state.places);
    box("name").textContent = nameOf(state.places);
    if (axes.length === 1) {
      const line = isText(axes[0]) && parts.tokenLine(box("line"), tokens.map(token => token.text), true, n => read(0, n ?? state.row), n => choose(n, 0));
      const bars = parts.bars(box("picture"), view, n => choose(n, 0));
      drawn = n => { if (line) line.paint(view.values, view, n); bars.choose(n); read(0, n); };
    } else {
      const paint = row => line && line.paint(view.values.slice(row * columns, (row + 1) * columns), view, row);
      const point = (row = state.row, column = state.column) => { paint(row); read(row, column); };
      const line = pattern && parts.tokenLine(box("line"), isText(rowAxis) ? tokens.map(token => token.text) : rowAxis.labels, false,
        row => point(row, Math.min(state.column, row ?? state.row)), row => choose(row, Math.min(state.column, row)));
      const map = parts.heatmap(box("picture"), view, point, choose);
      drawn = (row, column) => { map.choose(row, column); point(row, column); };
    }
    parts.scaleBar(box("scale"), view.scale, view.top, view.values.some(isNaN) && "none");
    choose(state.row, state.column);
  }

  // One list for each leading axis.
  function lists() {
    box("choice").replaceChildren(...leading.map((axis, n) => {
      const list = element("select", {}, ...axis.labels.map((label, value) => element("option", { value }, label)));
      list.value = state.places[n];
      list.onchange = () => { state.places[n] = Number(list.value); draw(); };
      return element("label", {}, axis.name + " ", list);
    }));
  }

  // A small picture of each head, layers downwards; painted a few at a time.
  function heads() {
    const [layers, across] = sizes;
    const buttons = Array.from({ length: layers * across }, (_, n) => {
      const places = [Math.floor(n / across), n % across], name = nameOf(places);
      return element("button", {
        title: name, ariaLabel: name, disabled: !exists(n),
        onclick() { state.places = places; draw(); press(); },
        onkeydown(event) {
          const way = parts.direction(event);
          if (!way) return;
          const step = way[0] * across + way[1];
          let next = n + step;
          while (buttons[next]?.disabled) next += step;
          buttons[next]?.focus();
          buttons[next]?.click();
        },
      }, element("canvas"));
    });
    const grid = element("div", { className: "heads" }, element("span", {}, "layer"), ...axes[1].labels.map(label => element("span", {}, label)));
    grid.style.gridTemplateColumns = `max-content repeat(${across}, minmax(18px, 4rem))`;
    axes[0].labels.forEach((label, layer) => grid.append(element("span", {}, label), ...buttons.slice(layer * across, (layer + 1) * across)));
    const press = () => buttons.forEach((button, n) => {
      const chosen = n === panelOf(state.places);
      Object.assign(button, { ariaPressed: chosen, tabIndex: chosen ? 0 : -1 });
    });
    const check = element("input", {
      type: "checkbox", checked: state.withoutFirst,
      onchange() { state.withoutFirst = check.checked; draw(); paintFrom(0); },
    });
    box("choice").replaceChildren(element("label", {}, check, " without column 0"), grid);
    let rest;
    const paintFrom = n => {
      clearTimeout(rest);
      buttons.slice(n, n + 8).forEach((button, k) => {
        if (exists(n + k)) parts.image(button.firstChild, viewAt([Math.floor((n + k) / across), (n + k) % across]), 64);
      });
      if (n < buttons.length) rest = setTimeout(paintFrom, 0, n + 8);
    };
    press();
    paintFrom(0);
  }

  const change = report.metric && `${report.metric.name}: ${report.metric.before}${report.metric.after == null ? "" : " → " + report.metric.after}`;
  const order = axes.length > 1 && `rows: ${rowAxis.name}, columns: ${columnAxis.name}`;
  box("about").textContent = [report.model, report.model && (report.bos ? "with a BOS token" : "no BOS token"), order, pattern && pattern.about, change].filter(Boolean).join(" · ");
  box("notes").replaceChildren(...report.notes.map(note => element("li", {}, note)));
  if (!sizes.length || sizes.includes(0)) return;
  if (!exists(panelOf(state.places))) {
    const first = Math.max(0, pattern.heads.findIndex(head => head !== null));
    state.places = [Math.floor(first / sizes[1]), first % sizes[1]];
  }
  if (pattern) heads();
  else lists();
  box("line").replaceChildren();
  draw();
};
