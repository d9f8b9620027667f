// Tests of the page that run with both transports.
import { readFileSync } from "node:fs";
import { DEFAULTS, ENDLESS, cells, expect, expectClose, printed, shown, test } from "./support.mjs";

// Characters of one to four bytes, and one that consists of two code points.
const WIDE = `Mia: 日本語 😀 e\u0301\n${ENDLESS}`;
// Each view, and an element that exists once the view is drawn.
const VIEWS = [["attention", "#report-values td"], ["lens", "#report-values td"], ["head", "#head-steps > li"], ["features", "#feature-texts span"], ["graph", "#graph-field circle"]];
const MERCY = "The quality of mercy is not strained,";

test("completions match the program", async ({ gpt2, server }) => {
  const text = await gpt2.greedily(WIDE, 40);
  expect(text).toBe(await server.text(WIDE, 40));
  await expect(gpt2.at("numbers")).toHaveText(/^40 new tokens · [\d.]+ tokens\/s · first after [\d.]+ m?s · ended at the maximum length.* · seed \d+$/);
  const { count } = await server.ask("tokenize", { prompt: WIDE + text });
  await expect(gpt2.at("count")).toHaveText(`${count} of 512 tokens`);
  await gpt2.set({ greedy: false });
  for (const [seed, temperature, top_k, top_p] of [[12345, 1.3, 0, 0.9], [0, 0.5, 3, 1]]) {
    const settings = { seed, temperature, "top-k": top_k, "top-p": top_p, "max-new-tokens": 60, prompt: "Once there was" };
    expect(await gpt2.generate(settings)).toBe(await server.text("Once there was", 60, { seed, temperature, top_k, top_p }));
  }
  await gpt2.set({ "min-p": 0.02, repetition: 1.2, presence: 0.5, frequency: 0.3, stops: "ow\n\\n\\n" });
  const further = { min_p: 0.02, repetition_penalty: 1.2, presence_penalty: 0.5, frequency_penalty: 0.3, stop: ["ow", "\n\n"] };
  expect(await gpt2.generate()).toBe(await server.text("Once there was", 60, { seed: 0, temperature: 0.5, top_k: 3, ...further }));
});

test("the content security policy blocks requests to other origins", async ({ gpt2 }) => {
  gpt2.expected = ["Content Security Policy"];
  const refused = await gpt2.page.evaluate(async () => {
    const refused = [];
    addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
    fetch("https://example.org/").catch(() => {});
    new Image().src = "https://example.org/a.png";
    navigator.sendBeacon("https://example.org/");
    try { new WebSocket("wss://example.org/"); } catch { /* refused */ }
    while (refused.length < 4) await new Promise((later) => setTimeout(later, 10));
    return refused.sort();
  });
  expect(refused).toEqual(["connect-src", "connect-src", "connect-src", "img-src"]);
  gpt2.asked = gpt2.asked.filter((url) => !url.includes("example.org"));
});

test("invalid settings are reported", async ({ gpt2 }) => {
  gpt2.expected = ["400"];
  for (const [name, value, message] of [
    ["temperature", "3", "Temperature: enter a number from 0 to 2"],
    ["temperature", "", "Temperature: enter a number from 0 to 2"],
    ["top-p", "1.5", "Top-p: enter a number from 0.01 to 1"],
    ["seed", "many", "Seed: enter a whole number up to 9007199254740991, or leave it empty for a new one each time"],
  ]) {
    const before = await gpt2.at(name).inputValue();
    await gpt2.set({ [name]: value });
    // Invalid settings produce neither a command nor a link.
    await gpt2.reveal("not-a-request");
    await expect(gpt2.at("not-a-request")).toHaveText(`These settings are invalid. ${message}`);
    await expect(gpt2.at("copy")).toBeDisabled();
    if (name !== "seed") await expect(gpt2.page).not.toHaveURL(new RegExp(`${name}=`));
    await gpt2.click("write");
    await gpt2.error(message);
    await gpt2.ready();
    await gpt2.set({ [name]: before });
  }
  await gpt2.set({ prompt: "", "max-new-tokens": 1000 });
  await expect(gpt2.at("room")).toHaveText("512 more fit");
  await gpt2.set({ prompt: "One day ".repeat(300) });
  await expect(gpt2.at("count")).toHaveText(/^\d+ of 512 tokens$/);
  await expect(gpt2.at("room")).toHaveText(/^\d+ too many$/);
  await expect(gpt2.find("#next-about")).toContainText("512");
  await gpt2.set({ prompt: "One day", "max-new-tokens": 12 });
  await gpt2.click("write");
  await gpt2.ready();
  await expect(gpt2.at("error")).toBeHidden();
});

