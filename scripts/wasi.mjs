// Runs a program for wasm32-wasip1 under Node: how cargo runs tests and examples of that target.
// usage: CARGO_TARGET_WASM32_WASIP1_RUNNER="node SCRIPTS/wasi.mjs" cargo test --target wasm32-wasip1 …
//
// The program gets the arguments and the environment, the folder it is started in as its own, and by their full names this
// repository, the system's folder for temporary files and GPT2_CHECKPOINTS, if it is set; the exit code is the program's. There are no threads, and a panic
// ends the program with code 101. Node 20 and 22 crash where a program's memory grows (SIGSEGV, SIGTRAP), mostly while they optimise its
// functions: so these are optimised before they run, and after a crash the program is started once more, which is said. Give it memory
// enough to begin with, as scripts/ci.sh does.
import { spawnSync } from "node:child_process";
import { readFile, realpath } from "node:fs/promises";
import { tmpdir } from "node:os";
import { fileURLToPath } from "node:url";

// Node says with each start that WASI may change.
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
  // A program may not go up from a folder that it was given, so the path must have no "..".
  env.GPT2_CHECKPOINTS = await realpath(env.GPT2_CHECKPOINTS);
  folders.push(env.GPT2_CHECKPOINTS);
}
const wasi = new WASI({
  version: "preview1",
  args: [program, ...args],
  // What tests print is not held back: a panic would end the program before it is shown.
  env: { RUST_TEST_NOCAPTURE: "1", ...env },
  preopens: { ".": process.cwd(), ...Object.fromEntries(folders.map((folder) => [folder, folder])) },
});
const module = await WebAssembly.compile(await readFile(program));
const instance = await WebAssembly.instantiate(module, wasi.getImportObject());
try {
  process.exitCode = wasi.start(instance);
} catch (error) {
  if (!(error instanceof WebAssembly.RuntimeError)) throw error;
  // The program has said what happened; this says where.
  console.error(error.stack);
  process.exitCode = 101;
}
