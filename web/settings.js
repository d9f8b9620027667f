// @ts-check
// Settings for a request: length and temperature up front, the others in a fold.
import { Control, seedOf } from "./parts/controls.js";
import { find } from "./parts/dom.js";
import { emit } from "./state.js";

// The program rejects lower temperatures; 0 is greedy.
const COLDEST = 0.000001;
const changed = () => emit("prompt");

// Defaults for a model without a generation_config.json; adopt() sets the model's own defaults.
const FRONT = [
  { field: "max_tokens", id: "max-new-tokens", name: "Length", about: "tokens", min: 1, max: 512, step: 1, value: 100, limit: 1e6 },
  { field: "temperature", id: "temperature", name: "Temperature", about: "higher is more random", min: 0, max: 2, step: 0.05, value: 1 },
];
const FURTHER = [
  { field: "top_k", id: "top-k", name: "Top-k", about: "sample from the k best; 0: all", min: 0, max: 200, step: 1, value: 50, limit: 1e6 },
  { field: "top_p", id: "top-p", name: "Top-p", about: "the best that add up to p; 1: all", min: 0.01, max: 1, step: 0.01, value: 1 },
  { field: "min_p", id: "min-p", name: "Min-p", about: "at least this fraction of the best; 0: all", min: 0, max: 1, step: 0.01, value: 0 },
  { field: "repetition_penalty", id: "repetition", name: "Repetition penalty", about: "1: off", min: 0.5, max: 2, step: 0.05, value: 1 },
  { field: "presence_penalty", id: "presence", name: "Presence penalty", about: "0: off", min: -2, max: 2, step: 0.1, value: 0, off: 0 },
  { field: "frequency_penalty", id: "frequency", name: "Frequency penalty", about: "0: off", min: -2, max: 2, step: 0.1, value: 0, off: 0 },
  { field: "n", id: "n", name: "Completions", about: "in parallel", min: 1, max: 16, step: 1, value: 1, off: 1 },
];
const made = (/** @type {string} */ place, /** @type {import("./parts/controls.js").Setting[]} */ list) => list.map(one => {
  const control = new Control(one, changed);
  find(place).append(control.row);
  return control;
});
/** All numbers with a slider. */
export const controls = [...made("sliders", FRONT), ...made("further-sliders", FURTHER)];
export const seed = find("seed");
export const greedy = find("greedy");
const stops = find("stops");

/** The requested number of tokens, or NaN. */
export const length = () => controls[0].isValid ? controls[0].get() : NaN;

/**
 * Returns the request fields for these settings, without a seed if its field is empty.
 *
 * Throws an error with the field's name if its value is invalid.
 */
export function fields() {
  /** @type {Record<string, any>} */
  const body = {};
  for (const control of controls) {
    const value = control.get();
    if (value !== control.off) body[control.field] = value;
  }
  const typed = seedOf(seed.value);
  if (typed !== undefined) body.seed = typed;
  const stop = stops.value.split("\n").filter(Boolean).map((/** @type {string} */ line) => line.replaceAll("\\n", "\n"));
  if (stop.length) body.stop = stop;
  if (greedy.checked) body.temperature = 0;
  if (body.temperature > 0 && body.temperature < COLDEST) throw new Error(`Temperature: enter 0, or at least ${COLDEST}`);
  return body;
}

/** Returns the fields that affect token probabilities. */
export function sampling() {
  const { max_tokens, seed, n, stop, ...body } = fields();
  return body;
}

// Whether the model is greedy by default.
let isGreedy = false;

/** Grays out the settings that greedy decoding ignores. */
export function greedyChanged() {
  for (const { field, row } of controls) {
    if (["temperature", "top_k", "top_p", "min_p"].includes(field)) row.classList.toggle("off", greedy.checked);
  }
}

/**
 * Applies a model's defaults from /props to all settings that the user has not changed.
 * @param {Record<string, number>} params
 */
export function adopt({ n_predict, repeat_penalty, ...params }) {
  /** @type {Record<string, number>} */
  const defaults = { max_tokens: n_predict, repetition_penalty: repeat_penalty, ...params };
  const wasGreedy = isGreedy;
  isGreedy = defaults.temperature === 0;
  if (isGreedy) delete defaults.temperature;
  if (greedy.checked === wasGreedy) greedy.checked = isGreedy;
  for (const control of controls) {
    const value = defaults[control.field];
    if (typeof value !== "number") continue;
    const isLeft = control.number.value === String(control.value);
    control.value = value;
    if (control.off !== undefined) control.off = value;
    if (isLeft) control.set(String(value));
  }
  greedyChanged();
}

/** Adds the settings that differ from the defaults to an address. @param {URLSearchParams} parameters */
export function writeSettings(parameters) {
  if (seed.value.trim()) parameters.set("seed", seed.value.trim());
  for (const { id, number, value, isValid } of controls) if (isValid && number.value !== String(value)) parameters.set(id, number.value);
  if (greedy.checked !== isGreedy) parameters.set("greedy", greedy.checked ? "1" : "0");
  if (stops.value) parameters.set("stops", stops.value);
}

/** Reads the settings from an address. @param {URLSearchParams} given */
export function readSettings(given) {
  seed.value = given.get("seed") ?? "";
  greedy.checked = given.has("greedy") ? given.get("greedy") === "1" : isGreedy;
  stops.value = given.get("stops") ?? "";
  for (const control of controls) control.set(given.get(control.id) ?? String(control.value));
  greedyChanged();
}

for (const field of [seed, stops]) field.oninput = changed;
greedy.onchange = () => { greedyChanged(); changed(); };