test("each completion uses a new seed unless one is entered, and can be undone", async ({ gpt2, server }) => {
  const first = await gpt2.generate({ prompt: "Once there was", seed: 7, "max-new-tokens": 12 });
  expect(first).toBe(await server.text("Once there was", 12, { seed: 7, ...DEFAULTS }));
  expect(await gpt2.generate()).toBe(first);
  const seeds = new Set();
  for (let n = 0; n < 3; n++) {
    await gpt2.generate({ seed: "" });
    seeds.add(/seed (\d+)$/.exec(await gpt2.text("numbers"))[1]);
    await expect(gpt2.at("seed")).toHaveValue("");
  }
  expect(seeds.size).toBe(3);
  const second = await gpt2.text();
  expect(second).not.toBe(first);
  // The seed of the last completion can be kept.
  await gpt2.click("keep-seed");
  expect(seeds.has(await gpt2.at("seed").inputValue())).toBe(true);
  expect(await gpt2.generate()).toBe(second);
  for (let n = 0; n < 3; n++) await gpt2.click("undo");
  const third = await gpt2.text();
  await gpt2.click("redo");
  const fourth = await gpt2.text();
  expect(fourth).not.toBe(third);
  await gpt2.find("#text [tabindex='0']").press("Control+z");
  expect(await gpt2.text()).toBe(third);
  await gpt2.find("#text [tabindex='0']").press("Control+y");
  expect(await gpt2.text()).toBe(fourth);
  // The keyboard shortcut still undoes typing.
  await gpt2.at("prompt").press("End");
  await gpt2.at("prompt").pressSequentially(" more");
  await gpt2.at("prompt").press("Control+z");
  expect((await gpt2.at("prompt").inputValue()).length).toBeLessThan("Once there was more".length);
});

test("stopping keeps the partial text, which can be continued", async ({ gpt2, server }) => {
  await gpt2.set({ prompt: ENDLESS, "max-new-tokens": 480, greedy: true });
  const whole = await server.text(ENDLESS, 480);
  const isCounted = () =>
    expect.poll(() => server.metric("gpt2_cancelled_total"), { timeout: 2000 }).toBeGreaterThanOrEqual(1).then(() => true, () => false);
  let text, isCancelled = false;
  // Retry, because a fast server may finish before the stop arrives, which leaves nothing to cancel.
  for (let round = 0; round < 5 && !isCancelled; round++) {
    const status = await gpt2.page.evaluate(() => {
      const find = (name) => document.querySelector(`[data-testid=${name}]`);
      const wait = () => { if (find("text").textContent.length > 8) find("stop").click(); else setTimeout(wait); };
      find("write").click();
      const status = find("status").textContent;
      wait();
      return status;
    });
    expect(status).toBe("writing");
    await gpt2.ready();
    text = await gpt2.text();
    expect(text.length).toBeGreaterThan(8);
    expect(whole.startsWith(text)).toBe(true);
    isCancelled = text.length < whole.length && (gpt2.transport !== "server" || await isCounted());
  }
  expect(isCancelled).toBe(true);
  await gpt2.set({ "max-new-tokens": 20 });
  await gpt2.click("go-on");
  await gpt2.ready();
  const longer = await gpt2.text();
  expect(longer.length).toBeGreaterThan(text.length);
  expect(whole.startsWith(longer)).toBe(true);
});

test("the URL may contain an empty prompt", async ({ gpt2 }) => {
  await gpt2.open("prompt=");
  await expect(gpt2.at("prompt")).toHaveValue("");
  expect(await gpt2.greedily("I", 4)).not.toBe("");
});

test("a click during a view update is not lost", async ({ gpt2 }) => {
  await expect(gpt2.at("report-role")).toHaveText(/attention/);
  await gpt2.find('.heads button[title="layer 2, head 1"]').hover();
  await gpt2.page.mouse.down();
  await gpt2.at("write").evaluate((button) => button.click());
  await gpt2.ready();
  await gpt2.looked();
  await gpt2.page.mouse.up();
  await expect(gpt2.find("#report-name")).toHaveText("layer 2, head 1");
});

test("overlapping generations do not mix", async ({ gpt2, server }) => {
  await gpt2.set({ prompt: "I", "max-new-tokens": 30, greedy: true });
  await gpt2.at("write").evaluate((button) => { button.click(); button.click(); });
  await gpt2.ready();
  expect(await gpt2.text()).toBe(await server.text("I", 30));
});

test("text that looks like HTML is shown as text", async ({ gpt2 }) => {
  const hostile = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>";
  const title = await gpt2.page.title();
  await gpt2.greedily(hostile, 3);
  await gpt2.click("score");
  await expect(gpt2.at("numbers")).toHaveText(/^perplexity/);
  await gpt2.generate({ n: 2 });
  expect(await gpt2.page.title()).toBe(title);
  await expect(gpt2.find("main img, main script")).toHaveCount(0);
});

