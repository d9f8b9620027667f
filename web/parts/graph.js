// @ts-check
// Draws an attribution graph into graph.html: nodes over tokens and layers, the edges of the selected node,
// and a subgraph of the pinned nodes, grouped by name.
import { color, css, largest, percentOf, short, signedText } from "./colors.js";
import { clamp, direction, element, find } from "./dom.js";
import { drawn } from "./svg.js";

/** @typedef {import("../types").Graph} Graph */
/** @typedef {import("../types").GraphLine} Line */

const [STEP, RADIUS, SIDE, FOOT] = [16, 6, 84, 76];
// Number of features to label, and number of a node's edges to list and draw.
const LABELED = 5, EDGES = 24;
const LEGEND = [["feature", "feature"], ["error", "what the features miss"], ["embedding", "token"], ["position", "position"], ["logit", "predicted token"]];
const place = (/** @type {string} */ name) => find(`graph-${name}`);

/**
 * Places the nodes next to each other in their cells, wrapping into several lines.
 * @param {Graph} graph
 * @param {number} room
 */
function layout(graph, room) {
  const columns = Math.max(graph.tokens.length, 1);
  const wide = Math.max(STEP * 2, (room - SIDE) / columns);
  const across = Math.max(1, Math.floor(wide / STEP));
  const counts = graph.rows.map(() => new Array(columns).fill(0));
  const indices = graph.points.map(point => counts[point.row][point.column]++);
  const heights = counts.map(row => (Math.max(1, Math.ceil(Math.max(...row) / across)) + 1) * STEP);
  /** @type {number[]} */
  const tops = [];
  let height = 0;
  for (let row = heights.length - 1; row >= 0; row--) {
    tops[row] = height;
    height += heights[row];
  }
  const places = graph.points.map((point, n) => {
    const inside = Math.min(across, counts[point.row][point.column]);
    const left = SIDE + point.column * wide + (wide - (inside - 1) * STEP) / 2;
    return [left + indices[n] % across * STEP, tops[point.row] + (Math.floor(indices[n] / across) + 1.1) * STEP];
  });
  return { wide, heights, tops, height, places, width: SIDE + wide * columns };
}

/**
 * Returns a curve between two nodes; within a column it bends around the nodes in between.
 * @type {(from: number[], to: number[], wide: number) => string}
 */
function route([x1, y1], [x2, y2], wide) {
  const bow = Math.abs(x1 - x2) < wide / 2 && Math.abs(y1 - y2) > 4 * STEP ? wide / 2 + RADIUS : 0, middle = (y1 + y2) / 2;
  return `M${x1} ${y1} C${x1 + bow} ${middle}, ${x2 + bow} ${middle}, ${x2} ${y2}`;
}

/**
 * Returns the name of a node, with numbers of at most three digits.
 * @type {(point: import("../types").GraphPoint) => string}
 */
const nameOf = ({ name }) => name.replace(/active (\S+)$/, (_, value) => `activation ${short(Number(value))}`)
  .replace(/probability (\S+)$/, (_, share) => `probability ${percentOf(Number(share))}`)
  .replace(/^error of (layer \d+)/, "what the features of $1 miss");

/**
 * Returns the most influential tokens, with their fraction of the total influence.
 *
 * The total includes all tokens, positions and errors.
 *
 * @param {Graph} graph
 */
function influences({ points }) {
  const sources = points.filter(({ kind }) => kind !== "feature" && kind !== "logit");
  const all = sources.reduce((sum, { influence }) => sum + (influence ?? 0), 0);
  return sources.filter(({ kind, influence }) => kind === "embedding" && influence).sort((a, b) => (b.influence ?? 0) - (a.influence ?? 0)).slice(0, 3)
    .map(({ name, influence }) => `${name.replace(/^embedding of ([^]*) (\d+)$/, "“$1” $2")} (${percentOf((influence ?? 0) / all)})`);
}

/**
 * Returns the most probable logit, the selected one, and the strongest features.
 * @param {Graph} graph
 * @param {number} [chosen]
 */
