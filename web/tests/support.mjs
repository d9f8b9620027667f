// Code shared by the page's tests: the program as a server and as a command, and the opened page. Tests
// compare the page with the server's answers.
import { execFileSync, spawn } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { delimiter, dirname, join, resolve } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";
import { test as base, expect } from "@playwright/test";

export const ROOT = resolve(dirname(fileURLToPath(import.meta.url)), "../..");
export const PROGRAM = process.env.GPT2_PROGRAM ?? join(ROOT, "target/debug/gpt2");
export const WEB = resolve(process.env.GPT2_WEB ?? join(ROOT, "web/dist"));
export const PATH = `${dirname(PROGRAM)}${delimiter}${process.env.PATH}`;

// Returns the first of these programs on the PATH.
const installed = (...names) => names.flatMap((name) => process.env.PATH.split(delimiter).map((folder) => join(folder, name))).find(existsSync);

// Returns the system's Chromium.
export function chromium() {
  const browser = process.env.CHROMIUM ?? installed("chromium", "chromium-browser", "google-chrome", "google-chrome-stable");
  if (!browser) throw new Error(`no browser found; install Chromium, or set CHROMIUM to its path`);
  return browser;
}

// Returns Firefox if it is installed.
export const firefox = () => process.env.FIREFOX ?? installed("firefox-esr", "firefox");

// From this prompt, greedy decoding of the built-in model reaches the end of its context.
export const ENDLESS = "Hark";

// Default sampling options of the built-in model.
const { temperature, top_k, min_p, repetition_penalty } = JSON.parse(readFileSync(join(ROOT, "models/stories/generation_config.json"), "utf8"));
export const DEFAULTS = { temperature, top_k, min_p, repetition_penalty };

// Runs a command from the page and returns its output.
export const printed = (command, cwd = ROOT) =>
  execFileSync("sh", ["-c", command], { cwd, env: { ...process.env, PATH }, encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] });

// A `gpt2 serve` process with the built-in model and these flags.
export class Server {
  static async start(...flags) {
    const server = new Server();
    server.child = spawn(PROGRAM, ["serve", "--port", "0", "--device", "cpu", ...flags], { stdio: ["ignore", "pipe", "ignore"] });
    server.url = await new Promise((found, failed) => {
      server.child.stdout.once("data", (line) => found(String(line).trim()));
      server.child.once("exit", (code) => failed(new Error(`gpt2 serve exited with code ${code}`)));
    });
    return server;
  }

  async ask(path, body) {
    const answer = await fetch(`${this.url}/${path}`, body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    return answer.json();
  }

  // Returns the completion for a prompt; greedy by default.
  async text(prompt, count, settings = { temperature: 0 }) {
    return (await this.ask("v1/completions", { prompt, max_tokens: count, ...settings })).choices[0].text;
  }

  async metric(name) {
    const metrics = await (await fetch(`${this.url}/metrics`)).text();
    return Number(new RegExp(`^${name} (.*)$`, "m").exec(metrics)[1]);
  }

  stop() {
    this.child.kill("SIGKILL");
    return new Promise((ended) => this.child.once("exit", ended));
  }
}

// The page, with access to its controls by name.
export class Gpt2Page {
  constructor(page, transport, url) {
    Object.assign(this, { page, transport, url, complaints: [], expected: [], asked: [] });
    page.on("console", (message) => { if (message.type() === "error") this.complaints.push(message.text()); });
    page.on("pageerror", (error) => this.complaints.push(error.stack));
    page.on("request", (request) => this.asked.push(request.url()));
  }

  at(name) { return this.page.getByTestId(name); }
  find(selector) { return this.page.locator(selector); }
  text(name = "text") { return this.at(name).textContent(); }

  async open(fragment = "") {
    // Opens another page first, because a new fragment alone does not reload the page.
    await this.page.goto("about:blank");
    await this.page.goto(fragment ? `${this.url}#${fragment}` : this.url);
    await this.ready();
  }