test("the alternatives of a token match the sampling distribution", async ({ gpt2, server }) => {
  const text = await gpt2.generate({ prompt: "The door", "max-new-tokens": 12, seed: 3, temperature: 1, "top-k": 0, "min-p": 0 });
  const { tokens: prompt } = await server.ask("tokenize", { prompt: "The door" });
  const token = gpt2.find("#text span").nth(5), options = gpt2.at("alternatives").getByRole("option");
  await token.click();
  const { token_ids } = (await server.ask("v1/completions", { prompt, max_tokens: 12, seed: 3, temperature: 1, top_k: 0, min_p: 0, return_token_ids: true })).choices[0];
  const ids = [...prompt, ...token_ids.slice(0, 5)];
  // The box reflects the current settings.
  for (const settings of [{ temperature: 1 }, { temperature: 0.25 }, { temperature: 0.25, top_k: 3 }]) {
    await gpt2.set({ temperature: settings.temperature, "top-k": settings.top_k ?? 0 });
    const { tokens, kept } = await server.ask("look/next", { prompt: ids, top: 20, top_k: 0, min_p: 0, ...settings });
    await expect(gpt2.find("#choices > .quiet")).toContainText(`These settings leave ${kept} tokens to sample from.`);
    const share = (line, n) => Number(/^(?:< )?([\d.e-]+)%/.exec(line.slice(shown(tokens[n].token).length))[1]) / 100;
    await expect.poll(async () => Math.abs(share((await options.allTextContents())[0], 0) - tokens[0].probability)).toBeLessThan(0.005);
    const found = await options.allTextContents();
    expectClose(found.map(share), tokens.map((one) => one.probability), 0.005);
  }
  await gpt2.page.keyboard.press("Escape");
  await expect(gpt2.at("alternatives")).toBeHidden();
  // The keyboard chooses the first alternative with a leading space. The box has the focus immediately and
  // keeps it.
  await gpt2.set({ greedy: true });
  const { tokens } = await server.ask("look/next", { prompt: ids, top: 20, temperature: 0 });
  const index = tokens.findIndex((one, n) => n > 0 && one.token.startsWith(" "));
  await token.press("Enter");
  await expect(gpt2.find("#choices [role=option]:focus")).toHaveCount(1);
  await gpt2.page.keyboard.press("Home");
  for (let n = 0; n < index; n++) await gpt2.page.keyboard.press("ArrowDown");
  await gpt2.page.keyboard.press("Enter");
  await expect(token).toBeFocused();
  await gpt2.ready();
  await expect(token).toBeFocused();
  const before = text.startsWith(await decoded(server, token_ids.slice(0, 5)));
  expect(before).toBe(true);
  const cut = [...ids, tokens[index].id];
  expect(await gpt2.text()).toBe(await decoded(server, cut.slice(prompt.length)) + await server.text(cut, 12));
  // Resting the mouse on a token also shows the alternatives, until the mouse leaves.
  await gpt2.page.mouse.move(0, 0);
  await gpt2.find("#text span").nth(2).hover();
  await expect(options).toHaveCount(20);
  await gpt2.page.mouse.move(0, 0);
  await expect(gpt2.at("alternatives")).toBeHidden();
});

const decoded = async (server, tokens) => (await server.ask("detokenize", { tokens })).content ?? (await server.ask("detokenize", { tokens })).prompt;

test("the next-token bars follow the settings", async ({ gpt2, server }) => {
  const text = await gpt2.greedily(MERCY, 4);
  await gpt2.set({ greedy: false, temperature: 2, "top-k": 50 });
  const about = gpt2.find("#next-about"), bars = gpt2.at("next").getByRole("option");
  await expect(about).toContainText("These settings leave 50 tokens to sample from.");
  await expect(bars).toHaveCount(8);
  // The bars are also updated while a slider is pressed.
  await gpt2.page.getByRole("slider", { name: "Temperature" }).hover({ position: { x: 2, y: 8 } });
  await gpt2.page.mouse.down();
  await expect(about).toContainText("These settings leave one token.");
  await gpt2.page.mouse.up();
  await gpt2.set({ temperature: 2, "top-k": 1 });
  await expect(about).toContainText("These settings leave one token.");
  const [first, second] = await bars.allTextContents();
  expect(first).toContain(`${shown(await server.text(MERCY + text, 1))}100%`);
  expect(second).toMatch(/0% +left out; before settings [\d.]+%$/);
  // Clicking a bar continues the text.
  await bars.first().click();
  await gpt2.ready();
  expect((await gpt2.text()).length).toBeGreaterThan(text.length);
  // Clicking a bar after another prompt replaces the text; undo restores it.
  const before = await gpt2.text();
  await gpt2.set({ prompt: "The door" });
  await expect(about).toHaveText(/^After the prompt above/);
  await bars.first().click();
  await expect.poll(() => gpt2.text()).not.toBe(before);
  await gpt2.ready();
  await gpt2.click("undo");
  expect(await gpt2.text()).toBe(before);
});

