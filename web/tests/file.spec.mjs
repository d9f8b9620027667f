// What only the page in a file does: it writes at once, shows the program's command, gives a tour, and survives faults.
import { readFileSync, writeFileSync } from "node:fs";
import { checkpoint } from "./checkpoints.mjs";
import { ENDLESS, expect, printed, test } from "./support.mjs";

// The command that is shown writes the text that is shown.
async function expectCommandWrites(gpt2) {
  const text = await gpt2.text(), command = await gpt2.text("command");
  expect(text.length).toBeGreaterThan(10);
  expect(printed(command), command).toBe(`${text}\n`);
}

test("it has written when it is open, from a file", async ({ gpt2 }) => {
  expect(await gpt2.page.evaluate(() => location.protocol)).toBe("file:");
  await expectCommandWrites(gpt2);
});

test("the command that is shown writes the same bytes, in every precision", async ({ gpt2 }) => {
  for (const prompt of ["-- it's \"so\"\n$HOME `x` \\ 😀", "--greedy"]) {
    await gpt2.generate({ prompt, seed: 77, temperature: 1.15, "top-k": 0, "top-p": 0.85, stops: "--x", repetition: 1.1, frequency: 0.5 });
    await expectCommandWrites(gpt2);
  }
  for (const dtype of ["f32", "f16", "q8", "q4"]) {
    await gpt2.set({ prompt: "Once there was", "max-new-tokens": 50, greedy: false });
    // It writes by itself once the model is there.
    await gpt2.set({ dtype });
    await gpt2.ready();
    expect(await gpt2.text("command")).toContain(`--dtype ${dtype}`);
    await expectCommandWrites(gpt2);
    await gpt2.greedily("One day", 50);
    await expectCommandWrites(gpt2);
  }
});

test("a text ends where the context does", async ({ gpt2 }) => {
  await gpt2.greedily(`${ENDLESS} `.repeat(30).trim(), 300);
  expect(await gpt2.text("command")).toContain("--max-new-tokens 300");
  await expectCommandWrites(gpt2);
  await expect(gpt2.at("go-on")).toBeDisabled();
  await gpt2.click("lens");
  await expect(gpt2.find("#looked-at")).toContainText("the first 128");
  await expect(gpt2.at("report")).toBeVisible();
});

test("a score after a stop does not wait for the rest of the text", async ({ gpt2 }) => {
  await gpt2.set({ prompt: ENDLESS, "max-new-tokens": 200, n: 8, greedy: true });
  const [whole, after] = await gpt2.page.evaluate(async () => {
    const find = (name) => document.querySelector(`[data-testid=${name}]`);
    const until = async (isSo) => { while (!isSo()) await new Promise((later) => setTimeout(later)); };
    const begun = performance.now();
    find("write").click();
    await until(() => find("status").textContent === "ready");
    const whole = performance.now() - begun;
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

test("how the model learned is drawn for each of its checkpoints", async ({ gpt2 }) => {
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

test("a tour has seven steps", async ({ gpt2 }) => {
  await gpt2.at("tour").press("Enter");
  for (let step = 1; step <= 7; step++) {
    await expect(gpt2.find("#tour-title")).toHaveText(new RegExp(`^${step} of 7: `));
    await gpt2.find("#tour-panel .main").press("Enter");
  }
  await expect(gpt2.at("tour-panel")).toBeHidden();
  await expect(gpt2.at("tour")).toBeFocused();
});

test("an address has the precision, and the name of a model of one's own", async ({ gpt2, server }) => {
  await gpt2.set({ dtype: "q8" });
  await gpt2.ready();
  await expect(gpt2.page).toHaveURL(/dtype=q8/);
  await gpt2.open(new URL(gpt2.page.url()).hash.slice(1));
  await expect(gpt2.at("about")).toContainText(" q8 ");
  // It has to be chosen again; until then the built-in one writes.
  await gpt2.open("prompt=Hark&model=mine.gguf&greedy=1&max-new-tokens=8");
  await expect(gpt2.at("memory")).toContainText("mine.gguf");
  expect(await gpt2.text()).toBe(await server.text("Hark", 8));
});

// As if WebAssembly trapped outside of an answer; `then` runs in the same moment.
const breakWorker = (gpt2, then = "") => gpt2.page.addScriptTag({
  content: `workers.at(-1).terminate(); workers.at(-1).onerror(new ErrorEvent("error", { message: "RuntimeError: unreachable" })); ${then}`,
});

test("a worker that breaks is reported and replaced", async ({ unopened: gpt2, server }) => {
  await gpt2.page.addInitScript(() => {
    window.workers = [];
    window.Worker = class extends Worker {
      constructor(...given) {
        super(...given);
        window.workers.push(this);
      }
    };
  });
  await gpt2.open();
  const text = await gpt2.greedily("The quality", 10);
  await breakWorker(gpt2);
  await gpt2.error(/unreachable; the engine was restarted$/);
  await gpt2.ready();
  expect([await gpt2.at("prompt").inputValue(), await gpt2.text()]).toEqual(["The quality", text]);
  expect(await gpt2.greedily("The quality", 20)).toBe(await server.text("The quality", 20));
  // What is asked for before the model is back waits for it.
  await gpt2.set({ prompt: "One day" });
  await breakWorker(gpt2, "document.getElementById('write').click();");
  await gpt2.ready();
  expect(await gpt2.text()).toBe(await server.text("One day", 20));
});

test("a tokenizer that cannot be used is reported, and the model before writes on", async ({ gpt2, server }, info) => {
  const files = checkpoint(info.outputPath("merges"));
  const model = { type: "BPE", continuing_subword_prefix: "####", vocab: { a: 0, b: 1, ab: 2 }, merges: [["a", "b"]] };
  writeFileSync(files[2], JSON.stringify({ version: "1.0", model }));
  await gpt2.at("model-file").setInputFiles(files);
  await gpt2.error(/^tokenizer\.json: not a usable tokenizer: model\.merges\[0\]/);
  expect(await gpt2.greedily("One day", 20)).toBe(await server.text("One day", 20));
});

test("features of another model say what they need", async ({ gpt2 }, info) => {
  await gpt2.at("model-file").setInputFiles(checkpoint(info.outputPath("other")));
  await expect(gpt2.at("about")).toHaveText(/^model\.safetensors/);
  await gpt2.ready();
  for (const view of ["features", "graph"]) {
    await gpt2.click(view);
    await expect(gpt2.at("inside-error")).toHaveText(/^features and graphs are of the built-in model, .*gpt2 look graph --transcoders/);
    await expect(gpt2.at("feature-part")).toBeHidden();
  }
  await gpt2.click("attention");
  await expect(gpt2.at("inside-error")).toHaveText("");
});

test("a file that changes under the page is reported", async ({ gpt2 }, info) => {
  const files = checkpoint(info.outputPath("changes"));
  const before = await gpt2.greedily("O", 10);
  await gpt2.at("model-file").setInputFiles(files);
  await expect(gpt2.at("about")).toHaveText(/^model\.safetensors/);
  await gpt2.ready();
  writeFileSync(files[0], "something else");
  // Another precision reads it again; the model before is still there.
  await gpt2.set({ dtype: "q8" });
  await gpt2.error(/model\.safetensors/);
  expect(await gpt2.greedily("O", 10)).not.toBe(before);
});

// How large it may be is said in web/assemble.mjs, which refuses to write a larger one.
test("the file has no place left to fill", async ({ unopened }) => {
  const html = readFileSync(new URL(unopened.url));
  expect(html.includes("@@")).toBe(false);
});
