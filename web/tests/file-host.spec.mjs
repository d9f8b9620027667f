// The page on a static host: a first visit, an offline visit, and a visit after an update on the host.
import { cpSync, createReadStream, existsSync, readFileSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join } from "node:path";
import { Gpt2Page, WEB, expect, test } from "./support.mjs";

const KINDS = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".wasm": "application/wasm", ".json": "application/json" };

// Starts a minimal static host.
async function host(folder) {
  const host = createServer((request, answer) => {
    host.answers++;
    const path = new URL(request.url, "http://host").pathname, file = join(folder, path === "/" ? "index.html" : path);
    answer.writeHead(existsSync(file) ? 200 : 404, { "Content-Type": KINDS[extname(file)] ?? "application/octet-stream" });
    if (existsSync(file)) createReadStream(file).pipe(answer);
    else answer.end();
  });
  host.answers = 0;
  await new Promise((listening) => host.listen(0, "127.0.0.1", listening));
  host.url = `http://127.0.0.1:${host.address().port}/`;
  return host;
}

const versions = (page) => page.evaluate(async () => (await navigator.serviceWorker.ready) && caches.keys());

test("the page works offline after the first visit", async ({ page, server }) => {
  const from = await host(WEB), gpt2 = new Gpt2Page(page, "engine", from.url);
  await gpt2.open();
  expect(await gpt2.greedily("One day", 20)).toBe(await server.text("One day", 20));
  await versions(page);
  from.closeAllConnections();
  await new Promise((closed) => from.close(closed));
  const { answers } = from;
  await gpt2.open();
  expect(await gpt2.greedily("Once there was", 20)).toBe(await server.text("Once there was", 20));
  await gpt2.click("graph");
  await expect(gpt2.find("#graph-field circle").first()).toBeVisible();
  expect(from.answers).toBe(answers);
  expect(gpt2.complaints).toEqual([]);
});

test("a new version replaces all files of the old one together", async ({ page }, info) => {
  const folder = info.outputPath("dist");
  cpSync(WEB, folder, { recursive: true, filter: (path) => !path.endsWith("gpt2.html") && !path.includes("/npm") });
  const change = (file, from, to) => {
    const text = readFileSync(join(folder, file), "utf8");
    expect(text).toContain(from);
    writeFileSync(join(folder, file), text.replace(from, to));
  };
  const from = await host(folder), gpt2 = new Gpt2Page(page, "engine", from.url);
  await gpt2.open();
  const [before, ...others] = await versions(page);
  expect([before.startsWith("gpt2-"), others]).toEqual([true, []]);
  change("index.html", "</title>", " (newer)</title>");
  change("service-worker.js", before, "gpt2-newer");
  // The first visit shows the cached version and fetches the new one, which takes over once no page uses the
  // old version. The browser decides when that happens.
  await gpt2.open();
  await expect.poll(() => page.evaluate(() => caches.keys())).toContain("gpt2-newer");
  await expect(async () => {
    await gpt2.open();
    await expect(page).toHaveTitle("gpt2 (newer)", { timeout: 500 });
  }).toPass();
  expect(await versions(page)).toEqual(["gpt2-newer"]);
  from.closeAllConnections();
  from.close();
});