test("a prompt is scored token by token", async ({ gpt2, server }) => {
  const prompt = "Mia had a red ball.";
  await gpt2.set({ prompt });
  await gpt2.click("score");
  await gpt2.ready();
  const { logprobs } = (await server.ask("v1/completions", { prompt, max_tokens: 0, echo: true, logprobs: 0 })).choices[0];
  const known = logprobs.token_logprobs.filter((one) => one !== null);
  const perplexity = Math.exp(-known.reduce((sum, one) => sum + one, 0) / known.length);
  const found = Number(/^perplexity (\S+) /.exec(await gpt2.text("numbers"))[1]);
  expect(Math.abs(found / perplexity - 1)).toBeLessThan(6e-3);
  expect(await gpt2.text()).toBe(prompt);
  expect(await gpt2.at("text").evaluate((text) => [...text.children].filter((one) => one.style.background).length)).toBe(known.length);
  // The scored text can be continued.
  await gpt2.set({ greedy: true, "max-new-tokens": 5 });
  await gpt2.click("go-on");
  await gpt2.ready();
  expect(await gpt2.text()).toBe(prompt + await server.text(prompt, 5));
});

test("several completions are shown side by side, and one can be selected", async ({ gpt2, server }) => {
  await gpt2.generate({ prompt: "Speak", n: 3, seed: 11, "max-new-tokens": 10 });
  const body = { prompt: "Speak", max_tokens: 10, ...DEFAULTS, seed: 11, n: 3 };
  const texts = (await server.ask("v1/completions", body)).choices.map((choice) => choice.text);
  expect(await gpt2.find("#texts p").allTextContents()).toEqual(texts);
  await gpt2.click("take-1");
  expect(await gpt2.text()).toBe(texts[1]);
  await expect(gpt2.find("#texts article")).toHaveCount(0);
});

test("the request is shown as a curl command and a Python program", async ({ gpt2, server }) => {
  const prompt = "It's \"so\"\n😀", text = await gpt2.generate({ prompt, seed: 5, "max-new-tokens": 12 });
  await gpt2.click("as-curl");
  const curl = await gpt2.text("request");
  const body = JSON.parse(curl.slice(curl.indexOf("-d '") + 4, -1).replaceAll("'\\''", "'"));
  expect(body).toMatchObject({ prompt, max_tokens: 12, ...DEFAULTS, seed: 5, stream: true });
  expect(body).not.toHaveProperty("presence_penalty");
  const events = printed(curl.replace("http://127.0.0.1:8080", server.url)).split("\n").filter((line) => line.startsWith("data: {"));
  expect(events.map((line) => JSON.parse(line.slice(6)).choices[0].text).join("")).toBe(text);
  await gpt2.click("as-python");
  const program = await gpt2.text("request");
  for (const line of ["client = OpenAI(base_url=\"http://127.0.0.1:", "    prompt=\"It's \\\"so\\\"\\n😀\",", "    seed=5,", "    stream=True,",
    `    extra_body={"top_k": ${DEFAULTS.top_k}, "min_p": ${DEFAULTS.min_p}, "repetition_penalty": ${DEFAULTS.repetition_penalty}},`]) expect(program).toContain(line);
});

test("views follow the text or are marked as outdated", async ({ gpt2, transport }) => {
  await gpt2.generate({ prompt: "One day, Mia had a red ball", "max-new-tokens": 8 });
  await gpt2.click("graph");
  await expect(gpt2.find("#graph-field circle").first()).toBeVisible({ timeout: 120_000 });
  // Scoring changes no tokens, so no view becomes outdated.
  await gpt2.click("score");
  await gpt2.ready();
  await expect(gpt2.at("look-again")).toBeHidden();
  await gpt2.click("attention");
  await gpt2.looked();
  await expect(gpt2.at("report-role")).toHaveText(/attention/);
  await gpt2.set({ prompt: "Tom had a dog" });
  await expect(gpt2.at("stale")).toBeVisible();
  if (transport === "server") await expect(gpt2.at("look-again")).toBeVisible();
  // On a slow machine, the engine's view is also updated only on request.
  await expect(async () => {
    if (await gpt2.at("update").isVisible()) await gpt2.at("update").click({ timeout: 1000 });
    await expect(gpt2.find("#report-line")).toContainText("·had·a·dog", { timeout: 1000 });
  }).toPass({ timeout: 120_000 });
  await expect(gpt2.at("look-again")).toBeHidden();
  // The details of a token disappear with its text.
  await gpt2.find("#text span").first().hover();
  await expect(gpt2.at("token")).not.toBeEmpty();
  await gpt2.page.mouse.move(0, 0);
  await gpt2.generate({ n: 2 });
  await expect(gpt2.at("token")).toBeEmpty();
});

