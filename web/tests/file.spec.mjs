// Tests of the single-file page: it generates on opening, shows the program's command, gives a tour, and
// survives crashes.
import { readFileSync, writeFileSync } from "node:fs";
import { checkpoint } from "./checkpoints.mjs";
import { ENDLESS, expect, printed, test } from "./support.mjs";

// Checks that the displayed command prints the displayed text.
async function expectCommandPrintsText(gpt2) {
  const text = await gpt2.text(), command = await gpt2.text("command");
  expect(text.length).toBeGreaterThan(10);
  expect(printed(command), command).toBe(`${text}\n`);
}

test("the page generates a text on opening from a file", async ({ gpt2 }) => {
  expect(await gpt2.page.evaluate(() => location.protocol)).toBe("file:");
  await expectCommandPrintsText(gpt2);
});

test("the displayed command prints the same bytes in every precision", async ({ gpt2 }) => {
  for (const prompt of ["-- it's \"so\"\n$HOME `x` \\ 😀", "--greedy"]) {
    await gpt2.generate({ prompt, seed: 77, temperature: 1.15, "top-k": 0, "top-p": 0.85, stops: "--x", repetition: 1.1, frequency: 0.5 });
    await expectCommandPrintsText(gpt2);
  }
  for (const dtype of ["f32", "f16", "q8", "q4"]) {
    await gpt2.set({ prompt: "Once there was", "max-new-tokens": 50, greedy: false });
    // Generation starts automatically once the model is loaded.
    await gpt2.set({ dtype });
    await gpt2.ready();
    expect(await gpt2.text("command")).toContain(`--dtype ${dtype}`);
    await expectCommandPrintsText(gpt2);
    await gpt2.greedily("One day", 50);
    await expectCommandPrintsText(gpt2);
  }
});

test("generation stops at the end of the context", async ({ gpt2 }) => {
  await gpt2.greedily("red blue ".repeat(240).trim(), 300);
  expect(await gpt2.text("command")).toContain("--max-new-tokens 300");
  await expectCommandPrintsText(gpt2);
  await expect(gpt2.at("go-on")).toBeDisabled();
  await gpt2.click("lens");
  await expect(gpt2.find("#looked-at")).toContainText("the first 128");
  await expect(gpt2.at("report")).toBeVisible();
});

test("scoring after a stop does not wait for the rest of the text", async ({ gpt2 }) => {
  await gpt2.set({ prompt: ENDLESS, "max-new-tokens": 200, n: 8, greedy: true });
  const [whole, after] = await gpt2.page.evaluate(async () => {
    const find = (name) => document.querySelector(`[data-testid=${name}]`);
    const until = async (isSo) => { while (!isSo()) await new Promise((later) => setTimeout(later)); };
    const started = performance.now();
    find("write").click();
    await until(() => find("status").textContent === "ready");
    const whole = performance.now() - started;
    find("write").click();
    await until(() => find("texts").querySelector("p")?.textContent);
    const stopped = performance.now();
    find("stop").click();
    find("score").click();
    await until(() => find("numbers").textContent.startsWith("perplexity"));
    return [whole, performance.now() - stopped];
  });
  expect(after).toBeLessThan(whole / 2);
});

test("the training history is drawn for each checkpoint", async ({ gpt2 }) => {
  const history = JSON.parse(readFileSync(new URL("../../models/stories/history.json", import.meta.url), "utf8"));
  await expect(gpt2.at("learned")).toBeHidden();
  await gpt2.find("#learning summary").press("Enter");
  const slider = gpt2.at("learned-at");
  await expect(slider).toBeVisible();
  for (const [key, at] of [["End", history.length - 1], ["ArrowLeft", history.length - 2], ["Home", 0]]) {
    await slider.press(key);
    const one = history[at], named = `lesson ${one.training}, step ${one.step.toLocaleString("en")}`;
    await expect(gpt2.at("learned-said")).toContainText(`${named}: loss ${Number(one.loss_per_byte.toPrecision(3))} nats per byte`);
    await expect(slider).toHaveAttribute("aria-valuetext", named);
    expect(await gpt2.text("learned-sample")).toBe(one.sample);
    await expect(gpt2.find("#learned-lines polyline")).toHaveCount(3);
    await expect(gpt2.find("#learned-heads figure")).toHaveCount(2);
  }
});

