// @ts-check
// Shows one attention weight of one head step by step, so that readers can recompute it by hand: query, key,
// their products and the score, the score divided by √d, the mask and softmax over the row, and the weighted
// sum of the values, the context vector.
import { bars } from "./bars.js";
import { color, fill, largest } from "./colors.js";
import { clamp, element, find } from "./dom.js";
import { example, sum } from "./head-example.js";

/** @typedef {import("../types").HeadLook} HeadLook */

// Number of masked tokens to show at the end of a row.
const MASKED = 3;

/** @type {(value: number) => string} */
const fixed = value => value.toFixed(4);
/** @type {(value: number) => string} */
const bracketed = value => value < 0 ? `(${fixed(value)})` : fixed(value);

// ---- Numbers, tables and steps

/**
 * Lists the numbers in a vector, each on its color.
 * @type {(name: string, values: number[], top: number) => any}
 */
function vector(name, values, top) {
  const cells = values.map((value, place) => {
    const cell = element("li", { title: `component ${place}: ${value}` }, fixed(value));
    fill(cell, color(value, "signed", top));
    return cell;
  });
  return element("div", { className: "vector" }, element("b", {}, name), element("ol", { role: "list", ariaLabel: name }, ...cells));
}

/** @type {(caption: string, names: string[], rows: string[][], last?: string[]) => any} */
function valueTable(caption, names, rows, last) {
  const line = (/** @type {string} */ kind, /** @type {string[]} */ texts) => element("tr", {}, ...texts.map((text, n) => {
    const cell = element(n ? kind : "th", {}, text);
    cell.scope = kind === "th" ? "col" : n ? "" : "row";
    return cell;
  }));
  const body = element("table", {}, element("caption", {}, caption), element("thead", {}, line("th", names)),
    element("tbody", {}, ...rows.map(texts => line("td", texts))), ...last ? [element("tfoot", {}, line("td", last))] : []);
  return element("div", { className: "values", tabIndex: 0, role: "group", ariaLabel: caption }, body);
}

const formula = (/** @type {string} */ text) => element("p", { className: "formula" }, text);
const folded = (/** @type {string} */ name, /** @type {Node} */ inside) => element("details", {}, element("summary", {}, name), inside);

/** @type {(number: number, title: string, words: string, ...inside: Node[]) => any} */
function step(number, title, words, ...inside) {
  const heading = element("h3", {}, element("span", { className: "number" }, String(number)), title);
  return element("li", {}, heading, element("p", {}, words), ...inside);
}

// ---- The six steps

/** @type {(place: HTMLElement, look: HeadLook, onKey: (n: number) => void) => void} */
function drawSteps(place, look, onKey) {
  const [query, key] = [look.tokens[look.query], look.tokens[look.key]];
  const names = { query: `“${query}” ${look.query}`, key: `“${key}” ${look.key}` };
  const top = largest([...look.q, ...look.k]);
  const isOpen = [...place.querySelectorAll("details")].map(one => one.open);
  const own = look.isUnmasked ? "The token's own vector" : "The token's residual stream before this layer, after the layer norm";
  place.replaceChildren(
    step(1, `The query vector of ${names.query}`,
      `${own}, multiplied by the head's query matrix${look.isUnmasked ? "" : ", with a bias"}: what this token searches for, like a query to a database.`,
      vector("q", look.q, top)),
    step(2, `The key vector of ${names.key}`, "That token's vector, multiplied by the key matrix in the same way: what queries match, like a key in an index.",
      vector("k", look.k, top)),
    productsStep(look),
    scaledStep(look),
    weightsStep(look, names, onKey),
    contextStep(look, names));
  place.querySelectorAll("details").forEach((one, n) => one.open = isOpen[n] ?? false);
}

/** @param {HeadLook} look */
function productsStep(look) {
  const rows = look.products.map((product, n) => [String(n), fixed(look.q[n]), fixed(look.k[n]), fixed(product)]);
  const terms = look.q.slice(0, 2).map((value, n) => `${bracketed(value)} · ${bracketed(look.k[n])}`).join(" + ");
  return step(3, "Multiply component by component and add: the attention score",
    "Their dot product: the larger it is, the more alike the two vectors are, and the more the query attends to the key.",
    vector("q · k, component by component", look.products, largest(look.products)),
    formula(`${terms}${look.q.length > 2 ? " + …" : ""} = ${fixed(look.score)}`),
    folded("Every component as a table", valueTable("q, k and their products", ["component", "q", "k", "q · k"], rows, ["sum", "", "", fixed(look.score)])));
}