test("attention matches the model", async ({ gpt2, server }) => {
  gpt2.expected = ["400"];
  const { tokens } = await server.ask("tokenize", { prompt: MERCY });
  await gpt2.set({ prompt: MERCY });
  await gpt2.click("attention");
  await expect(gpt2.find("[data-testid=report] .heads button")).toHaveCount(28);
  await expect(gpt2.find("#report-title")).toHaveText("attention patterns");
  const { pattern } = await server.ask("look/attention", { prompt: MERCY });
  for (const [layer, head] of [[0, 0], [3, 2]]) {
    await gpt2.find(`.heads button[title="layer ${layer}, head ${head}"]`).click();
    await expect(gpt2.find("#report-name")).toHaveText(`layer ${layer}, head ${head}`);
    const packed = Buffer.from(pattern.heads[layer * 4 + head], "base64"), table = gpt2.find("#report-values");
    await expect.poll(async () => (await cells(table)).length).toBe(tokens.length);
    const rows = await cells(table);
    let at = 0;
    rows.forEach((row, query) => row.slice(0, query + 1).forEach((cell) => {
      expect(Math.abs(Number(cell.replace(/^< |%$/g, "")) / 100 - packed.readUInt16LE(at) / 65535)).toBeLessThan(0.005);
      at += 2;
    }));
  }
  await gpt2.set({ layers: "1-2" });
  await gpt2.at("layers").press("Enter");
  await expect(gpt2.find("[data-testid=report] .heads button")).toHaveCount(8);
  await gpt2.set({ layers: "1-99" });
  await gpt2.at("layers").press("Enter");
  await expect(gpt2.at("inside-error")).toHaveText(/^layers: .*from 0 to 6/);
  await gpt2.set({ layers: "2-1" });
  await gpt2.at("layers").press("Enter");
  await expect(gpt2.at("inside-error")).toHaveText("layers: “2-1” is neither a number nor a range such as 0-5");
});

test("the logit lens matches the model", async ({ gpt2, server }) => {
  await gpt2.set({ prompt: MERCY });
  await gpt2.click("lens");
  for (const show of ["probability", "entropy"]) {
    await gpt2.set({ show });
    const { title, axes, values, texts } = await server.ask("look/lens", { prompt: MERCY, show });
    await expect(gpt2.find("#report-title")).toHaveText(title);
    const columns = axes[1].labels.length, rows = (await cells(gpt2.find("#report-values"))).reverse();
    expect(rows.length).toBe(axes[0].labels.length);
    const [, scale] = show === "probability" ? [/%/, 100] : [null, 1];
    const parted = rows.flat().map((cell) => /^(?:< )?([^\s%]+)%? (.*)$/.exec(cell));
    parted.forEach(([, value], n) => expect(Math.abs(Number(value) / scale - values[n])).toBeLessThanOrEqual(1e-4 + 0.006 * Math.abs(values[n])));
    expect(parted.map(([, , text]) => text)).toEqual(texts);
    expect(rows[0].length).toBe(columns);
  }
});

test("the step-by-step head matches the model, and its example matches the articles", async ({ gpt2, server }) => {
  await gpt2.set({ prompt: MERCY });
  await gpt2.click("head");
  const steps = gpt2.find("#head-steps > li"), title = gpt2.find("#head-title");
  await expect(steps).toHaveCount(6);
  const body = { prompt: MERCY, layer: 2, head: 1, query: 6, key: 4 };
  for (const name of ["layer", "head", "query", "key"]) {
    await gpt2.set({ [`head-${name}`]: String(body[name]) });
    await expect(gpt2.at(`head-${name}`)).toHaveValue(String(body[name]));
    await expect(title).toContainText(name === "layer" ? "of layer 2:" : name === "head" ? "in head 1 of layer 2:" : "");
  }
  const look = await server.ask("look/head", body);
  await expect(title).toHaveText(
    `How much “${look.tokens[6]}” attends to “${look.tokens[4]}” in head 1 of layer 2: ${look.weights[4].toFixed(4)}`);
  const vectors = await gpt2.find("#head-steps .vector").evaluateAll((all) => all.map((one) => [...one.querySelectorAll("li")].map((cell) => Number(cell.title.split(": ")[1]))));
  const expected = [look.q, look.k, look.products, look.v, look.v.map((value) => value * look.weights[4]), look.context];
  expect(vectors.length).toBe(6);
  vectors.forEach((vector, n) => expectClose(vector, expected[n], 1e-4));
  const number = (text) => Number(text.trim().split(/\s+/).at(-1).replace("−", "-"));
  const formulas = await gpt2.find("#head-steps .formula").allTextContents();
  expectClose(formulas.slice(0, 2).map(number), [look.score, look.scaled]);
  const rows = await cells(gpt2.find("#head-steps > li:nth-of-type(5) table"));
  look.scores.forEach((score, n) => expectClose([number(rows[n][0]), number(rows[n][3])], [score, look.weights[n]], 1e-4));
  await gpt2.set({ "head-example": true });
  await expect(title).toHaveText(/six words of the example: 0\.2264$/);
  // w22, the weights and the context vector as printed in the articles.
  for (const printed of ["1.8524", "0.1500", "0.2264", "0.2199", "0.1311", "0.0906", "0.1820", "0.3061", "0.8210"]) await expect(gpt2.at("steps")).toContainText(printed);
});

