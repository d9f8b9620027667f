"use strict";
// The box for compression: what each token of a text costs, a file of it, and a file of `gpt2 compress` as text again.
(() => {
  const { element, shown, tint } = parts;
  const find = id => document.getElementById(id);
  const SUFFIX = ".gpt2z";
  // Every element of a token takes time: longer texts have sizes for their beginning.
  const MOST_TOKENS = 5000;
  const [plain, said, sizes, result, progress] = ["plain", "compression-said", "sizes", "compression-result", "compression-progress"].map(find);
  let isBusy = false;

  const grouped = count => count.toLocaleString("en");
  const bytesOf = text => new TextEncoder().encode(text);

  function told(bytes, compressed) {
    const bits = bytes ? `${(8 * compressed / bytes).toFixed(3)} bits per byte: ` : "";
    return `${bits}${grouped(bytes)} bytes become ${grouped(compressed)}`;
  }

  // Does one thing at a time, and says what went wrong.
  async function doing(what, work) {
    if (isBusy) return;
    const say = (done, total) => {
      progress.hidden = false;
      progress.value = total ? done / total : 0;
    };
    isBusy = true;
    buttons();
    sizes.hidden = result.hidden = true;
    said.textContent = what;
    try {
      said.textContent = await work(say);
    } catch (error) {
      said.textContent = error.stopped ? "stopped" : `error: ${error.message}`;
    } finally {
      isBusy = false;
      progress.hidden = true;
      buttons();
    }
  }

  function buttons() {
    for (const id of ["measure", "compress", "compressed-file"]) find(id).disabled = isBusy;
    find("stop-compressing").disabled = !isBusy;
  }

  // The bytes of a token as text; those of a part of a character in hex.
  function text(bytes) {
    try {
      return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes));
    } catch {
      return bytes.map(byte => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
    }
  }

  function draw(tokens) {
    sizes.replaceChildren(...tokens.slice(0, MOST_TOKENS).map(({ bytes, bits }) => {
      const token = text(bytes);
      const span = element("span", { title: `${shown(token)} ${bits.toFixed(2)} bits` }, token);
      span.dataset.bits = bits.toFixed(1);
      tint(span, { tokens: [{ token, logprob: -bits * Math.LN2 }] });
      return span;
    }));
    sizes.hidden = false;
  }

  // A link that saves bytes.
  function offer(bytes, name) {
    URL.revokeObjectURL(result.href);
    Object.assign(result, { href: URL.createObjectURL(new Blob([bytes])), download: name, textContent: `Save ${name}`, hidden: false });
  }

  find("measure").onclick = () => doing("measuring", async () => {
    const tokens = await engine.sizes(bytesOf(plain.value)), bits = tokens.reduce((sum, one) => sum + one.bits, 0);
    draw(tokens);
    const bytes = bytesOf(plain.value).length, each = bytes ? `, ${(bits / bytes).toFixed(3)} a byte` : "";
    return `${grouped(tokens.length)} tokens, ${bits.toFixed(1)} bits${each}`;
  });

  find("compress").onclick = () => doing("compressing", async say => {
    const bytes = bytesOf(plain.value), compressed = await engine.compress(bytes, say);
    offer(compressed, `text.txt${SUFFIX}`);
    return told(bytes.length, compressed.length);
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
        return `${told(bytes.length, compressed.length)}; they are not text`;
      }
      return told(bytes.length, compressed.length);
    }).finally(() => { find("compressed-file").value = ""; });
  };

  find("stop-compressing").onclick = () => engine.stopCompressing();
})();
