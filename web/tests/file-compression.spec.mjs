// The compression box: it creates and opens the same files as the program.
import { execFileSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { PROGRAM, expect, test } from "./support.mjs";

const TEXT = "One day, Mia\nwent to the park with her friend Tom, and on.\n<|endoftext|> é 😀\n".repeat(12);
const run = (...flags) => execFileSync(PROGRAM, flags, { stdio: ["ignore", "pipe", "ignore"] });

// Downloads the file that the page offers.
async function downloadResult(gpt2, path) {
  const download = gpt2.page.waitForEvent("download");
  await gpt2.click("compression-result");
  await (await download).saveAs(path);
  return readFileSync(path);
}

test("the page compresses to the program's file, and the program restores it", async ({ gpt2 }, info) => {
  const plain = info.outputPath("text.txt"), own = info.outputPath("page.gpt2z");
  writeFileSync(plain, TEXT);
  await gpt2.set({ plain: TEXT });
  await gpt2.at("compress").press("Enter");
  await expect(gpt2.at("compression-said")).toHaveText(new RegExp(`bits per byte: ${Buffer.byteLength(TEXT)} bytes become [0-9]+$`));
  const file = await downloadResult(gpt2, own);
  expect(run("decompress", "-c", own).toString()).toBe(TEXT);
  run("compress", "-k", plain);
  expect(file.equals(readFileSync(`${plain}.gpt2z`))).toBe(true);
});

test("the page restores the program's files in their own precision", async ({ gpt2 }, info) => {
  const files = [["q8", "f16", TEXT], ["f16", "q8", "One day\n"], ["q4", "q8", TEXT]];
  for (const [dtype, kvDtype, text] of files) {
    const plain = info.outputPath(`${dtype}.txt`);
    writeFileSync(plain, text);
    run("compress", "-k", "--dtype", dtype, "--kv-dtype", kvDtype, plain);
    await gpt2.at("compressed-file").setInputFiles(`${plain}.gpt2z`);
    await expect(gpt2.at("compression-said")).toHaveText(new RegExp(`${Buffer.byteLength(text)} bytes become`));
    await expect(gpt2.at("plain")).toHaveValue(text);
    await expect(gpt2.at("compression-result")).toHaveAttribute("download", `${dtype}.txt`);
  }
  // Compression does not change the generating model.
  await gpt2.greedily("One day", 5);
  // The content of a file may be bytes that are not text.
  const plain = info.outputPath("bytes");
  writeFileSync(plain, Buffer.from([0, 255, 254, 10]));
  run("compress", "-k", plain);
  await gpt2.at("compressed-file").setInputFiles(`${plain}.gpt2z`);
  await expect(gpt2.at("compression-said")).toHaveText(/the content is not text$/);
  expect([...await downloadResult(gpt2, info.outputPath("restored"))]).toEqual([0, 255, 254, 10]);
});

test("compressed sizes are shown token by token", async ({ gpt2 }) => {
  const text = "One day,\nMia was at home.";
  await gpt2.set({ plain: text });
  // The Tab key moves from the text to its button.
  await gpt2.at("plain").press("Tab");
  await gpt2.page.keyboard.press("Enter");
  await expect(gpt2.at("compression-said")).toHaveText(/^[0-9]+ tokens, [0-9.]+ bits, [0-9.]+ per byte$/);
  expect(await gpt2.text("sizes")).toBe(text);
  const bits = await gpt2.at("sizes").evaluate((box) => [...box.children].map((one) => Number(one.dataset.bits)));
  const [, tokens, sum] = /^(\d+) tokens, ([\d.]+) bits/.exec(await gpt2.text("compression-said"));
  expect(bits.length).toBe(Number(tokens));
  expect(Math.abs(bits.reduce((total, one) => total + one, 0) - Number(sum))).toBeLessThan(0.06 * bits.length);
});

test("an invalid file is reported, and a long compression can be stopped", async ({ gpt2 }, info) => {
  const file = info.outputPath("wrong.gpt2z");
  writeFileSync(file, "just a text");
  await gpt2.at("compressed-file").setInputFiles(file);
  await expect(gpt2.at("compression-said")).toHaveText(/^error: the input is not in gpt2z format/);
  // A script sets the text, because typing it takes Chromium a minute.
  await (await gpt2.reveal("plain")).evaluate((box, text) => { box.value = text; }, TEXT.repeat(80));
  await gpt2.click("compress");
  await expect(gpt2.at("stop-compressing")).toBeEnabled();
  await gpt2.click("stop-compressing");
  await expect(gpt2.at("compression-said")).toHaveText("stopped");
  await gpt2.at("plain").evaluate((box) => { box.value = ""; });
  await gpt2.click("compress");
  await expect(gpt2.at("compression-said")).toHaveText(/^0 bytes become [0-9]+$/);
});