test("the tour has seven steps", async ({ gpt2 }) => {
  await gpt2.at("tour").press("Enter");
  for (let step = 1; step <= 7; step++) {
    await expect(gpt2.find("#tour-title")).toHaveText(new RegExp(`^${step} of 7: `));
    await gpt2.find("#tour-panel .main").press("Enter");
  }
  await expect(gpt2.at("tour-panel")).toBeHidden();
  await expect(gpt2.at("tour")).toBeFocused();
});

test("the URL contains the precision and the name of the user's model", async ({ gpt2, server }) => {
  await gpt2.set({ dtype: "q8" });
  await gpt2.ready();
  await expect(gpt2.page).toHaveURL(/dtype=q8/);
  await gpt2.open(new URL(gpt2.page.url()).hash.slice(1));
  await expect(gpt2.at("about")).toContainText(" q8 ");
  // The user must choose the file again; until then the built-in model generates.
  await gpt2.open("prompt=Hark&model=mine.gguf&greedy=1&max-new-tokens=8");
  await expect(gpt2.at("memory")).toContainText("mine.gguf");
  expect(await gpt2.text()).toBe(await server.text("Hark", 8));
});

// Simulates a WebAssembly trap between requests; `then` runs in the same task.
const crashWorker = (gpt2, then = "") => gpt2.page.addScriptTag({
  content: `workers.at(-1).terminate(); workers.at(-1).onerror(new ErrorEvent("error", { message: "RuntimeError: unreachable" })); ${then}`,
});

test("a crashed worker is reported and replaced", async ({ unopened: gpt2, server }) => {
  await gpt2.page.addInitScript(() => {
    window.workers = [];
    window.Worker = class extends Worker {
      constructor(...args) {
        super(...args);
        window.workers.push(this);
      }
    };
  });
  await gpt2.open();
  const text = await gpt2.greedily("The quality", 10);
  await crashWorker(gpt2);
  await gpt2.error(/unreachable; the engine was restarted$/);
  await gpt2.ready();
  expect([await gpt2.at("prompt").inputValue(), await gpt2.text()]).toEqual(["The quality", text]);
  expect(await gpt2.greedily("The quality", 20)).toBe(await server.text("The quality", 20));
  // A request during the reload waits for the model.
  await gpt2.set({ prompt: "One day" });
  await crashWorker(gpt2, "document.getElementById('write').click();");
  await gpt2.ready();
  expect(await gpt2.text()).toBe(await server.text("One day", 20));
});

test("an unusable tokenizer is reported, and the previous model stays active", async ({ gpt2, server }, info) => {
  const files = checkpoint(info.outputPath("merges"));
  const model = { type: "BPE", continuing_subword_prefix: "####", vocab: { a: 0, b: 1, ab: 2 }, merges: [["a", "b"]] };
  writeFileSync(files[2], JSON.stringify({ version: "1.0", model }));
  await gpt2.at("model-file").setInputFiles(files);
  await gpt2.error(/^tokenizer\.json: not a usable tokenizer: model\.merges\[0\]/);
  expect(await gpt2.greedily("One day", 20)).toBe(await server.text("One day", 20));
});

test("feature views of another model report that they need transcoders", async ({ gpt2 }, info) => {
  await gpt2.at("model-file").setInputFiles(checkpoint(info.outputPath("other")));
  await expect(gpt2.at("about")).toHaveText(/^model\.safetensors/);
  await gpt2.ready();
  for (const view of ["features", "graph"]) {
    await gpt2.click(view);
    await expect(gpt2.at("inside-error")).toHaveText(/^features and graphs need transcoders, .*gpt2 look graph --transcoders/);
    await expect(gpt2.at("feature-part")).toBeHidden();
  }
  await gpt2.click("attention");
  await expect(gpt2.at("inside-error")).toHaveText("");
});

test("a file that changes after loading is reported", async ({ gpt2 }, info) => {
  const files = checkpoint(info.outputPath("changes"));
  const before = await gpt2.greedily("O", 10);
  await gpt2.at("model-file").setInputFiles(files);
  await expect(gpt2.at("about")).toHaveText(/^model\.safetensors/);
  await gpt2.ready();
  writeFileSync(files[0], "something else");
  // Choosing another precision reads the file again and fails; the previous model is still loaded.
  await gpt2.set({ dtype: "q8" });
  await gpt2.error(/model\.safetensors/);
  expect(await gpt2.greedily("O", 10)).not.toBe(before);
});

// web/assemble.mjs limits the size of the file.
test("the file has no unfilled placeholders", async ({ unopened }) => {
  const html = readFileSync(new URL(unopened.url));
  expect(html.includes("@@")).toBe(false);
});
