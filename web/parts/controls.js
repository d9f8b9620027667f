// @ts-check
// Controls of the page: settings with sliders, a box next to a token, announcements, copy buttons.
import { element } from "./dom.js";

/**
 * A number with a slider.
 *
 * `off` is the value that requests omit. `limit` is the upper limit of the typed number.
 *
 * @typedef {{ field: string, id: string, name: string, about?: string, min: number, max: number, step: number, value: number, off?: number, limit?: number }} Setting
 */

/** A setting on the page. */
export class Control {
  /**
   * @param {Setting} setting
   * @param {() => void} onChange
   */
  constructor({ field, id, name, about, min, max, step, value, off, limit = max }, onChange) {
    this.field = field;
    this.value = value;
    this.off = off;
    this.id = id;
    this.name = name;
    this.min = min;
    this.max = limit;
    this.range = element("input", { type: "range", min, max, step, ariaLabel: name, tabIndex: -1 });
    this.number = element("input", { id, type: "number", min, max: limit, step: Number.isInteger(step) ? step : "any", required: true });
    this.number.dataset.testid = id;
    this.set(String(value));
    this.range.oninput = () => { this.number.value = this.range.value; onChange(); };
    this.number.oninput = () => { this.range.value = this.number.value; onChange(); };
    this.row = element("div", { className: "setting" }, element("label", { htmlFor: id }, name, ...about ? [element("small", {}, about)] : []), this.number, this.range);
  }

  /** @param {string} text */
  set(text) { this.range.value = this.number.value = text; }

  get isValid() { return this.number.checkValidity(); }

  /** Returns the value of the setting. Throws an error with the setting's name if the field is invalid. */
  get() {
    if (!this.isValid) throw new Error(`${this.name}: enter a ${this.number.step === "any" ? "" : "whole "}number from ${this.min} to ${this.max}`);
    return this.number.valueAsNumber;
  }
}

/** @type {() => string} */
export const newSeed = () => String(crypto.getRandomValues(new Uint32Array(1))[0]);

/** Parses the seed field; undefined if it is empty. @param {string} text */
export function seedOf(text) {
  if (!text.trim()) return undefined;
  const seed = /^\s*-?\d+\s*$/.test(text) ? Number(text) : NaN;
  if (!Number.isSafeInteger(seed)) throw new Error(`Seed: enter a whole number up to ${Number.MAX_SAFE_INTEGER}, or leave it empty for a new one each time`);
  return seed;
}

/** Parses a list of layers such as 3, 0-5 or 0,4,8-11; an empty field selects all. @param {string} text */
export function layersOf(text) {
  const found = [];
  for (const part of text.split(",").map(part => part.trim()).filter(Boolean)) {
    const [, from, to] = /^(\d{1,4})(?:-(\d{1,4}))?$/.exec(part) ?? [];
    if (from === undefined || Number(to ?? from) < Number(from)) throw new Error(`layers: “${part}” is neither a number nor a range such as 0-5`);
    for (let layer = Number(from); layer <= Number(to ?? from); layer++) found.push(layer);
  }
  return found.length ? { layers: found } : {};
}

/**
 * Creates a box that opens next to a token. Esc closes it, and `back(node)` restores the focus.
 * @param {HTMLElement} box
 * @param {(node: any) => void} back
 */
export function popup(box, back) {
  /** @type {HTMLElement | null} */
  let owner = null;

  /** @param {HTMLElement} node @param {...Node} contents */
  function show(node, ...contents) {
    hide();
    owner = node;
    node.classList.add("current");
    box.replaceChildren(...contents);
    box.hidden = false;
    place();
  }

  /** Places the box under the token, or above it if there is no space. */
  function place() {
    if (!owner) return;
    const [frame, word] = [/** @type {HTMLElement} */ (box.parentElement).getBoundingClientRect(), owner.getClientRects()[0]];
    const above = word.bottom + box.offsetHeight > innerHeight && word.top > box.offsetHeight;
    const left = Math.max(0, Math.min(word.left - frame.left, frame.width - box.offsetWidth));
    const top = above ? word.top - box.offsetHeight - frame.top : word.bottom - frame.top - 2;
    Object.assign(box.style, { left: `${left}px`, top: `${top}px` });
  }

  function hide() {
    owner?.classList.remove("current");
    owner = null;
    box.hidden = true;
  }

  box.addEventListener("keydown", event => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    const node = owner;
    hide();
    back(node);
  });
  return { show, place, hide };
}

/**
 * Announces complete sentences to screen readers instead of every token.
 * @param {HTMLElement} place
 * @param {string[]} texts
 * @param {boolean} isEnd
 */
export function announce(place, texts, isEnd) {
  const rest = texts.join("\n").slice((place.textContent ?? "").length);
  const whole = isEnd ? rest : texts.length > 1 ? "" : /^[^]{30,}[.!?\n](?=\s)/.exec(rest)?.[0] ?? "";
  if (whole) place.append(whole);
}

/**
 * Makes a button copy a text; without clipboard access, it selects the element that shows the text.
 * @param {HTMLElement} button
 * @param {HTMLElement} node
 * @param {() => string} textOf
 */
export function copies(button, node, textOf) {
  const name = button.textContent;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(textOf());
      button.textContent = "Copied";
    } catch {
      getSelection()?.selectAllChildren(node);
      button.textContent = "Selected: press Ctrl+C";
    }
    setTimeout(() => button.textContent = name, 2000);
  });
}

/** The element being pressed by a mouse button or a finger. @type {Node | null} */
let pressed = null;
for (const type of ["pointerdown", "pointermove", "pointerup", "pointercancel"]) {
  addEventListener(type, event => {
    if (type === "pointerdown") pressed = /** @type {Node} */ (event.target);
    else if (type === "pointercancel" || !(/** @type {PointerEvent} */ (event)).buttons) pressed = null;
  }, true);
}

/**
 * Waits while a part of the page is pressed; replacing or moving the element would lose the click.
 * @param {HTMLElement} part
 */
export async function released(part) {
  while (part.contains(pressed)) await new Promise(later => setTimeout(later, 50));
}

/**
 * Runs calls of `work` one at a time, for at most a tenth of the time; urgent calls are never dropped.
 * @param {() => Promise<void>} work
 */
export function paced(work) {
  let isBusy = false, isWaiting = false, free = 0;
  return async function go(/** @type {boolean} */ isUrgent) {
    if (isBusy || !isUrgent && performance.now() < free) {
      isWaiting ||= isBusy && isUrgent;
      return;
    }
    isBusy = true;
    const begun = performance.now();
    await work();
    isBusy = false;
    free = performance.now() + 9 * (performance.now() - begun);
    if (isWaiting) {
      isWaiting = false;
      await go(true);
    }
  };
}
