// @ts-check
// DOM elements, keys and small helpers for all parts of the page.

/** Whether the user prefers a dark color scheme. */
export const dark = matchMedia("(prefers-color-scheme: dark)");

/** @type {(id: string) => any} */
export const find = id => document.getElementById(id);

/**
 * Creates an element.
 *
 * Accessibility attributes (`role`, `ariaLabel`) and handlers (`onclick`) are properties too.
 *
 * @param {string} name
 * @param {Record<string, any>} [properties]
 * @param {...(Node | string)} children
 * @returns {any}
 */
export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** @type {(value: number, low: number, high: number) => number} */
export const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

/**
 * Returns an arrow key's direction as (down, right); undefined for other keys and browser shortcuts.
 * @param {KeyboardEvent} event
 * @returns {[number, number] | undefined}
 */
export function direction(event) {
  /** @type {Record<string, [number, number]>} */
  const ways = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -9999], End: [0, 9999] };
  const way = ways[event.key];
  if (!way || event.ctrlKey || event.altKey || event.metaKey) return undefined;
  event.preventDefault();
  return way;
}

/**
 * Moves the focus among elements with the arrow keys; only one is in the tab order.
 *
 * Returns a function that selects an element.
 *
 * @param {any[]} ones
 * @param {(n: number) => void} onMove
 * @param {(n: number) => void} [onAct] called for the Enter key
 */
export function roving(ones, onMove, onAct) {
  ones.forEach((one, n) => one.onkeydown = (/** @type {KeyboardEvent} */ event) => {
    if (onAct && event.key === "Enter") onAct(n);
    const way = direction(event);
    if (!way) return;
    const next = clamp(n + way[0] + way[1], 0, ones.length - 1);
    onMove(next);
    ones[next].focus();
  });
  return (/** @type {number} */ chosen) => ones.forEach((one, n) => one.tabIndex = n === chosen ? 0 : -1);
}

/**
 * Draws now, and again when the page's width or color scheme changes.
 * @param {() => void} draw
 */
export function redrawing(draw) {
  let waiting = 0;
  draw();
  fitFrame();
  dark.addEventListener("change", draw);
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(draw);
  });
}

/**
 * Stores a selection in the fragment of the page's address.
 * @param {URLSearchParams | string} selection
 */
export function keepInAddress(selection) {
  // In a notebook's frame, the page has no address of its own, and this call throws.
  try { history.replaceState(0, "", `#${selection}`); } catch { /* only the selection is lost */ }
}

/** Makes a notebook's frame as high as its page. Frames from another origin are inaccessible. */
function fitFrame() {
  try {
    const frame = /** @type {HTMLElement | null} */ (window.frameElement);
    if (!frame?.hasAttribute("data-fit")) return;
    new ResizeObserver(() => {
      const bar = innerHeight - document.documentElement.clientHeight;
      frame.style.height = `${Math.ceil(document.body.getBoundingClientRect().height) + bar}px`;
    }).observe(document.body);
  } catch { /* the frame keeps its height */ }
}