test("features match the transcoders", async ({ gpt2 }) => {
  await gpt2.set({ prompt: MERCY, layers: "2" });
  await gpt2.click("features");
  await expect(gpt2.find("#report-title")).toHaveText("the strongest features of each token");
  // The program's output for all features in the layer.
  const folder = "models/stories/transcoders/layer_2";
  const { axes, values } = JSON.parse(printed(`gpt2 look features "${MERCY}" --sae ${folder} --top 100000 --json --device cpu`));
  const [features, tokens] = axes.map((axis) => axis.labels);
  const strongest = tokens.map((_, token) => features.map((feature, n) => ({ feature, value: values[n * tokens.length + token] }))
    .filter((one) => one.value > 0).sort((a, b) => b.value - a.value));
  const rows = await cells(gpt2.find("#report-values"));
  expect(rows.length).toBe(3);
  rows.forEach((row, index) => row.forEach((cell, token) => {
    const one = strongest[token][index];
    expectClose([Number(cell.split(" ")[0]) || 0], [one?.value ?? 0], 0.006 * (one?.value ?? 1));
    // The order of tied features may vary.
    const isTie = strongest[token].some((other) => other !== one && Math.abs(other.value - one.value) < 1e-3);
    if (one && !isTie) expect(cell.split(" ")[1]).toBe(one.feature);
  }));
  // Selecting a cell shows its feature in the whole text, also by keyboard.
  const token = strongest.findIndex((all) => all.length > 0), { feature } = strongest[token][0];
  const field = gpt2.find("#report-picture .cells");
  await field.focus();
  await field.press("Home");
  for (let n = 0; n < 3; n++) await field.press("ArrowUp");
  for (let n = 0; n < token; n++) await field.press("ArrowRight");
  await expect(gpt2.find("#feature-name")).toHaveText(`feature ${feature} of layer 2`);
  await expect(gpt2.find("#report-readout")).toHaveText(new RegExp(`^layer 2, 1st, token \\S+ ${token}: feature ${feature} \\(→ \\S+\\), activation [\\d.]+$`));
  const row = features.indexOf(feature) * tokens.length;
  const found = await gpt2.find("#feature-texts p span").evaluateAll((all) => all.map((one) => Number(one.title)));
  const expected = values.slice(row, row + tokens.length);
  expectClose(found, expected, 1e-2 * Math.max(1, ...expected));
  await expect(gpt2.find("#feature-logits dd span")).toHaveCount(20);
});

test("the graph matches the program, and a node shows its edges and feature", async ({ gpt2 }) => {
  const prompt = "One day, Mia was";
  await gpt2.set({ prompt });
  await gpt2.click("graph");
  await expect(gpt2.find("#graph-title")).toHaveText(/^attribution graph of the prediction/);
  const options = "--transcoders built-in --max-feature-nodes 600 --node-threshold 0.5 --device cpu";
  const { nodes, links } = JSON.parse(printed(`gpt2 look graph "${prompt}" ${options} --json`));
  const circles = gpt2.find("#graph-field circle"), about = gpt2.find("#graph-about");
  const ids = () => circles.evaluateAll((all) => all.map((one) => one.textContent.split("\n").at(-1)));
  const expected = nodes.map((node) => node.node_id), found = await ids();
  // The last node or edge that is kept may differ because sums are computed in another order.
  const others = [...expected.filter((id) => !found.includes(id)), ...found.filter((id) => !expected.includes(id))];
  expect(others.length, others.join()).toBeLessThanOrEqual(2);
  const edges = Number(/(\d+) edges/.exec(await about.textContent())[1]);
  expect(Math.abs(edges - links.length)).toBeLessThanOrEqual(0.05 * links.length);
  // In the program's file, influence is cumulative, so the minimum belongs to the strongest node.
  const [strongest] = nodes.filter((node) => node.node_id.startsWith("E_")).sort((a, b) => a.influence - b.influence);
  await expect(gpt2.find("#graph-most")).toHaveText(new RegExp(`^The prediction depends most on “\\S+” ${strongest.ctx_idx} \\(`));
  // The predicted token and the strongest features have labels, and the predicted token is visible.
  await expect(gpt2.find("#graph-field .label").first()).toHaveText(/\S/);
  await expect.poll(() => gpt2.find("#graph-field .label").count()).toBeGreaterThan(1);
  await expect(gpt2.find("#graph-field circle.chosen")).toBeInViewport();
  // The most probable logit is selected; an arrow key moves down to its inputs.
  const target = nodes.find((node) => node.is_target_logit).node_id;
  const into = links.filter((link) => link.target === target).sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight));
  const lines = gpt2.find("#graph-in button");
  await expect(lines).toHaveCount(into.length);
  const weights = (await lines.allTextContents()).map((line) => Number(/^[+−]\S+/.exec(line)[0].replace("−", "-")));
  expectClose(weights, into.map((link) => link.weight), 1e-2 * Math.max(1, Math.abs(into[0].weight)));
  const feature = nodes.find((node) => node.feature_type === "cross layer transcoder");
  if (feature) {
    const [layer, number] = feature.node_id.split("_");
    await circles.nth(found.indexOf(feature.node_id)).click();
    await expect(gpt2.find("#feature-name")).toHaveText(`feature ${number} of layer ${layer}`);
    await expect(gpt2.at("feature-part")).toBeVisible();
    await gpt2.find("#graph-field circle.chosen").press("p");
    await expect(gpt2.at("graph-pinned").getByRole("button")).toHaveText([feature.node_id]);
  }
  // A larger fraction of the influence shows more nodes.
  await gpt2.set({ share: "0.8" });
  await expect.poll(() => circles.count()).toBeGreaterThan(found.length);
});

