// @ts-check
// State shared by the modules of the page, and the events between them.
import { find } from "./parts/dom.js";

/** @typedef {import("./types").Written} Written */

/** A page without a text. @type {Written} */
export const NOTHING = { prompt: null, text: "", pieces: [], ids: [], promptIds: 0, isByHand: false, isWhole: false };

/** The model, the text and the current run. */
export const page = {
  /** @type {import("./types").Engine} */
  engine: /** @type {any} */ (null),
  /** @type {import("./types").Model | null} */
  model: null,
  /** @type {import("./types").Run | null} */
  running: null,
  /** The name of the model being loaded. */
  loading: "",
  written: NOTHING,
  /** The seed of the last completion. */
  lastSeed: "",
};

export const prompt = find("prompt");

/** Whether the text belongs to an earlier prompt. */
export const isStale = () => page.written.text !== "" && page.written.prompt !== prompt.value;

/** Whether the text belongs to the prompt and has tokens. */
export const isCurrent = () => page.written.ids.length > 0 && page.written.prompt === prompt.value;

/** Returns the prompt and the text combined, without a text that belongs to another prompt. */
export const wholeText = () => isStale() ? prompt.value : page.written.isWhole ? page.written.text : prompt.value + page.written.text;

/** Whether the ids exceed the model's context. @param {number[]} ids */
export const isFull = ids => page.model !== null && ids.length > page.model.config.n_positions;

/**
 * - `text`: the text has changed or grown; `true` at the end of a run.
 * - `prompt`: the prompt or a setting has changed.
 * - `model`: another model is ready.
 * - `busy`: a run has started or ended.
 * - `colors`: the color scheme has changed.
 *
 * @typedef {"text" | "prompt" | "model" | "busy" | "colors"} Event
 */

/** @type {Map<Event, ((value?: any) => void)[]>} */
const listeners = new Map();

/** @param {Event} event @param {(value?: any) => void} take */
export const on = (event, take) => { listeners.set(event, [...listeners.get(event) ?? [], take]); };

/** @param {Event} event @param {any} [value] */
export const emit = (event, value) => { for (const take of listeners.get(event) ?? []) take(value); };
