// @ts-check
// Transport to a server through its routes: requests, answers and readable errors. See engine.js for the
// other transport.
import { json } from "./command.js";
import { Failure } from "./failure.js";
import { amountText } from "./model.js";

// Stored only in this page's memory.
let key = "";
/** @type {AbortController | null} */
let writing = null;

/** @param {string} path */
const route = path => String(new URL(path, document.baseURI));

/** @template T @param {() => Promise<T>} read @param {AbortSignal | null | undefined} signal @param {string} message @returns {Promise<T>} */
async function reading(read, signal, message) {
  try {
    return await read();
  } catch {
    if (signal?.aborted) throw new Failure("stopped", { stopped: true });
    throw new Failure(message);
  }
}

/** @param {string} path @param {any} [body] @param {AbortSignal} [signal] */
async function asked(path, body, signal) {
  const headers = { ...body && { "Content-Type": "application/json" }, ...key && { Authorization: `Bearer ${key}` } };
  /** @type {RequestInit} */
  const request = { method: body ? "POST" : "GET", headers, body: body && json(body), signal, cache: "no-store" };
  const answer = await reading(() => fetch(route(path), request), signal, "the server does not answer; is it still running?");
  if (!answer.ok) throw await refused(answer);
  return answer;
}

/** @param {Response} answer */
async function refused(answer) {
  const body = await answer.json().catch(() => null), { status } = answer;
  const message = body?.error?.message ?? `the server answered ${status} ${answer.statusText}`;
  const wait = answer.headers.get("Retry-After");
  const later = wait ? `; try again in ${wait} s` : "; try again later";
  if (status === 401) return new Failure(key ? "invalid key; enter this server's key" : "this server requires a key", { status });
  if (status === 429) return new Failure(`the server is busy: ${message}${later}`, { status });
  if (status === 503) return new Failure(`the server is unavailable: ${message}${later}`, { status });
  return new Failure(message, { status });
}

/** @param {string} path @param {any} [body] */
async function ask(path, body) {
  const answer = await asked(path, body);
  return reading(() => answer.json(), null, "the server's answer was cut off");
}

/**
 * Calls take(chunk) for each chunk of a completion, until it ends or is stopped.
 * @param {string} path
 * @param {any} body
 * @param {(chunk: any) => void} take
 */
async function stream(path, body, take) {
  writing?.abort();
  const { signal } = writing = new AbortController();
  const answer = await asked(path, body, signal);
  const reader = /** @type {ReadableStream<any>} */ (answer.body).pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const { value = "", done } = await reading(() => reader.read(), signal, "the connection to the server was lost");
    // A part may end anywhere, even between two line ends.
    const events = (rest + value).split(/\r?\n\r?\n/);
    rest = events.pop() ?? "";
    for (const event of events) {
      const lines = event.split(/\r?\n/).filter(line => line.startsWith("data:"));
      const data = lines.map(line => line.slice(5).replace(/^ /, "")).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(chunk.error.message);
      take(chunk);
    }
    if (done) throw new Failure("the server ended the stream before the completion was finished");
  }
}

/** The transport to this page's server. @type {import("./types").Engine} */
export const server = {
  isShared: true,
  address: () => route("v1"),

  async start() {
    const [{ id, max_model_len, meta }] = (await ask("v1/models")).data;
    const about = `A GPT-2 of ${amountText(meta.n_params)} parameters with a context of ${max_model_len} tokens.`;
    // The page treats the server's model as built in, because it is not one of the user's own files.
    const source = { isBuiltIn: true };
    const defaults = (await ask("props")).default_generation_settings.params;
    return { name: id, title: id, about, source, defaults, config: { n_positions: max_model_len } };
  },

  ask, stream,
  stop() { writing?.abort(); },
  get hasKey() { return key !== ""; },
  setKey(value) { key = value; },
};