  // The timeout is long, because a busy machine loads and generates slowly.
  async ready() { await expect(this.at("status")).toHaveText(/^ready/, { timeout: 120_000 }); }
  // Waits until the view is drawn; it is not drawn while a mouse button is down.
  async looked() { await expect(this.find("#inside")).toHaveAttribute("aria-busy", "false"); }
  async error(text) { await expect(this.at("error")).toHaveText(text); }

  // Opens the fold or the dialog that contains an element.
  async reveal(name) {
    const place = await this.at(name).evaluate((one) => {
      for (let fold = one.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
      return one.closest("dialog:not([open])") ? "dialog" : document.querySelector("dialog[open]") && !one.closest("dialog") ? "page" : "";
    });
    if (place === "dialog") await this.at("picker-open").click();
    if (place === "page") await this.at("picker-close").click();
    return this.at(name);
  }

  // Fills text fields, sets checkboxes and selects list entries.
  async set(values) {
    for (const [name, value] of Object.entries(values)) {
      const field = await this.reveal(name);
      if (typeof value === "boolean") await field.setChecked(value);
      else if (await field.evaluate((one) => one.tagName === "SELECT")) await field.selectOption(value);
      else await field.fill(String(value));
    }
  }

  async click(name) { await (await this.reveal(name)).click(); }

  // Presses Generate and returns the text.
  async generate(values = {}) {
    await this.set(values);
    await this.click("write");
    await this.ready();
    return this.text();
  }

  greedily(prompt, count) { return this.generate({ prompt, "max-new-tokens": count, greedy: true }); }
}

export const test = base.extend({
  transport: ["server", { option: true, scope: "worker" }],
  // Playwright drives Firefox through WebDriver BiDi. Firefox 153 lacks the BiDi command that selects light
  // or dark mode, which only the Chromium tests use.
  browser: [async ({ browser, browserName }, use) => {
    if (browserName === "firefox") {
      const session = Object.getPrototypeOf(browser._connection.toImpl(browser)._browserSession), { send } = session;
      session.send = function (method, ...rest) { return method === "emulation.setMediaFeaturesOverride" ? Promise.resolve({}) : send.call(this, method, ...rest); };
    }
    await use(browser);
  }, { scope: "worker" }],
  // A server with the built-in model, to compare with and to open.
  server: [async ({}, use) => {
    const server = await Server.start();
    await use(server);
    await server.stop();
  }, { scope: "worker" }],
  // The page before it is opened. It must report only expected errors and request nothing from other origins.
  unopened: async ({ page, server, transport }, use) => {
    const url = transport === "server" ? `${server.url}/` : pathToFileURL(join(WEB, "gpt2.html")).href;
    const gpt2 = new Gpt2Page(page, transport, url);
    await use(gpt2);
    expect(gpt2.complaints.filter((line) => !gpt2.expected.some((words) => line.includes(words)))).toEqual([]);
    const own = transport === "server" ? server.url : "file:";
    expect(gpt2.asked.filter((url) => ![own, "blob:", "data:", "about:"].some((beginning) => url.startsWith(beginning)))).toEqual([]);
  },
  gpt2: async ({ unopened }, use) => {
    await unopened.open();
    await use(unopened);
  },
});

export { expect };

// Returns the cells of a table's rows, without the labels.
export const cells = (table) => table.evaluate((node) => [...node.querySelectorAll("tr")].filter((row) => row.querySelector("td"))
  .map((row) => [...row.querySelectorAll("td")].map((cell) => cell.textContent)));

export function expectClose(found, expected, tolerance = 1e-3) {
  expect(found.length).toBe(expected.length);
  found.forEach((value, n) => expect(Math.abs(value - expected[n]), `${n}: ${value}, expected ${expected[n]}`).toBeLessThanOrEqual(tolerance));
}

// Returns a token as the page shows it.
export const shown = (token) => token.replaceAll(" ", "·").replaceAll("\n", "↵");
