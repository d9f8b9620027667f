// @ts-check
// The inside of the model: attention, one head, the logit lens, features, and the attribution graph of the
// text.
import { layersOf, paced, released } from "./parts/controls.js";
import { find } from "./parts/dom.js";
import { drawFeature } from "./parts/feature.js";
import { drawGraph, labeled } from "./parts/graph.js";
import { headSteps } from "./parts/head.js";
import { drawReport } from "./parts/report.js";
import { shown } from "./parts/tokens.js";
import { isCurrent, on, page, prompt } from "./state.js";

/** @typedef {"attention" | "head" | "lens" | "features" | "graph"} View */

/** @type {Record<View, string>} */
const VIEWS = {
  attention: "Each token looks back at earlier ones. Every small picture is one attention head; choose one, then a cell or a token. A dot before a word is its space.",
  head: "One number of the attention picture, computed step by step: choose a layer, a head, the token that attends (query) and the one it attends to (key).",
  lens: "The token that the model would predict if it stopped after each layer. The first layer is at the bottom, the last at the top.",
  features: "What the layers react to: each layer's three strongest features at a token, with the token that each makes more probable. The first layer is at the bottom. Choose a cell to see its feature.",
  graph: "Which features carry the prediction of the next token, and what they add to each other. Nodes are above their token; the predicted token is at the top right.",
};
/** Request options for each view besides the text. @type {Record<View, () => any>} */
const ASKED = {
  attention: () => layersOf(find("layers").value),
  head: () => ({}),
  lens: () => ({ show: find("show").value }),
  features: () => layersOf(find("layers").value),
  graph: () => ({ node_threshold: Number(find("share").value) }),
};
/**
 * Maximum number of tokens in a view; the first tokens of a text do not depend on the rest.
 * @type {Record<View, number>}
 */
const MOST = { attention: 256, head: 256, lens: 128, features: 128, graph: 64 };
// A view slower than this many milliseconds is updated only by its button.
const SLOW_MS = 700;
// Milliseconds without typing before the view is updated.
const TYPED_MS = 300;

/** @type {View} */
let view = "attention";
/** @type {any} */
let report = null;
/** @type {View | null} */
let lookedAt = null;
/** @type {number[]} */
let lookedIds = [];
let lookedText = "", lookTook = 0;
/** Whether a view is loading. */
let isLooking = false;
/**
 * The token in the text that the graph explains, and the ids before the token.
 * @type {{ ids: number[], token: number } | null}
 */
let explained = null;
// The last cell: the last token in the last layer.
const LAST = "row=9999&column=9999";
/** The selection in each view, and the views in which the user changed it. @type {Record<string, string>} */
const chosen = { attention: "", lens: "", features: "", graph: "" };
/** @type {Set<View>} */
const touched = new Set();

/** Returns the page's prompt and text as the views see them. */
const textNow = () => isCurrent() ? page.written.ids.join() : prompt.value;

/**
 * Returns the answer, or shows the error under the buttons.
 * @template T
 * @param {() => Promise<T>} ask
 * @returns {Promise<T | undefined>}
 */
async function inside(ask) {
  try {
    const found = await ask();
    find("inside-error").textContent = "";
    return found;
  } catch (error) {
    find("inside-error").textContent = /** @type {Error} */ (error).message;
    return undefined;
  }
}

/** Returns the ids that a view shows, starting at the first one. @param {View} name */
async function idsFor(name) {
  const { written } = page;
  const ids = isCurrent() ? written.ids : (await page.engine.ask("tokenize", { prompt: prompt.value })).tokens;
  const most = Math.min(MOST[name], page.model?.config.n_positions ?? Infinity);
  const promptIds = ids.slice(0, written.promptIds);
  const about = find("looked-at");
  about.textContent = "";
  if (name === "graph" && explained && explained.ids.length <= most) return explained.ids;
  if (ids.length <= most) return ids;
  const isOfPrompt = name === "graph" && isCurrent() && promptIds.length > 0 && promptIds.length <= most;
  about.textContent = isOfPrompt
    ? `The text has ${ids.length} tokens, and a graph at most ${most}, so this one explains the first token after the prompt. For another, click the token and press “Explain this token”.`
    : `The text has ${ids.length} tokens; this shows the first ${most}.`;
  return isOfPrompt ? promptIds : ids.slice(0, most);
}

