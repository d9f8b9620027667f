// @ts-check
// The status in the page's header, and errors below it.
import { find } from "./parts/dom.js";
import { emit, page } from "./state.js";

// Lines of a message that are shown; all of them are behind a fold.
const FIRST_LINES = 4;

/** Sets the status: what runs, or `ready`. @param {string} status */
export function say(status) {
  Object.assign(find("status"), { textContent: status, className: status.split(/[: ]/)[0] });
  emit("busy");
}

/** The status while nothing runs. */
export const rest = () => say(page.loading || (page.model ? "ready" : "starting"));

/** Removes the error of an earlier request. */
export function clearError() {
  find("fault").hidden = true;
  find("error").textContent = "";
}

/** Shows an error. A server may ask for its key. @param {any} error */
export function fail(error) {
  if (error.status === 401) {
    find("key").hidden = false;
    find("key-value").focus();
  }
  const lines = /** @type {string[]} */ (error.message.split("\n").map((/** @type {string} */ line) => line.trim())), more = lines.length - FIRST_LINES;
  find("error").textContent = `${lines.slice(0, FIRST_LINES).join(" ")}${more > 0 ? ` and ${more} more` : ""}`;
  find("error-more").hidden = more <= 0;
  find("error-lines").textContent = error.message;
  find("fault").hidden = false;
  rest();
}
