"use strict";
// The transport to a server, by its routes: what is asked, what comes back, and what went wrong in words. See engine.js for the other one.
const engine = (() => {
  // Memory of this page only.
  let key = "";
  let writing = null;

  // What went wrong, in a sentence; `status` is that of the answer, if there was one.
  class Failure extends Error {
    constructor(message, more) {
      super(message);
      Object.assign(this, more);
    }
  }

  const route = path => String(new URL(path, document.baseURI));

  // The end of an answer: `stopped` if the page itself ended it.
  async function reading(read, signal, message) {
    try {
      return await read();
    } catch {
      throw signal?.aborted ? new Failure("stopped", { stopped: true }) : new Failure(message);
    }
  }

  async function asked(path, body, signal) {
    const headers = { ...body && { "Content-Type": "application/json" }, ...key && { Authorization: `Bearer ${key}` } };
    const request = { method: body ? "POST" : "GET", headers, body: body && command.json(body), signal, cache: "no-store" };
    const answer = await reading(() => fetch(route(path), request), signal, "the server does not answer; is it still running?");
    if (!answer.ok) throw await refused(answer);
    return answer;
  }

  async function refused(answer) {
    const said = await answer.json().catch(() => null), { status } = answer;
    const message = said?.error?.message ?? `the server answered ${status} ${answer.statusText}`;
    const wait = answer.headers.get("Retry-After");
    const later = wait ? `; try again in ${wait} s` : "; try again later";
    if (status === 401) return new Failure(key ? "the key is not right; give this server's key" : "this server asks for a key", { status });
    if (status === 429) return new Failure(`the server is busy: ${message}${later}`, { status });
    if (status === 503) return new Failure(`the server cannot answer now: ${message}${later}`, { status });
    return new Failure(message, { status });
  }

  async function ask(path, body) {
    const answer = await asked(path, body);
    return reading(() => answer.json(), null, "the server broke off in the middle of its answer");
  }

  // Calls take(chunk) for each chunk of a text, until it ends or is stopped.
  async function stream(path, body, take) {
    writing?.abort();
    const { signal } = writing = new AbortController();
    const answer = await asked(path, body, signal);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "";;) {
      const { value = "", done } = await reading(() => reader.read(), signal, "the connection to the server broke off");
      // A part may end anywhere, also between two line ends.
      const events = (rest + value).split(/\r?\n\r?\n/);
      rest = events.pop();
      for (const event of events) {
        const lines = event.split(/\r?\n/).filter(line => line.startsWith("data:"));
        const data = lines.map(line => line.slice(5).replace(/^ /, "")).join("\n");
        if (data === "[DONE]") return;
        if (!data) continue;
        const said = JSON.parse(data);
        if (said.error) throw new Failure(said.error.message);
        take(said);
      }
      if (done) throw new Failure("the server ended before the text did");
    }
  }

  return {
    // Others use it too: it writes and looks when it is told to.
    isShared: true,
    opening: { prompt: "", seed: "" },
    address: () => route("v1"),

    async start() {
      const [{ id, max_model_len, meta }] = (await ask("v1/models")).data;
      const about = `${meta.n_params.toLocaleString("en")} parameters · a context of ${max_model_len} tokens`;
      // It is not one of the user's own files.
      const source = { isBuiltIn: true };
      return { name: id, title: id, about, source, config: { n_positions: max_model_len } };
    },

    ask, stream,
    stop() { writing?.abort(); },
    get hasKey() { return key !== ""; },
    setKey(value) { key = value; },
  };
})();
