// The server's routes: what is sent, what comes back, and what went wrong in words.

let key = "";
export const setKey = value => key = value;

// What went wrong: a sentence, and the status of the answer where there was one.
export class Failure extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const route = path => new URL(path, document.baseURI);
// Halves of characters, which a text area may hold, are none in JSON.
const json = value => JSON.stringify(value, (_, part) => typeof part === "string" && part.toWellFormed ? part.toWellFormed() : part);

async function asked(path, body, signal) {
  const headers = { ...body && { "Content-Type": "application/json" }, ...key && { Authorization: `Bearer ${key}` } };
  let answer;
  try {
    answer = await fetch(route(path), { method: body ? "POST" : "GET", headers, body: body && json(body), signal, cache: "no-store" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Failure("the server does not answer; is it still running?");
  }
  if (!answer.ok) throw await refused(answer);
  return answer;
}

async function refused(answer) {
  const said = await answer.json().catch(() => null);
  const message = said?.error?.message ?? `the server answered ${answer.status} ${answer.statusText}`;
  const wait = answer.headers.get("Retry-After");
  const later = wait ? `; try again in ${wait} s` : "; try again later";
  if (answer.status === 401) return new Failure(key ? "the key is not right; give this server's key" : "this server asks for a key", 401);
  if (answer.status === 429) return new Failure(`the server is busy: ${message}${later}`, 429);
  if (answer.status === 503) return new Failure(`the server cannot write now: ${message}${later}`, 503);
  return new Failure(message, answer.status);
}

// The answer to a request as one object.
export async function ask(path, body, signal) {
  const answer = await asked(path, body, signal);
  try {
    return await answer.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Failure("the server broke off in the middle of its answer");
  }
}

// Calls `take` with each object of a stream.
export async function stream(path, body, signal, take) {
  const answer = await asked(path, body, signal);
  const reader = answer.body.getReader();
  const decoder = new TextDecoder("utf-8");
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Failure("the connection to the server broke off");
    }
    // A part may end anywhere, also inside a character or between two line ends.
    rest += decoder.decode(part.value ?? new Uint8Array(), { stream: !part.done });
    const events = rest.split(/\r?\n\r?\n/);
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
    if (part.done) throw new Failure("the server ended before the text did");
  }
}

// The same request as a command. The key is never in it.
export function asCurl(body) {
  const quoted = json(body).replaceAll("'", "'\\''");
  const authorization = key ? ` \\\n  -H "Authorization: Bearer $OPENAI_API_KEY"` : "";
  return `curl -N '${route("v1/completions")}' \\\n  -H 'Content-Type: application/json'${authorization} \\\n  -d '${quoted}'`;
}

// What openai-python has no arguments for.
const EXTRA = ["top_k", "min_p", "repetition_penalty"];

// The same request as a program with openai-python.
export function asPython(body) {
  // A JSON text is a Python text; of the other values only these differ.
  const literal = value => value === true ? "True" : value === null ? "None" : json(value);
  const own = Object.entries(body).filter(([name]) => !EXTRA.includes(name)).map(([name, value]) => `    ${name}=${
    name === "stream_options" ? '{"include_usage": True}' : literal(value)},`);
  const extra = Object.entries(body).filter(([name]) => EXTRA.includes(name)).map(([name, value]) => `"${name}": ${literal(value)}`);
  if (extra.length) own.push(`    extra_body={${extra.join(", ")}},`);
  const secret = key ? "" : ', api_key="none"';
  const several = body.n > 1 ? "        print(choice.index, repr(choice.text))" : '        print(choice.text, end="", flush=True)';
  return ["from openai import OpenAI", "", `client = OpenAI(base_url=${literal(String(route("v1")))}${secret})`,
    "chunks = client.completions.create(", ...own, ")", "for chunk in chunks:", "    for choice in chunk.choices:", several].join("\n");
}