test("an explanation covers the clicked token if the graph contains it", async ({ gpt2 }) => {
  await gpt2.greedily("The", 4);
  const token = gpt2.find("#text span").first(), others = gpt2.at("alternatives").locator("[role=option][aria-disabled=false]");
  for (const [index, isIn] of [[1, true], [-1, false]]) {
    await token.click();
    const other = await others.nth(index).locator("span").first().textContent();
    await others.nth(index).click();
    await gpt2.ready();
    await token.click();
    await gpt2.click("explain");
    if (isIn) await expect(gpt2.find("#graph-name")).toContainText(`logit of ${other}, probability `);
    else await expect(gpt2.find("#looked-at")).toContainText("too improbable for this graph");
  }
});

test("every control is reachable by keyboard", async ({ gpt2, server }) => {
  const { page } = gpt2;
  await gpt2.set({ "max-new-tokens": 8, greedy: true, prompt: "A horse" });
  await gpt2.at("prompt").press("Control+Enter");
  await gpt2.ready();
  expect(await gpt2.text()).toBe(await server.text("A horse", 8));
  const focused = () => page.evaluate(() => document.activeElement.dataset.testid ?? document.activeElement.id);
  await gpt2.at("prompt").focus();
  const reached = ["prompt"];
  await page.evaluate(() => document.querySelectorAll("details").forEach((one) => one.open = true));
  for (let n = 0; n < 110; n++) {
    await page.keyboard.press("Tab");
    reached.push(await focused());
  }
  const own = gpt2.transport === "engine" ? ["as-program", "command", "plain", "measure"] : ["request"];
  const expected = ["picker-open", "tour", "example-0", "write", "go-on", "undo", "score", "show-bits", "greedy", "max-new-tokens", "temperature", "top-k", "top-p", "seed", "keep-seed",
    "min-p", "repetition", "presence", "frequency", "n", "stops", "attention", "head", "lens", "features", "graph", "as-curl", "as-python", "copy", "copy-link", "start-over", ...own];
  expect(expected.filter((name) => !reached.includes(name))).toEqual([]);
  // The text is a single tab stop; arrow keys move between tokens.
  await gpt2.find("#text [tabindex='0']").press("Home");
  await page.keyboard.press("ArrowRight");
  const second = gpt2.find("#text span").nth(1);
  await expect(second).toBeFocused();
  await page.keyboard.press("Alt+ArrowDown");
  await expect(gpt2.find("#choices [role=option]:focus")).toHaveCount(1);
  await page.keyboard.press("Escape");
  await expect(gpt2.at("alternatives")).toBeHidden();
  await expect(second).toBeFocused();
  // The picker is a dialog: it takes the focus, and Esc restores it.
  await gpt2.at("picker-open").press("Enter");
  await expect(gpt2.at("picker")).toBeVisible();
  await page.keyboard.press("Escape");
  await expect(gpt2.at("picker-open")).toBeFocused();
});

test("a narrow screen needs no horizontal scrolling", async ({ gpt2 }) => {
  await gpt2.page.setViewportSize({ width: 320, height: 700 });
  await gpt2.set({ n: 2 });
  await gpt2.greedily("averyveryverylongwordwithoutanyspacewhichwouldbewiderthanthescreen".repeat(2), 20);
  await gpt2.click("take-0");
  await gpt2.page.evaluate(() => document.querySelectorAll("details").forEach((one) => one.open = true));
  const width = () => gpt2.page.evaluate(() => document.documentElement.scrollWidth);
  for (const [view, drawn] of VIEWS) {
    await gpt2.click(view);
    await expect(gpt2.find(drawn).first()).toBeVisible({ timeout: 120_000 });
    await expect(gpt2.at("inside-error")).toHaveText("");
    expect(await width(), view).toBeLessThanOrEqual(320);
  }
  if (gpt2.transport === "engine") await gpt2.click("tour");
  expect(await width()).toBeLessThanOrEqual(320);
});

