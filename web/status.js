// @ts-check
// The status in the page's header, and errors below it.
import { find } from "./parts/dom.js";
import { emit, page } from "./state.js";

// Lines of an error message that are visible; a fold contains the complete message.
const FIRST_LINES = 4;

/** Sets the status: the current activity, or `ready`. @param {string} status */
export function say(status) {
  Object.assign(find("status"), { textContent: status, className: status.split(/[: ]/)[0] });
  emit("busy");
}

/** Sets the status of an idle page. */
export const rest = () => say(page.loading || (page.model ? "ready" : "starting"));

/** Removes the error from an earlier request. */
export function clearError() {
  find("fault").hidden = true;
  find("error").textContent = "";
}

/** Shows an error. With a server, it may ask for the API key. @param {any} error */
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
