// Tests of the book's live figures, opened from files and offline. Values are compared with the program's.
// GPT2_WRITE_PICTURES=1 writes the static pictures to docs/src/pictures/live instead of comparing them.
import { execFileSync } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { PROGRAM, ROOT, expect, test as base } from "./support.mjs";

const BOOK = resolve(process.env.GPT2_BOOK ?? join(ROOT, "target/site/docs/book"));
const PICTURES = join(ROOT, "docs/src/pictures/live");
const SENTENCE = "A red ball and a blue cup, a red";
const OTHER = "The dog saw a small bird, and the dog saw a";
const CHAPTERS = [
  "tokens", "embeddings", "dot-product", "attention-weights", "queries-keys-values", "causal-mask", "multi-head", "block", "gpt2", "sampling", "cache", "learning",
];

const program = (...flags) => execFileSync(PROGRAM, flags, { encoding: "utf8", maxBuffer: 1 << 28, stdio: ["ignore", "pipe", "inherit"] });
const tokensOf = (text) => JSON.parse(program("tokenize", text, "--json")).tokens;

// Returns the program's activations for a text, keyed by hook point, from `gpt2 cache`.
function recorded(text, sites) {
  const folder = mkdtempSync(join(tmpdir(), "gpt2-")), file = join(folder, "values.safetensors");
  program("cache", text, "--device", "cpu", "--sites", sites, "--out", file);
  const bytes = readFileSync(file), start = 8 + Number(bytes.readBigUInt64LE(0)), found = {};
  rmSync(folder, { recursive: true });
  for (const [name, { dtype, shape, data_offsets: offsets }] of Object.entries(JSON.parse(bytes.toString("utf8", 8, start)))) {
    if (dtype !== "F32") continue;
    const data = new Float32Array(bytes.buffer.slice(...offsets.map((offset) => bytes.byteOffset + start + offset)));
    found[name] = { shape: shape.slice(1), data };
  }
  return found;
}

// Returns the values at these indices on the first axes.
function part({ shape, data }, ...place) {
  const size = shape.slice(place.length).reduce((product, count) => product * count, 1);
  const start = place.reduce((offset, index, axis) => offset * shape[axis] + index, 0) * size;
  return [...data.subarray(start, start + size)];
}

const dot = (a, b) => a.reduce((sum, value, n) => sum + value * b[n], 0);

// A chapter with its figure.
class Chapter {
  constructor(page, book) {
    Object.assign(this, { page, book, requests: [], complaints: [] });
    page.on("request", (request) => this.requests.push(request.url()));
    page.on("console", (message) => { if (message.type() === "error") this.complaints.push(message.text()); });
    page.on("pageerror", (error) => this.complaints.push(error.stack));
  }

  get figure() { return this.page.locator("figure.live"); }
  get sentence() { return this.figure.locator(".live-sentence input"); }
  get readout() { return this.figure.locator(".live-readout"); }
  control(name) { return this.figure.locator(`[data-control="${name}"]`); }
  cell(...place) { return this.figure.locator(`[data-cell="${place}"]`).first(); }

  async open(name) {
    await this.page.goto(pathToFileURL(join(this.book, "learn", `${name}.html`)).href);
    await this.figure.scrollIntoViewIfNeeded();
    await expect(this.figure).toHaveAttribute("data-drawn", /./, { timeout: 120_000 });
  }

  async write(text) {
    await this.sentence.fill(text);
    await expect(this.figure).toHaveAttribute("data-drawn", text);
  }

  // Compares a number in the readout with the program's, to the digits shown.
  async shows(pattern, expected) {
    let found;
    await expect(async () => {
      found = pattern.exec(await this.readout.textContent());
      expect(found, String(pattern)).not.toBeNull();
      const digits = found[1].split(".")[1]?.length ?? 0;
      expect(Math.abs(Number(found[1].replace("−", "-").replaceAll(",", "")) - expected), `${found[0]}, expected ${expected}`).toBeLessThanOrEqual(0.51 * 10 ** -digits + 1e-4);
    }).toPass({ timeout: 30_000 });
  }
}

const test = base.extend({
  // A chapter must report no errors and request nothing from elsewhere.
  chapter: async ({ page }, use) => {
    const chapter = new Chapter(page, BOOK);
    await use(chapter);
    expect(chapter.complaints).toEqual([]);
    expect(chapter.requests.filter((url) => !/^(file|blob|data):/.test(url))).toEqual([]);
  },
});