test("the contrast is sufficient in light and dark mode", async ({ gpt2 }) => {
  await gpt2.greedily("A horse", 8);
  for (const colorScheme of ["light", "dark"]) {
    await gpt2.page.emulateMedia({ colorScheme });
    const names = ["prompt", "text", "status", "write", "seed", "copy", "token", "numbers", "show"];
    const found = await gpt2.page.evaluate(contrasts, names);
    for (const [name, contrast, light] of found) {
      // Minimum contrast from WCAG; the one filled button is light in dark mode.
      expect(contrast, `${colorScheme}: ${name}`).toBeGreaterThanOrEqual(4.5);
      if (name !== "write") expect(light < 0.2, `${colorScheme}: ${name}`).toBe(colorScheme === "dark");
    }
  }
});

// Checks the text and every view, with all folds open.
test("axe finds no serious violations", async ({ gpt2 }) => {
  const axe = readFileSync(new URL("node_modules/axe-core/axe.min.js", import.meta.url), "utf8");
  await gpt2.set({ prompt: "A horse", "max-new-tokens": 12, greedy: true });
  await gpt2.click("write");
  await gpt2.ready();
  await gpt2.page.evaluate(axe);
  await gpt2.page.evaluate(() => document.querySelectorAll("details").forEach((one) => one.open = true));
  for (const [view, drawn] of VIEWS) {
    await gpt2.click(view);
    await expect(gpt2.find(drawn).first()).toBeVisible({ timeout: 120_000 });
    for (const [colorScheme, width] of [["light", 1280], ["dark", 400]]) {
      await gpt2.page.emulateMedia({ colorScheme });
      await gpt2.page.setViewportSize({ width, height: 900 });
      const { violations } = await gpt2.page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
      const serious = violations.filter((one) => ["serious", "critical"].includes(one.impact));
      expect(serious.map((one) => `${one.id}: ${one.nodes.map((node) => node.html).join(" ")}`), `${view}, ${colorScheme}, ${width}`).toEqual([]);
    }
  }
});

// Returns the contrast of each part's text with its background, and the background's luminance.
function contrasts(names) {
  const numbers = (color) => color.match(/[\d.]+/g).map(Number);
  const light = (color) => numbers(color).slice(0, 3).map((one) => one / 255)
    .map((one) => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, n) => sum + one * [0.2126, 0.7152, 0.0722][n], 0);
  const behind = (part) => {
    for (; part; part = part.parentElement) {
      const color = getComputedStyle(part).backgroundColor;
      if ((numbers(color)[3] ?? 1) === 1) return color;
    }
    return "rgb(255, 255, 255)";
  };
  return names.map((name) => {
    const part = document.querySelector(`[data-testid=${name}]`);
    const both = [getComputedStyle(part).color, behind(part)].map(light).sort((a, b) => b - a);
    return [name, (both[0] + 0.05) / (both[1] + 0.05), light(behind(part))];
  });
}

test("no information is conveyed by color alone, and every control has a name", async ({ gpt2 }) => {
  await gpt2.greedily(ENDLESS, 20);
  const tokens = await gpt2.at("text").evaluate((text) => [...text.children].map((one) => [one.ariaLabel, one.dataset.bits]));
  expect(tokens.length).toBeGreaterThan(10);
  for (const [label, bits] of tokens) {
    expect(label).toMatch(/%, .* bits of surprise$/);
    expect(bits).toBeDefined();
  }
  expect(await gpt2.page.evaluate(nameless)).toEqual([]);
  for (const [view, drawn] of [["features", "#feature-texts span"], ["graph", "#graph-field circle"]]) {
    await gpt2.click(view);
    await expect(gpt2.find(drawn).first()).toBeVisible();
    expect(await gpt2.page.evaluate(nameless), view).toEqual([]);
  }
});

// Returns visible controls without a name.
function nameless() {
  return [...document.querySelectorAll("button, input, select, textarea, circle")]
    .filter((one) => (one.offsetParent || one.ownerSVGElement?.checkVisibility()) && !one.textContent.trim() && !one.ariaLabel && !one.title && !one.labels?.length)
    .map((one) => one.outerHTML);
}

test("reopening the page restores its prompt and settings", async ({ gpt2, transport }) => {
  const text = await gpt2.generate({ prompt: "Fare thee well,\nmy", seed: 31, temperature: 1.1, "max-new-tokens": 17, stops: "never" });
  // The address is updated shortly after the last change.
  await expect(gpt2.page).toHaveURL(/Fare.*stops=never/);
  // The address restores the page, as from a bookmark. A page opened from a file without a fragment uses the
  // browser's storage.
  const link = new URL(gpt2.page.url()).hash.slice(1);
  for (const fragment of transport === "engine" ? [link, ""] : [link]) {
    await gpt2.open(fragment);
    await expect(gpt2.at("prompt")).toHaveValue("Fare thee well,\nmy");
    for (const [name, value] of [["temperature", "1.1"], ["stops", "never"]]) await expect(gpt2.at(name)).toHaveValue(value);
    // With a server, generation starts only on request.
    expect(transport === "engine" ? await gpt2.text() : await gpt2.generate()).toBe(text);
  }
  await gpt2.click("start-over");
  await gpt2.ready();
  await expect(gpt2.at("prompt")).not.toHaveValue("Fare thee well,\nmy");
});
