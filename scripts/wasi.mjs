// Runs a wasm32-wasip1 program under Node, for tests and examples of that target.
// usage: CARGO_TARGET_WASM32_WASIP1_RUNNER="node SCRIPTS/wasi.mjs" cargo test --target wasm32-wasip1 …
//
// The program receives the arguments, the environment and the current folder. It can also access, by absolute
// path, this repository, the system's temporary folder and GPT2_CHECKPOINTS, if set. The exit code is the
// program's; a panic exits with code 101. Threads are not supported.
//
// Node 20 and 22 crash when a program's memory grows (SIGSEGV, SIGTRAP), mostly while they optimize its
// functions. The functions are therefore optimized before they run, and after a crash the program is
// restarted once, with a message. Start it with enough memory, as scripts/ci.sh does.
import { spawnSync } from "node:child_process";
import { readFile, realpath } from "node:fs/promises";
import { tmpdir } from "node:os";
import { fileURLToPath } from "node:url";

// Node prints a warning at each start that WASI may change.
process.removeAllListeners("warning");
const { WASI } = await import("node:wasi");

const [, , program, ...args] = process.argv;
if (program === undefined) {
  console.error("usage: node wasi.mjs PROGRAM.wasm [ARGUMENT…]");
  process.exit(2);
}
const INNER = "GPT2_WASI_INNER";
if (!process.env[INNER]) {
  const run = () => spawnSync(process.execPath, ["--no-liftoff", ...process.execArgv, ...process.argv.slice(1)], { stdio: "inherit", env: { ...process.env, [INNER]: "1" } });
  let { status, signal } = run();
  if (signal === "SIGSEGV" || signal === "SIGTRAP") {
    console.error(`node ended with ${signal}; ${program} is started once more`);
    ({ status, signal } = run());
  }
  if (signal) console.error(`node ended with ${signal}`);
  process.exit(status ?? 1);
}
const repository = await realpath(fileURLToPath(new URL("..", import.meta.url)));
const folders = [repository, tmpdir()];
const env = { ...process.env, TMPDIR: tmpdir() };
if (env.GPT2_CHECKPOINTS) {
  // WASI programs cannot leave a preopened folder, so the path must not contain "..".
  env.GPT2_CHECKPOINTS = await realpath(env.GPT2_CHECKPOINTS);
  folders.push(env.GPT2_CHECKPOINTS);
}
const wasi = new WASI({
  version: "preview1",
  args: [program, ...args],
  // Tests print immediately, because a panic would discard captured output.
  env: { RUST_TEST_NOCAPTURE: "1", ...env },
  preopens: { ".": process.cwd(), ...Object.fromEntries(folders.map((folder) => [folder, folder])) },
});
const module = await WebAssembly.compile(await readFile(program));
const instance = await WebAssembly.instantiate(module, wasi.getImportObject());
try {
  process.exitCode = wasi.start(instance);
} catch (error) {
  if (!(error instanceof WebAssembly.RuntimeError)) throw error;
  // The program has already printed the message; this adds the location.
  console.error(error.stack);
  process.exitCode = 101;
}