const NUMBER = "(−?[\\d,]+(?:\\.\\d+)?)";
const layer = (name, number = 0) => `blocks.${number}.${name}`;

// Changes each figure and checks a value; `values(sites)` records the program's activations for the sentence.
const CHECKS = {
  async tokens(chapter, { tokens }) {
    const last = tokens.at(-1);
    await chapter.shows(/^(\d+) tokens/, tokens.length);
    await chapter.shows(/has the id (\d+)/, last.id);
    for (const [n, { id }] of tokens.entries()) await expect(chapter.cell(0, n, -1)).toContainText(String(id));
    await chapter.cell(0, 1, -1).click();
    await chapter.shows(/has the id (\d+)/, tokens[1].id);
    await chapter.shows(/takes (\d+) merges/, tokens[1].bytes.length - 1);
  },
  async embeddings(chapter, { last, values }) {
    await chapter.control("channel").fill("5");
    const found = values("hook_embed,hook_pos_embed,blocks.0.hook_resid_pre"), at = (name) => part(found[name], last)[5];
    await chapter.shows(new RegExp(`: ${NUMBER} \\+`), at("hook_embed"));
    await chapter.shows(new RegExp(`\\+ ${NUMBER} =`), at("hook_pos_embed"));
    await chapter.shows(new RegExp(`= ${NUMBER}\\.$`), at("blocks.0.hook_resid_pre"));
    const strip = await chapter.figure.locator("[data-drag]").first().boundingBox();
    await chapter.page.mouse.click(strip.x + strip.width - 2, strip.y + strip.height - 6);
    await chapter.shows(/^Number (\d+)/, found.hook_embed.shape[1] - 1);
  },
  async "dot-product"(chapter, { last, values }) {
    await chapter.control("layer").selectOption("1");
    await chapter.cell(last, 2, 0).click();
    const found = values("q1,k1");
    await chapter.shows(new RegExp(`= ${NUMBER}\\.$`), dot(part(found[layer("attn.hook_q", 1)], last, 0), part(found[layer("attn.hook_k", 1)], 2, 0)));
  },
  async "attention-weights"(chapter, { last, values }) {
    const found = values("attn_scores0,pattern0"), place = [0, last];
    await chapter.cell(1, 0, 0).click();
    await chapter.shows(new RegExp(`the weight ${NUMBER}\\. The`), part(found[layer("attn.hook_pattern")], ...place)[1]);
    await chapter.control("sharpness").fill("1");
    const parts = part(found[layer("attn.hook_attn_scores")], ...place).map((score) => Math.exp(score / 10));
    await chapter.shows(new RegExp(`the weight ${NUMBER}\\. The`), parts[1] / parts.reduce((a, b) => a + b));
  },
  async "queries-keys-values"(chapter, { last, values }) {
    const found = values("attn_scores0,pattern0"), handle = chapter.figure.getByRole("slider", { name: "key token" });
    const [from, to] = [await handle.boundingBox(), await chapter.cell(0, 2, -1).boundingBox()];
    await chapter.page.mouse.move(from.x + from.width / 2, from.y + from.height / 2);
    await chapter.page.mouse.down();
    await chapter.page.mouse.move(to.x + to.width / 2, to.y + to.height, { steps: 5 });
    await chapter.page.mouse.up();
    await expect(handle).toHaveAttribute("aria-valuenow", "2");
    await handle.press("ArrowRight");
    await expect(handle).toHaveAttribute("aria-valuenow", "3");
    await expect(handle).toBeFocused();
    await chapter.shows(new RegExp(`have the score ${NUMBER};`), part(found[layer("attn.hook_attn_scores")], 0, last)[3]);
    await chapter.shows(new RegExp(`its weight is ${NUMBER}\\.$`), part(found[layer("attn.hook_pattern")], 0, last)[3]);
    await chapter.figure.getByRole("slider", { name: "query token" }).press("Home");
    await expect(chapter.readout).toContainText("its weight is 0");
  },
  async "causal-mask"(chapter, { text, last, values }) {
    const found = values("pattern0,q0,k0"), row = part(found[layer("attn.hook_pattern")], 0, 2);
    await chapter.cell(2, 1, 0).click();
    await chapter.shows(new RegExp(`the weight ${NUMBER}\\.`), row[1]);
    // The last word has one token in both texts.
    await chapter.write(text.replace(/ \S+$/, " ball"));
    await expect(chapter.readout).toContainText(`Your last edit changed 1 of ${last + 1} rows.`);
    await chapter.control("masked").uncheck();
    await expect(chapter.readout).toContainText(`Your last edit changed ${last + 1} of ${last + 1} rows.`);
  },
  async "multi-head"(chapter, { last, values }) {
    await chapter.cell(last, 1, 0).click();
    const pattern = values("pattern0")[layer("attn.hook_pattern")];
    for (let head = 0; head < pattern.shape[0]; head++) await chapter.shows(new RegExp(`0\\.${head}: ${NUMBER}`), part(pattern, head, last)[1]);
  },
  async block(chapter, { last, values, layers }) {
    const name = layer("hook_resid_post", layers - 1), final = part(values(name)[name], last), length = Math.sqrt(dot(final, final));
    await chapter.shows(new RegExp(`final stream: ${NUMBER}\\.$`), length);
    await chapter.cell(3, 0, 0).click();
    const added = part(values(layer("hook_mlp_out"))[layer("hook_mlp_out")], last);
    await chapter.shows(new RegExp(`MLP 0 adds ${NUMBER}\\.`), dot(added, final) / length);
  },
  async gpt2(chapter, { text, last, layers }) {
    const lens = JSON.parse(program("look", "lens", text, "--json", "--device", "cpu"));
    await chapter.shows(new RegExp(`probability ${NUMBER}\\.$`), lens.values[layers * (last + 1) + last]);
    await chapter.cell(layers - 1, 0, 0).click();
    await chapter.shows(new RegExp(`probability ${NUMBER}\\.$`), lens.values[last + 1]);
    await expect(chapter.readout).toContainText(`is "${lens.texts[last + 1]}"`);
  },
  async sampling(chapter, { text, server }) {
    const ask = (body) => server.ask("look/next", { prompt: text, top: 12, temperature: 1, top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1, no_repeat_ngram_size: 0, ...body });
    const plain = await ask({});
    await chapter.shows(new RegExp(`has the probability ${NUMBER};`), plain.tokens[0].probability);
    await chapter.control("temperature").fill("2");
    await chapter.control("top_k").fill("7");
    const next = await ask({ temperature: 2, top_k: 7 });
    await chapter.shows(new RegExp(`^${NUMBER} of`), 7);
    await chapter.shows(new RegExp(`has the probability ${NUMBER};`), next.tokens[0].probability);
    await chapter.shows(new RegExp(`alone gives it ${NUMBER}\\.$`), plain.tokens[0].probability);
  },
  async cache(chapter) {
    const each = JSON.parse(program("inspect", "--model", "built-in", "--json")).kv_bytes_per_token;
    await chapter.control("steps").fill("4");
    await chapter.shows(new RegExp(`= ${NUMBER} bytes`), 4 * each.f32);
    await chapter.control("numbers").selectOption("q8");
    await chapter.shows(new RegExp(`= ${NUMBER} bytes`), 4 * each.q8);
    await expect(chapter.readout).toContainText("16 scores");
    await expect(chapter.readout).toContainText(/whole sentence by 0\.$/);
  },
  async learning(chapter, { values, layers }) {
    const history = JSON.parse(readFileSync(join(ROOT, "models/stories/history.json"), "utf8"));
    await chapter.control("checkpoint").fill("2");
    await chapter.shows(new RegExp(`loss ${NUMBER} nats`), history[2].loss_per_byte);
    const name = layer("attn.hook_pattern", layers - 1), pattern = values(name)[name], count = pattern.shape[1];
    const mean = Array.from({ length: count - 1 }, (_, n) => part(pattern, 0, n + 1)[n]).reduce((a, b) => a + b) / (count - 1);
    await expect(chapter.cell(layers - 1, 0, 0)).toContainText(mean.toFixed(2));
  },
};

