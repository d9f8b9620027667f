// @ts-check
// The compression box: shows the cost of each token in a text, compresses the text, and opens files from
// `gpt2 compress`.
import { short } from "./parts/colors.js";
import { element, find } from "./parts/dom.js";
import { bitsText, shown, tint } from "./parts/tokens.js";

const SUFFIX = ".gpt2z";
// Each token's element takes time to render, so for longer texts only the beginning shows its sizes.
const MOST_TOKENS = 5000;

const grouped = (/** @type {number} */ count) => count.toLocaleString("en");
const bytesOf = (/** @type {string} */ text) => new TextEncoder().encode(text);

/** @type {(bytes: number, compressed: number) => string} */
function sizesInWords(bytes, compressed) {
  const rate = bytes ? `${short(8 * compressed / bytes)} bits per byte: ` : "";
  return `${rate}${grouped(bytes)} bytes become ${grouped(compressed)}`;
}

/** Decodes a token's bytes as text; incomplete characters become hex escapes. @param {number[]} bytes */
function textOfBytes(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes));
  } catch {
    return bytes.map(byte => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
  }
}

/** @param {any} engine a transport that compresses */
export function startCompression(engine) {
  const [plain, status, sizes, result, progress] = ["plain", "compression-said", "sizes", "compression-result", "compression-progress"].map(find);
  let isBusy = false;

  function buttons() {
    for (const id of ["measure", "compress", "compressed-file"]) find(id).disabled = isBusy;
    find("stop-compressing").disabled = !isBusy;
  }

  /**
   * Runs one task at a time and reports errors.
   * @type {(what: string, work: (say: (done: number, total: number) => void) => Promise<string>) => Promise<void>}
   */
  async function doing(what, work) {
    if (isBusy) return;
    isBusy = true;
    buttons();
    sizes.hidden = result.hidden = true;
    status.textContent = what;
    try {
      status.textContent = await work((done, total) => {
        progress.hidden = false;
        progress.value = total ? done / total : 0;
      });
    } catch (/** @type {any} */ error) {
      status.textContent = error.stopped ? "stopped" : `error: ${error.message}`;
    } finally {
      isBusy = false;
      progress.hidden = true;
      buttons();
    }
  }

  /** @param {{ bytes: number[], bits: number }[]} tokens */
  function draw(tokens) {
    sizes.replaceChildren(...tokens.slice(0, MOST_TOKENS).map(({ bytes, bits }) => {
      const token = textOfBytes(bytes);
      const span = element("span", { title: `${shown(token)} ${short(bits)} bits` }, token);
      span.dataset.bits = bitsText(bits);
      tint(span, { tokens: [{ token, logprob: -bits * Math.LN2 }] });
      return span;
    }));
    sizes.hidden = false;
  }

  /** Offers a link that saves bytes. @type {(bytes: Uint8Array, name: string) => void} */
  function offer(bytes, name) {
    URL.revokeObjectURL(result.href);
    Object.assign(result, { href: URL.createObjectURL(new Blob([/** @type {any} */ (bytes)])), download: name, textContent: `Save ${name}`, hidden: false });
  }

  find("measure").onclick = () => doing("measuring", async () => {
    /** @type {{ bytes: number[], bits: number }[]} */
    const tokens = await engine.sizes(bytesOf(plain.value));
    const bits = tokens.reduce((sum, one) => sum + one.bits, 0), bytes = bytesOf(plain.value).length;
    draw(tokens);
    return `${grouped(tokens.length)} tokens, ${bits.toFixed(1)} bits${bytes ? `, ${short(bits / bytes)} per byte` : ""}`;
  });

  find("compress").onclick = () => doing("compressing", async say => {
    const bytes = bytesOf(plain.value), compressed = await engine.compress(bytes, say);
    offer(compressed, `text.txt${SUFFIX}`);
    return sizesInWords(bytes.length, compressed.length);
  });

  find("compressed-file").onchange = () => {
    const [file] = find("compressed-file").files;
    if (!file) return;
    doing("decompressing", async say => {
      const compressed = new Uint8Array(await file.arrayBuffer()), bytes = await engine.decompress(compressed, say);
      offer(bytes, file.name.endsWith(SUFFIX) ? file.name.slice(0, -SUFFIX.length) : `${file.name}.out`);
      try {
        plain.value = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
      } catch {
        plain.value = "";
        return `${sizesInWords(bytes.length, compressed.length)}; the content is not text`;
      }
      return sizesInWords(bytes.length, compressed.length);
    }).finally(() => { find("compressed-file").value = ""; });
  };

  find("stop-compressing").onclick = () => engine.stopCompressing();
}