export function labeled(graph, chosen) {
  const numbers = [...graph.points.keys()], logits = numbers.filter(n => graph.points[n].kind === "logit");
  const features = numbers.filter(n => graph.points[n].kind === "feature").sort((a, b) => (graph.points[b].influence ?? 0) - (graph.points[a].influence ?? 0));
  return [...logits.filter((n, at) => at === 0 || n === chosen), ...features.slice(0, LABELED)];
}

/** @type {(graph: Graph, n: number, names: Record<string, string>) => string} */
function labelOf({ points }, n, names) {
  const point = points[n];
  if (point.kind === "logit") return point.name.replace(/^logit of ([^]*), probability .*$/, "$1");
  const [layer, feature] = point.id.split("_");
  return names[point.id] ? `→ ${names[point.id]}` : `${layer}·${feature}`;
}

/**
 * Restores the state in the address: the selected node, and the group of each pinned node.
 *
 * A pinned node without a group name forms its own group.
 *
 * @param {Graph} graph
 * @param {string} state
 */
function restored({ points }, state) {
  const byId = new Map(points.map((point, n) => [point.id, n])), given = new URLSearchParams(state);
  const pinned = new Map((given.get("pinned") || "").split(",").flatMap(id => byId.has(id) ? [[/** @type {number} */ (byId.get(id)), ""]] : []));
  for (const [name, ids] of given) {
    if (!name.startsWith("group.")) continue;
    for (const id of ids.split(",")) if (pinned.has(byId.get(id) ?? -1)) pinned.set(/** @type {number} */ (byId.get(id)), name.slice(6));
  }
  const chosen = byId.get(given.get("node") ?? "") ?? Math.max(0, points.findIndex(point => point.kind === "logit"));
  return { chosen, pinned: /** @type {Map<number, string>} */ (pinned) };
}

/** @type {(points: Graph["points"], chosen: number, pinned: Map<number, string>) => string} */
function stateOf(points, chosen, pinned) {
  const groups = new Map();
  for (const [n, name] of pinned) if (name) groups.set(name, [...groups.get(name) ?? [], points[n].id]);
  const kept = new URLSearchParams({ node: points[chosen].id });
  if (pinned.size) kept.set("pinned", String([...pinned.keys()].map(n => points[n].id)));
  for (const [name, ids] of groups) kept.set(`group.${name}`, ids);
  return kept.toString();
}

/**
 * Returns the next node in a direction: within the row, or the nearest node in the next nonempty row.
 * @type {(points: Graph["points"], places: number[][], from: number, way: [number, number]) => number}
 */
function nearest(points, places, from, [down, right]) {
  const numbers = [...points.keys()];
  if (right) {
    const row = numbers.filter(n => points[n].row === points[from].row).sort((a, b) => places[a][0] - places[b][0] || places[a][1] - places[b][1]);
    return row[clamp(row.indexOf(from) + right, 0, row.length - 1)];
  }
  const rows = new Set(points.map(point => point.row)), last = Math.max(...rows);
  let row = points[from].row - down;
  while (row >= 0 && row <= last && !rows.has(row)) row -= down;
  const there = numbers.filter(n => points[n].row === row);
  return there.length ? there.reduce((best, n) => Math.abs(places[n][0] - places[from][0]) < Math.abs(places[best][0] - places[from][0]) ? n : best) : from;
}

/**
 * Describes the predicted and actual effect of zeroing a feature, and the command that shows more.
 * @type {(point: import("../types").GraphPoint) => string}
 */
function effectOf({ zeroed, command }) {
  const effect = zeroed && `set to 0, it changes the prediction by ${signedText(zeroed[1])}; predicted ${signedText(zeroed[0])}`;
  return [effect, command].filter(Boolean).join(" · ");
}

/**
 * Shows the groups of pinned nodes and their contributions to each other.
 * @type {(graph: Graph, pinned: Map<number, string>, choose: (n: number) => void) => void}
 */