for (const name of CHAPTERS) {
  test(`${name}: figure matches the program on an edited sentence`, async ({ chapter, server }) => {
    await chapter.open(name);
    await chapter.write(OTHER);
    const tokens = tokensOf(OTHER), { config } = JSON.parse(program("inspect", "--model", "built-in", "--json"));
    await CHECKS[name](chapter, { text: OTHER, tokens, last: tokens.length - 1, layers: config.n_layer, server, values: (sites) => recorded(OTHER, sites) });
  });
}

test("a chapter loads the engine when its figure comes into view, and draws soon after", async ({ chapter }) => {
  const engine = () => chapter.requests.filter((url) => url.includes("engine.js")).length;
  await chapter.page.setViewportSize({ width: 1200, height: 150 });
  await chapter.page.goto(pathToFileURL(join(BOOK, "learn/tokens.html")).href);
  await chapter.page.waitForLoadState("networkidle");
  expect(engine()).toBe(0);
  await chapter.figure.scrollIntoViewIfNeeded();
  await expect(chapter.figure).toHaveAttribute("data-drawn", SENTENCE, { timeout: 120_000 });
  expect(engine()).toBe(1);
  const [loaded, drawn] = await chapter.page.evaluate(() => ["gpt2-engine", "gpt2-figure"].map((name) => performance.getEntriesByName(name)[0].startTime));
  expect(drawn - loaded).toBeLessThan(2000);
});

