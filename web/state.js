// @ts-check
// The state that the modules of the page share, and the events that they send each other.
import { find } from "./parts/dom.js";

/** @typedef {import("./types").Written} Written */

/** A page without a text. @type {Written} */
export const NOTHING = { prompt: null, text: "", pieces: [], ids: [], promptIds: 0, isByHand: false, isWhole: false };

/** Prompt and text, and what runs. */
export const page = {
  /** @type {import("./types").Engine} */
  engine: /** @type {any} */ (null),
  /** @type {import("./types").Model | null} */
  model: null,
  /** @type {import("./types").Run | null} */
  running: null,
  /** The name of the model that is being loaded. */
  loading: "",
  written: NOTHING,
  /** The seed of the last text. */
  lastSeed: "",
};

export const prompt = find("prompt");

/** Whether the text belongs to an earlier prompt. */
export const isStale = () => page.written.text !== "" && page.written.prompt !== prompt.value;

/** Whether the text belongs to the prompt and has tokens. */
export const isCurrent = () => page.written.ids.length > 0 && page.written.prompt === prompt.value;

/** Prompt and text as one; a text of another prompt is not part of it. */
export const wholeText = () => isStale() ? prompt.value : page.written.isWhole ? page.written.text : prompt.value + page.written.text;

/** Whether the model's context has no capacity for a token after these. @param {number[]} ids */
export const isFull = ids => page.model !== null && ids.length > page.model.config.n_positions;

/**
 * - `text`: the text is another or has grown; `true` at the end of a run.
 * - `prompt`: the prompt or a setting is another.
 * - `model`: another model is ready.
 * - `busy`: something runs, or has ended.
 * - `colors`: the color scheme is another.
 * @typedef {"text" | "prompt" | "model" | "busy" | "colors"} Event
 */

/** @type {Map<Event, ((value?: any) => void)[]>} */
const listeners = new Map();

/** @param {Event} event @param {(value?: any) => void} take */
export const on = (event, take) => { listeners.set(event, [...listeners.get(event) ?? [], take]); };

/** @param {Event} event @param {any} [value] */
export const emit = (event, value) => { for (const take of listeners.get(event) ?? []) take(value); };