/** @param {HeadLook} look */
function scaledStep(look) {
  const by = fixed(1 / look.scale);
  const isUsual = Math.abs(look.scale * Math.sqrt(look.head_dim) - 1) < 1e-6;
  const root = isUsual ? `√${look.head_dim}` : by;
  return step(4, `Divided by ${root}`,
    isUsual ? "Longer vectors have larger products. Dividing by the square root of their length keeps the scores in the same range: scaled dot product attention."
      : "This model's configuration scales scores by another factor than the square root of the vectors' length.",
    formula(`${fixed(look.score)} / ${root}${isUsual ? ` = ${fixed(look.score)} / ${by}` : ""} = ${fixed(look.scaled)}`));
}

/** @type {(look: HeadLook, names: { query: string, key: string }, onKey: (n: number) => void) => any} */
function weightsStep(look, names, onKey) {
  const most = Math.max(...look.scores);
  const powers = look.scores.map(score => Math.exp(score - most)), total = sum(powers);
  const known = look.scores.map((score, n) => [`${look.tokens[n]} ${n}`, fixed(score), fixed(score - most), fixed(powers[n]), fixed(look.weights[n])]);
  const masked = look.tokens.slice(look.scores.length);
  const hidden = masked.slice(0, MASKED).map((token, n) => [`${token} ${look.scores.length + n}`, "−∞", "−∞", "0", "0"]);
  if (masked.length > MASKED) hidden.push([`and ${masked.length - MASKED} more`, "−∞", "−∞", "0", "0"]);
  const place = element("div");
  const view = {
    columns: look.scores.map((_, n) => `${look.tokens[n]} ${n}`), values: look.weights, scale: "share", top: 1,
    told: look.scores.map((score, n) => `${fixed(look.weights[n])}  score ${fixed(score)}`), name: `attention weights of ${names.query}; Enter selects another key`,
  };
  const list = bars(place, view, n => list.choose(n), onKey);
  list.choose(look.key);
  const mask = look.isUnmasked ? "This example has no mask: the word attends to all six. "
    : masked.length ? "The causal mask sets the scores of later tokens to −∞, so that their weights are 0. " : "No token comes later, so the causal mask hides nothing. ";
  return step(5, `From all scores of ${names.query} to attention weights: softmax`,
    `${mask}Softmax raises e to each score and divides by the sum, so the weights are positive and add up to 1.`,
    place,
    formula(`${names.key}: e^(${fixed(look.scores[look.key])} − ${bracketed(most)}) / ${fixed(total)} = ${fixed(powers[look.key])} / ${fixed(total)} = ${fixed(look.weights[look.key])}`),
    folded("Every token as a table", valueTable("from scores to weights; the largest score is subtracted first, which changes no weight",
      ["key", "score", "− largest", "e^", "weight"], [...known, ...hidden], ["sum", "", "", fixed(total), fixed(sum(look.weights))])));
}

/** @type {(look: HeadLook, names: { query: string, key: string }) => any} */
function contextStep(look, names) {
  const weight = look.weights[look.key];
  const share = look.v.map(value => weight * value);
  const top = largest([...look.v, ...look.context]);
  const rows = look.v.map((value, n) => [String(n), fixed(value), fixed(share[n]), fixed(look.context[n] - share[n]), fixed(look.context[n])]);
  return step(6, `The values, weighted and added: the context vector of ${names.query}`,
    `A token's value vector is its content, which is retrieved when its key matches. This key contributes ${fixed(weight)} · v; the sum over all keys is the head's output.`,
    vector(`v of ${names.key}`, look.v, top), vector(`${fixed(weight)} · v`, share, top), vector("context vector: the sum over all keys", look.context, top),
    formula(`component 0: ${fixed(weight)} · ${bracketed(look.v[0])} + what the other keys add, ${bracketed(look.context[0] - share[0])} = ${fixed(look.context[0])}`),
    folded("Every component as a table", valueTable("from the value to the context vector", ["component", "v", "weight · v", "other keys", "context"], rows)));
}

