// Tests of the page in Chromium with both transports, and of the tasks in Firefox if it is installed. Tests
// of the book's figures in Chromium. usage, in this folder:
// npm install --no-package-lock; npm test [-- --project=server|file|firefox|book -g NAME]
// GPT2_PROGRAM is the program (target/debug/gpt2), GPT2_WEB the output folder of scripts/build_web.sh
// (web/dist), GPT2_BOOK the book in the output folder of scripts/build_site.sh (target/site/docs/book).
// CHROMIUM and FIREFOX name the browsers. Pages opened from files have no network, because name resolution is
// disabled.
import { defineConfig } from "@playwright/test";
import { chromium, firefox } from "./support.mjs";

const FLAGS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
  "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
];

export default defineConfig({
  testMatch: "*.spec.mjs",
  timeout: 600_000,
  expect: { timeout: 60_000 },
  fullyParallel: true,
  workers: Number(process.env.GPT2_PAGE_WORKERS ?? 2),
  forbidOnly: true,
  reporter: "line",
  outputDir: "../../target/page-tests",
  use: { viewport: { width: 1200, height: 900 }, launchOptions: { executablePath: chromium(), args: FLAGS } },
  projects: [
    { name: "server", testIgnore: ["file*.spec.mjs", "book.spec.mjs"], use: { transport: "server" } },
    { name: "file", testIgnore: ["server.spec.mjs", "book.spec.mjs"], use: { transport: "engine" } },
    { name: "book", testMatch: "book.spec.mjs", use: { transport: "engine" } },
    ...firefox() ? [{
      name: "firefox", testMatch: "tasks.spec.mjs",
      use: { transport: "engine", browserName: "firefox", channel: "moz-firefox", launchOptions: { executablePath: firefox() } },
    }] : [],
  ],
});
