// @ts-check
// Reproduces a completion as a command for the program or as a request to a server.
import { sourceName } from "./model.js";

/** @typedef {Record<string, any>} Body */

/** Quotes one word for a POSIX shell. @param {string} text */
const quoted = text => /^[A-Za-z0-9_./:@%+=,-]+$/.test(text) && !text.startsWith("-") ? text : `'${text.replaceAll("'", "'\\''")}'`;

/**
 * Serializes a body. A text area may contain lone surrogates, which JSON cannot represent.
 * @param {any} body
 * @returns {string}
 */
export const json = body => JSON.stringify(body, (_, value) => typeof value === "string" ? /** @type {any} */ (value).toWellFormed?.() ?? value : value);

// Neutral values; the command includes them only if a checkpoint may have other defaults.
/** @type {Record<string, number>} */
const NEUTRAL = { top_p: 1, min_p: 0, repetition_penalty: 1 };

/**
 * Returns the `gpt2 generate` command for a checked request.
 * @type {(body: Body, model: import("./types").Model) => string}
 */
export function asProgram(body, { config, source, inspection }) {
  const words = ["gpt2", "generate"];
  const give = (/** @type {string} */ flag, /** @type {any} */ value) => words.push(flag, quoted(String(value)));
  const giveField = (/** @type {string} */ field) => {
    if (field in body && (!source.isBuiltIn || body[field] !== NEUTRAL[field])) give(`--${field.replaceAll("_", "-")}`, body[field]);
  };
  if (!source.isBuiltIn) give("--model", sourceName(source, inspection));
  if (source.tokenizer) give("--tokenizer", source.tokenizer);
  if (source.dtype) give("--dtype", source.dtype);
  give("--max-new-tokens", body.max_tokens);
  if (body.n) give("--num-return-sequences", body.n);
  if (body.temperature === 0) {
    words.push("--greedy");
  } else {
    if (body.seed !== undefined) give("--seed", BigInt.asUintN(64, BigInt(body.seed)));
    give("--temperature", body.temperature);
    // The program defaults to top-k 50.
    give("--top-k", body.top_k || config.vocab_size);
    giveField("top_p");
    giveField("min_p");
  }
  for (const field of ["repetition_penalty", "presence_penalty", "frequency_penalty"]) giveField(field);
  // The flag and its text are one word, because the text may begin with a hyphen.
  for (const stop of body.stop ?? []) words.push(`--stop=${quoted(stop)}`);
  // Words after `--` are text even if they begin with a hyphen.
  if (body.prompt.startsWith("-")) words.push("--");
  words.push(quoted(body.prompt));
  return words.join(" ");
}

/**
 * Returns the `curl` command for a request to the server at an address. The key is never included.
 * @type {(body: Body, address: string, hasKey?: boolean) => string}
 */
export function asCurl(body, address, hasKey) {
  const authorization = hasKey ? ` \\\n  -H "Authorization: Bearer $OPENAI_API_KEY"` : "";
  return `curl -N '${address}/completions' \\\n  -H 'Content-Type: application/json'${authorization} \\\n  -d '${json(body).replaceAll("'", "'\\''")}'`;
}

// Fields without an argument in openai-python.
const EXTRA = ["top_k", "min_p", "repetition_penalty"];

/**
 * Returns a Python program with openai-python for the same request.
 * @type {(body: Body, address: string, hasKey?: boolean) => string}
 */
export function asPython(body, address, hasKey) {
  // JSON strings are valid Python strings; among the other values, only these differ.
  const literal = (/** @type {any} */ value) => value === true ? "True" : value === null ? "None" : json(value);
  const own = Object.entries(body).filter(([name]) => !EXTRA.includes(name)).map(([name, value]) => `    ${name}=${literal(value)},`);
  const extra = Object.entries(body).filter(([name]) => EXTRA.includes(name)).map(([name, value]) => `"${name}": ${literal(value)}`);
  const secret = hasKey ? "" : ', api_key="none"';
  const several = body.n > 1 ? "        print(choice.index, repr(choice.text))" : '        print(choice.text, end="", flush=True)';
  return ["from openai import OpenAI", "", `client = OpenAI(base_url=${literal(address)}${secret})`, "chunks = client.completions.create(", ...own,
    `    extra_body={${extra.join(", ")}},`, ")", "for chunk in chunks:", "    for choice in chunk.choices:", several].join("\n");
}