function showPinned({ points, lines }, pinned, choose) {
  const groupOf = (/** @type {number} */ n) => pinned.get(n) || nameOf(points[n]);
  const names = [...new Set([...pinned.keys()].map(groupOf))];
  /** @type {Map<string, number>} */
  const sums = new Map();
  for (const line of lines) {
    if (!pinned.has(line.source) || !pinned.has(line.target)) continue;
    const [from, to] = [groupOf(line.source), groupOf(line.target)];
    if (from !== to) sums.set(`${from} → ${to}`, (sums.get(`${from} → ${to}`) ?? 0) + line.weight);
  }
  const item = (/** @type {string} */ name) => element("li", {}, `${name}: `, ...[...pinned.keys()].filter(n => groupOf(n) === name)
    .map(n => element("button", { type: "button", onclick: () => choose(n) }, points[n].id)));
  place("pins").hidden = !pinned.size;
  place("pinned").replaceChildren(element("ul", {}, ...names.map(item)),
    element("ul", {}, ...[...sums].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).map(([way, sum]) => element("li", {}, `${way}: ${signedText(sum)}`))));
}

/**
 * Draws rows, tokens and labels.
 * @type {(graph: Graph, at: ReturnType<typeof layout>, names: Record<string, string>, marked: number[]) => { ground: any[], rows: any, labels: any[] }}
 */
function words(graph, { wide, heights, tops, height, width, places }, names, marked) {
  const text = (/** @type {string} */ said, /** @type {number} */ x, /** @type {number} */ y, /** @type {Record<string, any>} */ more) => drawn("text", { x, y, ...more }, said);
  const rows = drawn("g", { class: "rows" }, drawn("rect", { width: SIDE - 2, height }),
    ...graph.rows.map((name, row) => text(name, SIDE - 6, tops[row] + heights[row] / 2 + 4, { "text-anchor": "end" })));
  const ground = [
    ...graph.rows.map((_, row) => drawn("line", { class: "row", x1: SIDE, x2: width, y1: tops[row], y2: tops[row] })),
    ...graph.tokens.map(token => {
      const x = SIDE + (token.index + 0.5) * wide + 4, y = height + 6;
      return text(`${token.text.slice(0, 10)} ${token.index}`, x, y, { "text-anchor": "end", transform: `rotate(-90 ${x} ${y})` });
    }),
  ];
  // Moves a label below its node if it would overlap another label.
  /** @type {number[][]} */
  const taken = [];
  const labels = marked.map(n => {
    const isLate = places[n][0] > width - 60, x = places[n][0] + (isLate ? -1 : 1) * (RADIUS + 2);
    let y = places[n][1] - 5;
    while (taken.some(([left, top]) => Math.abs(left - x) < 60 && Math.abs(top - y) < 12)) y += 13;
    taken.push([x, y]);
    return text(labelOf(graph, n, names), x, y, { class: "label", "text-anchor": isLate ? "end" : "start" });
  });
  return { ground, rows, labels };
}

/**
 * Draws a graph.
 * @param {Graph} graph
 * @param {string} state the stored state
 * @param {(state: string) => void} keep called whenever the state changes
 * @param {Record<string, string>} [names] meanings of features, by node id
 * @param {(point: import("../types").GraphPoint) => void} [onChosen]
 * @returns {(names: Record<string, string>) => void} renames features without redrawing
 */