const moveLook = paced(async () => {
  // A picture stays unchanged while the user interacts with it.
  if (!page.model || page.running && ["report", "graph-part", "feature-part"].some(id => find(id).contains(document.activeElement))) return;
  const name = view, text = textNow();
  if (!text) return;
  if (name === "head") {
    await drawHead();
    lookedText = text;
    return showAge();
  }
  const begun = performance.now();
  find("inside").ariaBusy = "true";
  isLooking = true;
  /** @type {number[]} */
  let ids = [];
  const found = await inside(async () => {
    ids = await idsFor(name);
    return page.engine.ask(`look/${name}`, { prompt: ids, ...ASKED[name]() });
  });
  find("inside").ariaBusy = "false";
  if (!page.running) lookTook = performance.now() - begun;
  await released(find("inside"));
  isLooking = false;
  if (view !== name) return;
  if (String(ids) !== String(lookedIds)) chosen.graph = "";
  // The page's header already names the model.
  [report, lookedAt, lookedIds, lookedText] = [found && { ...found, model: "" }, found ? name : null, ids, text];
  find(name === "graph" ? "graph-title" : "report-title").textContent = found?.title ?? "";
  showLooked();
  if (found && name === "graph" && explained?.ids === ids && !chosen.graph) chooseExplained(explained.token);
  drawLook();
  showAge();
  if (found && name === "graph") nameFeatures(report, ids);
});

/** Selects the logit of a token in the graph, or reports that the graph lacks it. @param {number} token */
function chooseExplained(token) {
  const point = report.points.find((/** @type {import("./types").GraphPoint} */ one) => one.kind === "logit" && one.id.split("_")[1] === String(token));
  if (point) chosen.graph = String(new URLSearchParams({ node: point.id }));
  else find("looked-at").textContent = "The chosen token is too improbable for this graph, which explains the most probable ones instead.";
}

/** Whether the pictures show an earlier text and no update is loading. */
function isOld() {
  const isShown = view === "head" ? find("head-steps").children.length > 0 : report !== null && lookedAt === view;
  return isShown && !isLooking && page.running === null && textNow() !== lookedText;
}

/** Shows a notice above pictures of an earlier text. The notice moves the content below it. */
async function showAge() {
  await released(find("inside"));
  find("look-again").hidden = !isOld();
}

/** @type {Record<string, string>} */
let names = {};
/** @type {ReturnType<typeof drawGraph>} */
let rename = () => {};

/**
 * Labels the strongest features of a graph with the tokens that they make more probable.
 * @type {(graph: import("./types").Graph, ids: number[]) => Promise<void>}
 */
async function nameFeatures(graph, ids) {
  const points = labeled(graph).map(n => graph.points[n]).filter(point => point.kind === "feature");
  const cards = await Promise.all(points.map(({ id }) => {
    const [layer, feature] = id.split("_").map(Number);
    return page.engine.ask("look/feature", { layer, feature, prompt: ids }).catch(() => null);
  }));
  names = Object.fromEntries(points.flatMap(({ id }, n) => cards[n]?.top_logits[0] ? [[id, shown(cards[n].top_logits[0])]] : []));
  if (report === graph) rename(names);
}

function drawLook() {
  if (!report || lookedAt !== view) return;
  if (view === "graph") rename = drawGraph(report, chosen.graph, chooseNode, names);
  else drawReport(report, touched.has(view) ? chosen[view] : view === "attention" ? "" : LAST, chooseCell);
}

/** @param {View} name */
function showView(name) {
  view = name;
  for (const one of Object.keys(VIEWS)) find(one).ariaPressed = String(one === name);
  find("inside-about").textContent = VIEWS[name];
  find("head-view").hidden = name !== "head";
  find("looked").hidden = name === "head";
  find("layers-label").hidden = name !== "attention" && name !== "features";
  find("show-label").hidden = name !== "lens";
  find("share-label").hidden = name !== "graph";
  if (name === "head") find("looked-at").textContent = "";
  showLooked();
  showAge();
}

/** Shows the report if it belongs to the current view. */
function showLooked() {
  const isFound = report !== null && lookedAt === view;
  find("report").hidden = !isFound || view === "graph";
  find("graph-part").hidden = !isFound || view !== "graph";
  if (!isFound || view !== "features" && view !== "graph") showFeature(null);
}

/** @param {View} name */
const open = name => {
  showView(name);
  moveLook(true);
};

/**
 * Opens the graph that explains the prediction of a token after these ids.
 * @type {(ids: number[], token: number) => void}
 */
export function explain(ids, token) {
  [explained, chosen.graph] = [{ ids, token }, ""];
  open("graph");
  find("inside").scrollIntoView({ block: "start" });
  find("graph").focus({ preventScroll: true });
}

