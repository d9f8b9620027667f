// The page's tests, in Chromium with both transports, and its tasks in Firefox where there is one. usage, in this folder:
// npm install --no-package-lock; npm test [-- --project=server|file|firefox -g NAME]
// GPT2_PROGRAM is the program (target/debug/gpt2), GPT2_WEB the folder that scripts/build_web.sh makes (web/dist), CHROMIUM and FIREFOX the
// browsers.
// A page from a file has no network: no name is found.
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
    { name: "server", testIgnore: "file*.spec.mjs", use: { transport: "server" } },
    { name: "file", testIgnore: "server.spec.mjs", use: { transport: "engine" } },
    ...firefox() ? [{
      name: "firefox", testMatch: "tasks.spec.mjs",
      use: { transport: "engine", browserName: "firefox", channel: "moz-firefox", launchOptions: { executablePath: firefox() } },
    }] : [],
  ],
});
