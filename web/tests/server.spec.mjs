// Tests of the server's page.
// GPT2_WRITE_PICTURES=1 also writes the README's picture of the page.
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { ENDLESS, ROOT, expect, Gpt2Page, Server, test } from "./support.mjs";

test("the page opens with a text and its attention", async ({ gpt2 }) => {
  await expect(gpt2.page).toHaveTitle("built-in · gpt2");
  expect((await gpt2.text()).length).toBeGreaterThan(50);
  await expect(gpt2.at("report-role")).toHaveText(/attention/);
  await gpt2.click("picker-open");
  await expect(gpt2.at("models").getByRole("button")).toHaveText("built-in");
  await expect(gpt2.at("model-file")).toBeHidden();
});

test("a text and its attention fit on one screen", async ({ gpt2, page }) => {
  await page.setViewportSize({ width: 1200, height: 760 });
  await gpt2.generate({ prompt: "One day, Mia had a red ball and Tom had a blue ball.", seed: 7, "max-new-tokens": 60 });
  await gpt2.looked();
  await page.getByText("More settings").click();
  await page.evaluate(() => scrollTo(0, 0));
  await expect(gpt2.at("text")).toBeInViewport({ ratio: 0.5 });
  await expect(gpt2.find("#report")).toBeInViewport({ ratio: 0.3 });
  // Fonts differ between machines, so the picture is not compared.
  if (process.env.GPT2_WRITE_PICTURES) await page.screenshot({ path: join(ROOT, "docs/src/pictures/page.png") });
});

test("a length beyond the context is limited to the context", async ({ gpt2, server }) => {
  await gpt2.set({ prompt: ENDLESS, "max-new-tokens": 1000, greedy: true });
  await gpt2.click("write");
  await gpt2.ready();
  await expect(gpt2.at("error")).toBeHidden();
  const { tokens } = await server.ask("tokenize", { prompt: ENDLESS });
  expect(await gpt2.text()).toBe(await server.text(ENDLESS, 512 - tokens.length));
});

test("the API key is requested and kept only in memory", async ({ page }, info) => {
  writeFileSync(info.outputPath("keys"), "s3cret\n");
  const keyed = await Server.start("--api-key-file", info.outputPath("keys"));
  const gpt2 = new Gpt2Page(page, "server", `${keyed.url}/`);
  await page.goto(gpt2.url);
  await gpt2.error("this server requires a key");
  await gpt2.at("key").fill("wrong");
  await gpt2.at("key").press("Enter");
  await gpt2.error(/invalid key/);
  await gpt2.set({ key: "s3cret" });
  await gpt2.click("key-use");
  await gpt2.ready();
  const text = await gpt2.greedily("Once", 4);
  expect(text.length).toBeGreaterThan(0);
  // The text survives entering a new key.
  await page.evaluate(async () => (await import("/server.js")).server.setKey("wrong"));
  await gpt2.click("score");
  await gpt2.error(/invalid key/);
  await gpt2.set({ key: "s3cret" });
  await gpt2.click("key-use");
  await gpt2.ready();
  expect(await gpt2.text()).toBe(text);
  await expect(gpt2.at("go-on")).toBeEnabled();
  await expect(gpt2.at("request")).toContainText("$OPENAI_API_KEY");
  const traces = await page.evaluate(() => [localStorage.length, sessionStorage.length, document.cookie, document.documentElement.outerHTML.includes("s3cret"), location.href.includes("s3cret")]);
  expect(traces).toEqual([0, 0, "", false, false]);
  await keyed.stop();
});

test("a busy or stopped server is reported", async ({ page }) => {
  const busy = await Server.start("--parallel", "1", "--queue", "1");
  const gpt2 = new Gpt2Page(page, "server", `${busy.url}/`);
  await gpt2.open();
  await gpt2.set({ prompt: "Hark", "max-new-tokens": 4 });
  const body = JSON.stringify({ prompt: "a", max_tokens: 250, ignore_eos: true, stream: true });
  await expect(async () => {
    const others = new AbortController();
    for (let n = 0; n < 4; n++) fetch(`${busy.url}/v1/completions`, { method: "POST", headers: { "Content-Type": "application/json" }, body, signal: others.signal }).catch(() => {});
    await gpt2.click("write");
    await expect(gpt2.at("status")).not.toHaveText("writing");
    others.abort();
    await expect(gpt2.at("error")).toHaveText(/^the server is busy: .*; try again in \d+ s$/, { timeout: 10 });
  }).toPass();
  await busy.stop();
  await gpt2.click("write");
  await gpt2.error("the server does not answer; is it still running?");
  await expect(gpt2.at("prompt")).toHaveValue("Hark");
});