/** Returns the maximum number of tokens that a graph explains. */
export const mostExplained = () => Math.min(MOST.graph, page.model?.config.n_positions ?? 0);

// ---- A cell, a node, a feature

/** @param {URLSearchParams} selection */
function chooseCell(selection) {
  chosen[/** @type {View} */ (lookedAt)] = String(selection);
  if (lookedAt !== "features") return;
  const [row, column] = ["row", "column"].map(name => Number(selection.get(name)));
  const [layers, tokens] = report.axes;
  const text = report.texts[row * tokens.labels.length + column];
  showFeature(text ? { layer: parseInt(layers.labels[row]), feature: parseInt(text) } : null);
}

/** @param {string} state */
function chooseNode(state) {
  chosen.graph = state;
  const id = new URLSearchParams(state).get("node") ?? "";
  const [layer, feature] = id.split("_").map(Number);
  const point = report.points.find((/** @type {import("./types").GraphPoint} */ point) => point.id === id);
  showFeature(point?.kind === "feature" ? { layer, feature } : null);
}

/** The request for a feature, and the displayed feature with its request. @type {any} */
let wantedFeature = null;
/** @type {any} */
let shownFeature = null;

/** @param {{ layer: number, feature: number } | null} feature */
function showFeature(feature) {
  wantedFeature = feature && { ...feature, prompt: lookedIds };
  if (feature) moveFeature(true);
  else find("feature-part").hidden = true;
}

const moveFeature = paced(async () => {
  const asked = wantedFeature;
  if (!asked) return;
  const isSame = shownFeature && Object.keys(asked).every(key => shownFeature.asked[key] === asked[key]);
  const card = isSame ? shownFeature.card : await inside(() => page.engine.ask("look/feature", asked));
  if (!card || wantedFeature !== asked) return;
  shownFeature = { asked, card };
  drawShownFeature();
  find("feature-part").hidden = false;
});

function drawShownFeature() {
  if (!shownFeature) return;
  const { asked, card } = shownFeature;
  drawFeature(card);
  find("feature-name").textContent = `feature ${asked.feature} of layer ${asked.layer}`;
}

// ---- A head step by step

/**
 * Determines the number of layers and heads from the attention of one token.
 *
 * A server does not report them.
 */
async function heads() {
  const { config } = /** @type {import("./types").Model} */ (page.model);
  if (config.n_layer) return;
  const { axes } = await page.engine.ask("look/attention", { prompt: [0] });
  [config.n_layer, config.n_head] = axes.map((/** @type {import("./types").Axis} */ axis) => axis.labels.length);
}

const drawHead = headSteps({
  async subject() {
    const [ids] = await Promise.all([idsFor("head"), heads()]), { config } = /** @type {import("./types").Model} */ (page.model);
    const labels = (count = 0) => Array.from({ length: count }, (_, n) => String(n));
    return { prompt: ids, count: ids.length, layers: labels(config.n_layer), heads: labels(config.n_head) };
  },
  ask: body => inside(() => page.engine.ask("look/head", body)),
  chosen: { get: () => chosen.attention, set: text => { chosen.attention = text; } },
  moved: () => moveLook(true),
});

// ---- Following the text

const isQuick = () => lookTook < SLOW_MS;
let typing = 0;
on("text", isEnd => {
  explained = null;
  if (isQuick() && (isEnd || !page.engine.isShared && view !== "head")) moveLook(isEnd);
  else showAge();
});
on("prompt", () => {
  explained = null;
  clearTimeout(typing);
  if (!page.running && !page.engine.isShared && isQuick()) typing = setTimeout(() => moveLook(true), TYPED_MS);
  else showAge();
});
on("busy", showAge);
on("colors", () => {
  drawLook();
  drawShownFeature();
  if (view === "head") moveLook(true);
});
on("model", () => {
  [report, lookedAt, lookTook, shownFeature, explained] = [null, null, 0, null, null];
  for (const name of Object.keys(chosen)) chosen[name] = "";
  touched.clear();
  find("head-steps").replaceChildren();
  showLooked();
});

for (const name of /** @type {View[]} */ (Object.keys(VIEWS))) find(name).onclick = () => open(name);
for (const type of ["click", "keydown"]) find("report").addEventListener(type, () => touched.add(view), true);
for (const id of ["show", "layers", "share"]) find(id).onchange = () => moveLook(true);
find("update").onclick = () => moveLook(true);
let waiting = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(drawLook);
});
showView(view);