// ---- The selected pair

/**
 * The context for the steps: the prompt, its number of tokens, and numeric labels for layers and heads.
 * @typedef {{ prompt: any, count: number, layers: string[], heads: string[] }} Subject
 * @typedef {Subject & { layer: number, head: number, query: number, key: number }} Place
 */

/**
 * Shows the steps in head.html for the pair selected there or in the attention picture.
 *
 * Returns a function that draws them.
 * @param {object} of
 * @param {() => Promise<Subject>} of.subject
 * @param {(body: any) => Promise<HeadLook | undefined>} of.ask returns the answer of `look/head`, or undefined
 * @param {{ get(): string, set(text: string): void }} of.chosen the selection in the picture, such as layer=1&head=0&row=5&column=2
 * @param {() => void} of.moved called when another pair is selected
 */
export function headSteps({ subject, ask, chosen, moved }) {
  const box = (/** @type {string} */ name) => find(`head-${name}`);
  /** @type {[string, any][]} */
  const selects = ["layer", "head", "query", "key"].map(name => [name, box(name)]);
  let exampleKey = 1;

  function choices(/** @type {any} */ select, /** @type {string[]} */ labels, /** @type {number} */ value) {
    select.replaceChildren(...labels.map((label, n) => element("option", { value: n }, label)));
    select.value = clamp(value, 0, labels.length - 1);
  }

  /**
   * Returns the selected pair; layer and head are indices into the lists of labels, as in the picture.
   * @returns {Promise<Place>}
   */
  async function place() {
    const { prompt, count, layers, heads } = await subject();
    const given = new URLSearchParams(chosen.get());
    const [layer, head] = [Math.max(0, layers.indexOf(given.get("layer") ?? "")), Math.max(0, heads.indexOf(given.get("head") ?? ""))];
    const query = clamp(Number(given.get("row") ?? count) | 0, 0, count - 1);
    return { prompt, count, layers, heads, layer, head, query, key: clamp(Number(given.get("column")) | 0, 0, query) };
  }

  function keep(/** @type {Place} */ { layers, heads, layer, head, query, key }) {
    chosen.set(String(new URLSearchParams({ layer: layers[layer], head: heads[head], row: String(query), column: String(Math.min(key, query)) })));
  }

  async function look() {
    const at = await place();
    const found = await ask({ prompt: at.prompt, layer: Number(at.layers[at.layer]), head: Number(at.heads[at.head]), query: at.query, key: at.key });
    return found && { at, found };
  }

  const ofExample = () => ({ at: { layers: ["–"], heads: ["–"], layer: 0, head: 0 }, found: example(exampleKey) });

  async function show() {
    const isExample = box("example").checked;
    const looked = isExample ? ofExample() : await look();
    if (!looked) {
      box("title").textContent = "";
      box("steps").replaceChildren();
      return;
    }
    const { at, found } = looked;
    for (const [, select] of selects.slice(0, 3)) select.disabled = isExample;
    const names = found.tokens.map((token, n) => `${token} ${n}`);
    const lists = [at.layers, at.heads, names, names.slice(0, found.scores.length)];
    [at.layer, at.head, found.query, found.key].forEach((value, n) => choices(selects[n][1], lists[n], value));
    const where = isExample ? ": the six words of the example" : ` in head ${found.head} of layer ${found.layer}`;
    box("title").textContent = `How much “${found.tokens[found.query]}” attends to “${found.tokens[found.key]}”${where}: ${fixed(found.weights[found.key])}`;
    drawSteps(box("steps"), found, takeKey);
  }

  function takeKey(/** @type {number} */ key) {
    if (!box("example").checked) return change("key", key);
    exampleKey = key;
    moved();
  }

  async function change(/** @type {string} */ name, /** @type {number} */ value) {
    keep({ ...await place(), [name]: value });
    moved();
  }

  for (const [name, select] of selects) select.onchange = () => name === "key" ? takeKey(Number(select.value)) : change(name, Number(select.value));
  box("example").onchange = moved;
  return show;
}