test("all chapters share the sentence", async ({ chapter }) => {
  await chapter.open("tokens");
  await chapter.write(OTHER);
  await chapter.open("gpt2");
  await expect(chapter.figure).toHaveAttribute("data-drawn", OTHER);
  await chapter.figure.getByRole("button", { name: "reset" }).click();
  await expect(chapter.figure).toHaveAttribute("data-drawn", SENTENCE);
  await chapter.sentence.fill("");
  await expect(chapter.readout).toHaveText("Type a sentence.");
});

test("a book without an engine has static pictures", async ({ chapter }) => {
  const file = join(BOOK, "learn/static-copy.html");
  writeFileSync(file, readFileSync(join(BOOK, "learn/gpt2.html"), "utf8").replace(/<meta name="gpt2-engine"[^>]*>/, ""));
  try {
    await chapter.page.goto(pathToFileURL(file).href);
    await chapter.figure.scrollIntoViewIfNeeded();
    await expect(chapter.figure.locator("img")).toBeVisible();
    await expect(chapter.readout).toHaveText(/^A static picture\./);
  } finally {
    rmSync(file);
  }
});

test("figures fit a phone and are accessible in light and dark themes", async ({ chapter }) => {
  const axe = readFileSync(new URL("node_modules/axe-core/axe.min.js", import.meta.url), "utf8");
  await chapter.page.emulateMedia({ reducedMotion: "reduce" });
  await chapter.page.setViewportSize({ width: 360, height: 740 });
  for (const [n, name] of CHAPTERS.entries()) {
    await chapter.page.addInitScript((theme) => localStorage.setItem("mdbook-theme", theme), n % 2 ? "navy" : "light");
    await chapter.open(name);
    const box = await chapter.figure.evaluate((figure) => [figure.scrollWidth, figure.clientWidth, document.documentElement.scrollWidth]);
    expect(box[0], name).toBeLessThanOrEqual(box[1] + 1);
    await chapter.page.evaluate(axe);
    const { violations } = await chapter.page.evaluate(() => axe.run("figure.live", { resultTypes: ["violations"] }));
    const serious = violations.filter((one) => ["serious", "critical"].includes(one.impact));
    expect(serious.map((one) => `${one.id}: ${one.nodes.map((node) => node.html).join(" ")}`), name).toEqual([]);
  }
});

for (const name of CHAPTERS) {
  test(`${name}: static picture is up to date`, async ({ chapter }) => {
    const css = readFileSync(join(ROOT, "docs/live/figures.css"), "utf8").split("/* End of the pictures. */")[0];
    await chapter.open(name);
    const picture = await chapter.figure.evaluate((figure, css) => {
      const svg = figure.querySelector("svg.live-picture").cloneNode(true), make = (kind) => document.createElementNS("http://www.w3.org/2000/svg", kind);
      const style = make("style"), back = make("rect"), { width, height } = svg.viewBox.baseVal;
      for (const title of svg.querySelectorAll("title")) title.remove();
      style.textContent = `\n${css}`;
      Object.entries({ width, height, class: "back" }).forEach(([key, value]) => back.setAttribute(key, value));
      svg.prepend(style, back);
      return `${new XMLSerializer().serializeToString(svg).replaceAll("><g", ">\n<g")}\n`;
    }, css);
    const file = join(PICTURES, `${name}.svg`);
    if (process.env.GPT2_WRITE_PICTURES) writeFileSync(file, picture);
    expect(existsSync(file) && readFileSync(file, "utf8") === picture, `${file} is out of date; set GPT2_WRITE_PICTURES=1 to write it`).toBe(true);
  });
}
