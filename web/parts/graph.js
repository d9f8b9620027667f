// An attribution graph, as a further part of `parts`: nodes over tokens and layers, the edges of the one that is chosen, and a graph of
// those that are pinned, in groups of one name.
parts.graph = (() => {
  const { css, colour, direction, element, largest } = parts;
  const [STEP, RADIUS, SIDE, FOOT] = [16, 6, 84, 76];

  const drawn = (name, attributes, ...children) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const signed = value => (value < 0 ? "−" : "+") + Math.abs(value).toPrecision(3);

  // Where each node is: side by side in its cell, in as many lines as it needs.
  function layout(graph, room) {
    const columns = Math.max(graph.tokens.length, 1);
    const wide = Math.max(STEP * 2, (room - SIDE) / columns);
    const across = Math.max(1, Math.floor(wide / STEP));
    const counts = graph.rows.map(() => new Array(columns).fill(0));
    const indices = graph.points.map(point => counts[point.row][point.column]++);
    const heights = counts.map(row => (Math.max(1, Math.ceil(Math.max(...row) / across)) + 0.8) * STEP);
    const tops = [];
    let height = 0;
    for (let row = heights.length - 1; row >= 0; row--) {
      tops[row] = height;
      height += heights[row];
    }
    const places = graph.points.map((point, n) => {
      const inside = Math.min(across, counts[point.row][point.column]);
      const left = SIDE + point.column * wide + (wide - (inside - 1) * STEP) / 2;
      return [left + indices[n] % across * STEP, tops[point.row] + (Math.floor(indices[n] / across) + 0.9) * STEP];
    });
    return { wide, heights, tops, height, places, width: SIDE + wide * columns };
  }

  // Draws the graph into the elements of graph.html. `state` is what is in the address; `keep` gets it whenever it changes.
  return (graph, state, keep) => {
    const place = name => document.getElementById(`graph-${name}`);
    const { points, lines } = graph;
    const byId = new Map(points.map((point, n) => [point.id, n]));
    const given = new URLSearchParams(state);
    let chosen = byId.get(given.get("node")) ?? points.findIndex(point => point.kind === "logit");
    // The name of the group of each pinned node; those without a name are by themselves.
    const pinned = new Map((given.get("pinned") || "").split(",").filter(id => byId.has(id)).map(id => [byId.get(id), ""]));
    for (const [name, ids] of given) if (name.startsWith("group.")) for (const id of ids.split(",")) if (pinned.has(byId.get(id))) pinned.set(byId.get(id), name.slice(6));

    const { wide, heights, tops, height, places, width } = layout(graph, place("field").clientWidth - 4);
    const edges = drawn("g", {});
    const nodes = points.map((point, n) => {
      const [cx, cy] = places[n];
      const node = drawn("circle", { cx, cy, r: RADIUS, class: point.kind, tabindex: -1, role: "button", "aria-label": point.name },
        drawn("title", {}, `${point.name}\n${point.id}`));
      node.onclick = () => choose(n);
      node.onkeydown = event => {
        if (event.key === "p") return pin();
        const way = direction(event);
        if (way) choose(nearest(n, way));
      };
      return node;
    });
    const label = (words, x, y, turned) => drawn("text", { x, y, "text-anchor": "end", ...turned && { transform: `rotate(-90 ${x} ${y})` } }, words);
    const picture = drawn("svg", { width, height: height + FOOT, role: "group", "aria-label": "nodes over tokens and layers" },
      ...graph.rows.flatMap((name, row) => [
        drawn("line", { class: "row", x1: SIDE, x2: width, y1: tops[row], y2: tops[row] }),
        label(name, SIDE - 6, tops[row] + heights[row] / 2 + 4),
      ]),
      ...graph.tokens.map(token => label(token.text.slice(0, 10) + " " + token.index, SIDE + (token.index + 0.5) * wide + 4, height + 4, true)),
      edges, ...nodes);
    place("field").replaceChildren(picture);

    // The next node that way: in the row, or the nearest one of the next row that has any.
    function nearest(from, [down, right]) {
      if (right) {
        const row = [...nodes.keys()].filter(n => points[n].row === points[from].row).sort((a, b) => places[a][0] - places[b][0] || places[a][1] - places[b][1]);
        return row[parts.clamp(row.indexOf(from) + right, 0, row.length - 1)];
      }
      const rows = new Set(points.map(point => point.row));
      let row = points[from].row - down;
      while (row >= 0 && row < graph.rows.length && !rows.has(row)) row -= down;
      const there = [...nodes.keys()].filter(n => points[n].row === row);
      return there.length ? there.reduce((best, n) => Math.abs(places[n][0] - places[from][0]) < Math.abs(places[best][0] - places[from][0]) ? n : best) : from;
    }

    function list(where, found, other) {
      where.replaceChildren(...found.map(line => element("button", { onclick: () => choose(other(line)) }, `${signed(line.weight)}  ${points[other(line)].name}`)));
    }

    function show() {
      const touching = lines.filter(line => line.source === chosen || line.target === chosen);
      const between = lines.filter(line => pinned.has(line.source) && pinned.has(line.target) && !touching.includes(line));
      const top = largest(touching.map(line => line.weight));
      edges.replaceChildren(...[...between, ...touching].map(line => {
        const [[x1, y1], [x2, y2]] = [places[line.source], places[line.target]];
        return drawn("line", { x1, y1, x2, y2, stroke: css(colour(line.weight, "signed", top)), "stroke-width": 0.6 + 3 * Math.min(1, Math.abs(line.weight) / top) });
      }));
      nodes.forEach((node, n) => {
        node.classList.toggle("chosen", n === chosen);
        node.classList.toggle("pinned", pinned.has(n));
        node.setAttribute("tabindex", n === chosen ? 0 : -1);
      });
      const point = points[chosen];
      place("name").textContent = point.name;
      const weight = (a, b) => Math.abs(b.weight) - Math.abs(a.weight);
      list(place("in"), touching.filter(line => line.target === chosen).sort(weight), line => line.source);
      list(place("out"), touching.filter(line => line.source === chosen).sort(weight), line => line.target);
      place("pin").textContent = pinned.has(chosen) ? "unpin" : "pin";
      place("group").value = pinned.get(chosen) ?? "";
      place("group").disabled = !pinned.has(chosen);
      showPinned();
      const groups = new Map();
      for (const [n, name] of pinned) if (name) groups.set(name, [...groups.get(name) ?? [], points[n].id]);
      const kept = new URLSearchParams({ node: point.id });
      if (pinned.size) kept.set("pinned", [...pinned.keys()].map(n => points[n].id));
      for (const [name, ids] of groups) kept.set("group." + name, ids);
      keep(kept.toString());
    }

    // Groups of pinned nodes, and what they add to each other.
    function showPinned() {
      const nameOf = n => pinned.get(n) || points[n].name;
      const names = [...new Set([...pinned.keys()].map(nameOf))];
      const sums = new Map();
      for (const line of lines) {
        if (!pinned.has(line.source) || !pinned.has(line.target)) continue;
        const [from, to] = [nameOf(line.source), nameOf(line.target)];
        if (from !== to) sums.set(`${from} → ${to}`, (sums.get(`${from} → ${to}`) ?? 0) + line.weight);
      }
      const members = name => [...pinned.keys()].filter(n => nameOf(n) === name);
      const item = name => element("li", {}, `${name}: `, ...members(name).map(n => element("button", { onclick: () => choose(n) }, points[n].id)));
      place("pinned").replaceChildren(element("ul", {}, ...names.map(item)),
        element("ul", {}, ...[...sums].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).map(([way, sum]) => element("li", {}, `${way}: ${signed(sum)}`))));
    }

    function choose(n) {
      const field = document.activeElement?.tagName === "circle";
      chosen = n;
      show();
      if (field) nodes[n].focus();
    }
    function pin() {
      if (!pinned.delete(chosen)) pinned.set(chosen, "");
      show();
    }
    place("pin").onclick = pin;
    place("group").onchange = event => { if (pinned.has(chosen)) pinned.set(chosen, event.target.value.trim()); show(); };
    place("about").textContent = `${graph.model}; ${graph.bos ? "with a BOS token" : "no BOS token"}; ${points.length} nodes, ${lines.length} edges`;
    place("notes").replaceChildren(...graph.notes.map(note => element("li", {}, note)));
    if (points.length) show();
  };
})();