export function drawGraph(graph, state, keep, names = {}, onChosen = () => {}) {
  const { points, lines } = graph;
  let { chosen, pinned } = restored(graph, state);
  const at = layout(graph, place("field").clientWidth - 4), { places } = at;
  const edges = drawn("g", {});
  const nodes = points.map((point, n) => {
    const [cx, cy] = places[n];
    const node = drawn("circle", { cx, cy, r: RADIUS, class: point.kind, tabindex: -1, role: "button", "aria-label": nameOf(point) },
      drawn("title", {}, `${nameOf(point)}\n${point.id}`));
    node.onclick = () => choose(n);
    node.onkeydown = (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "p") return pin();
      const way = direction(event);
      if (way) choose(nearest(points, places, n, way));
    };
    return node;
  });
  const marked = labeled(graph, chosen), { ground, rows, labels } = words(graph, at, names, marked);
  place("field").replaceChildren(drawn("svg", { width: at.width, height: at.height + FOOT, role: "group", "aria-label": "nodes over tokens and layers" },
    ...ground, edges, ...nodes, ...labels, rows));
  // Row names stay in place while a wide graph scrolls.
  place("field").onscroll = () => rows.setAttribute("transform", `translate(${place("field").scrollLeft} 0)`);

  /** @type {(where: HTMLElement, found: Line[], other: (line: Line) => number) => void} */
  function list(where, found, other) {
    /** @type {HTMLElement} */ (where.parentElement).hidden = !found.length;
    where.replaceChildren(...found.map(line => element("button", { type: "button", title: nameOf(points[other(line)]), onclick: () => choose(other(line)) },
      `${signedText(line.weight)}  ${nameOf(points[other(line)])}`)));
  }

  function show() {
    const weight = (/** @type {Line} */ a, /** @type {Line} */ b) => Math.abs(b.weight) - Math.abs(a.weight);
    const into = lines.filter(line => line.target === chosen).sort(weight), from = lines.filter(line => line.source === chosen).sort(weight);
    const touching = [...into.slice(0, EDGES), ...from.slice(0, EDGES)];
    const between = lines.filter(line => pinned.has(line.source) && pinned.has(line.target) && !touching.includes(line));
    const top = largest(touching.map(line => line.weight));
    edges.replaceChildren(...[...between, ...touching].map(line => drawn("path", {
      d: route(places[line.source], places[line.target], at.wide), fill: "none", stroke: css(color(Math.sign(line.weight) * Math.max(Math.abs(line.weight), top / 3), "signed", top)),
      "stroke-width": 0.6 + 3 * Math.min(1, Math.abs(line.weight) / top),
    })));
    nodes.forEach((node, n) => {
      node.classList.toggle("chosen", n === chosen);
      node.classList.toggle("pinned", pinned.has(n));
      node.setAttribute("tabindex", n === chosen ? 0 : -1);
    });
    place("name").textContent = nameOf(points[chosen]);
    place("effect").textContent = effectOf(points[chosen]);
    onChosen(points[chosen]);
    list(place("in"), into, line => line.source);
    list(place("out"), from, line => line.target);
    place("pin").textContent = pinned.has(chosen) ? "Unpin" : "Pin";
    place("group").value = pinned.get(chosen) ?? "";
    place("group").disabled = !pinned.has(chosen);
    showPinned(graph, pinned, choose);
    keep(stateOf(points, chosen, pinned));
  }

  function choose(/** @type {number} */ n) {
    const isFocused = document.activeElement?.tagName === "circle";
    chosen = n;
    show();
    if (isFocused) nodes[n].focus();
  }
  function pin() {
    if (!pinned.delete(chosen)) pinned.set(chosen, "");
    show();
  }
  place("pin").onclick = pin;
  place("group").onchange = (/** @type {any} */ event) => { if (pinned.has(chosen)) pinned.set(chosen, event.target.value.trim()); show(); };
  place("about").textContent = [graph.model, graph.bos && "with a BOS token", `${points.length} nodes`, `${lines.length} edges`].filter(Boolean).join(" · ");
  const most = influences(graph);
  place("most").textContent = most.length ? `The prediction depends most on ${most.join(", ")}.` : "";
  place("legend").replaceChildren(...LEGEND.flatMap(([kind, name]) => [element("i", { className: `dot ${kind}` }), `${name} `]), element("span", {}, "blue edges add, red edges subtract"));
  place("notes").replaceChildren(...graph.notes.map(note => element("li", {}, rounded(note))));
  if (points.length) {
    show();
    // The predicted token is at the end of the text, beyond the edge of a narrow screen.
    place("field").scrollLeft = places[chosen][0] - place("field").clientWidth / 2;
  }
  return names => marked.forEach((n, at) => labels[at].textContent = labelOf(graph, n, names));
}

/** Rounds the decimals in a sentence to at most three digits. @type {(note: string) => string} */
const rounded = note => note.replace(/-?\d+\.\d{3,}/g, number => short(Number(number)));
