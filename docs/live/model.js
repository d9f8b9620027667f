"use strict";
// Figures of the chapters on tokens, blocks, the whole model, sampling, the cache and training.
{
  const { clamp, figure, set } = live, { fixed, largest } = draw;

  const labels = view => view.tokens.map(token => token.label);
  const named = (view, n) => `"${view.tokens[n].label}" (${n})`;
  const layers = view => [...Array(view.config.n_layer).keys()];
  const whole = number => number.toLocaleString("en");
  const dot = (a, b) => a.reduce((sum, value, n) => sum + value * b[n], 0);
  const length = values => Math.sqrt(dot(values, values));
  const alongTokens = view => (down, right) => set({ query: clamp(view.query + down + right, 0, view.tokens.length - 1) });

  // GPT-2's tokenizers write each byte as a visible character: printable ones as themselves, others shifted.
  const isOwn = byte => byte > 32 && byte < 127 || byte > 160 && byte < 173 || byte > 173;
  const others = [...Array(256).keys()].filter(byte => !isOwn(byte));
  const byteOf = letter => isOwn(letter.charCodeAt(0)) && letter.charCodeAt(0) < 256 ? letter.charCodeAt(0) : others[letter.charCodeAt(0) - 256];
  const shown = letters => [...letters].map(letter => {
    const byte = byteOf(letter);
    return byte === 32 ? "·" : byte > 32 && byte < 127 ? letter : byte.toString(16).padStart(2, "0");
  }).join("");

  // Ranks of the merges, and the tokens in the tokenizer's letters. Parsed once.
  let tokenizer;

  async function parsed(engine) {
    const { vocab, merges } = engine.tokenizer.model;
    const ranks = new Map(merges.map((pair, rank) => [typeof pair === "string" ? pair : pair.join(" "), rank]));
    return { ranks, letters: new Map(Object.entries(vocab).map(([letters, id]) => [id, letters])) };
  }

  // Returns the states of a token from its bytes to the whole; each merge joins the pair with the lowest rank.
  function mergesOf({ ranks, letters }, id) {
    let pieces = [...letters.get(id) ?? ""];
    const steps = [{ pieces }];
    while (pieces.length > 1) {
      const found = pieces.slice(1).map((right, n) => ranks.get(`${pieces[n]} ${right}`) ?? Infinity), rank = Math.min(...found);
      // A special token has no merges.
      if (rank === Infinity) return steps.slice(0, 1);
      const at = found.indexOf(rank);
      pieces = [...pieces.slice(0, at), pieces[at] + pieces[at + 1], ...pieces.slice(at + 2)];
      steps.push({ pieces, rank });
    }
    return steps;
  }

  figure("tokens", {
    load: async view => mergesOf(await (tokenizer ??= parsed(view.engine)), view.ids[view.query]),
    draw(view) {
      const { width, query, tokens, more: steps } = view;
      const lines = steps.map(({ pieces, rank }) => {
        const row = draw.chips(width - 110, pieces.map(piece => ({ label: shown(piece) })), [], { name: "pieces" });
        return { node: draw.svg("g", { transform: "translate(110 0)" }, draw.text(-110, 16, rank === undefined ? "bytes" : `merge ${whole(rank + 1)}`, "quiet"), row.node), height: row.height - 4 };
      });
      // The chips of a merge are a picture only.
      lines.flatMap(({ node }) => [...node.querySelectorAll("[tabindex], [data-cell]")]).forEach(node => ["tabindex", "data-cell", "data-at"].forEach(name => node.removeAttribute(name)));
      return {
        picture: draw.picture(width, "tokens of the sentence and the merges of one token", [
          draw.chips(width, tokens, [query], { below: token => String(token.id) }), draw.line(width, `from bytes to "${tokens[query].label}"`), ...lines,
        ]),
        summary: `${view.all.length} tokens. ${named(view, query)} has the id ${tokens[query].id} and takes ${steps.length - 1} merges.`,
        choose: (_, token) => set({ query: token }), move: alongTokens(view),
      };
    },
  });

  figure("block", {
    hooks: view => ["hook_embed", "hook_pos_embed", ...layers(view).flatMap(n => ["attn_out", "mlp_out", "resid_pre", "resid_mid", "resid_post"].map(name => `blocks.${n}.hook_${name}`))],
    draw(view) {
      const { width, query, tokens } = view, value = name => view.at(name, [query]), final = value(`blocks.${view.config.n_layer - 1}.hook_resid_post`);
      const parts = [
        ["token", "hook_embed", "hook_embed"], ["position", "hook_pos_embed", "blocks.0.hook_resid_pre"],
        ...layers(view).flatMap(n => [[`attn ${n}`, `blocks.${n}.hook_attn_out`, `blocks.${n}.hook_resid_mid`], [`MLP ${n}`, `blocks.${n}.hook_mlp_out`, `blocks.${n}.hook_resid_post`]]),
      ];
      // Lengths along the final direction add up to the final length.
      const rows = parts.map(([label, name, after]) => {
        const along = dot(value(name), final) / length(final);
        return { label, value: along, text: `${fixed(along)}  ${fixed(length(value(after))).padStart(6)}` };
      });
      const values = rows.map(row => row.value), most = values.indexOf(Math.max(...values)), chosen = clamp(view.part < 0 ? most : view.part, 0, rows.length - 1);
      return {
        picture: draw.picture(width, "contributions to the residual stream of a token", [
          draw.chips(width, tokens, [query]),
          { node: draw.text(width, 13, "adds  length after", "quiet", "end"), height: draw.LINE },
          draw.bars({ width, rows, top: largest(values), chosen, right: 140, name: "contributions" }),
        ]),
        summary: `Along the final direction of ${named(view, query)}, ${rows[chosen].label} adds ${fixed(values[chosen], 3)}. All parts sum to ${fixed(values.reduce((a, b) => a + b, 0), 3)}, the length of the final stream: ${fixed(length(final), 3)}.`,
        choose: (row, token, part) => set(part < 0 ? { query: token } : { part: row }),
        move: (down, right, at) => at === "chips" ? alongTokens(view)(down, right) : set({ part: clamp(chosen + down, 0, rows.length - 1) }),
      };
    },
    start: { part: -1 },
  });

  figure("gpt2", {
    load: view => view.engine.ask("look/lens", { prompt: view.ids, show: "probability" }),
    start: { depth: -1 },
    draw(view) {
      const { width, query, tokens, more: { values, texts }, config: { n_layer } } = view, count = tokens.length;
      // The last row, after all blocks, is on top.
      const rows = ["embedding", ...layers(view).map(n => `block ${n}`)].reverse(), depth = clamp(view.depth < 0 ? n_layer : view.depth, 0, n_layer);
      const at = (row, token) => (n_layer - row) * count + token;
      const lens = draw.grid({
        width, rows, columns: labels(view), top: 1, high: 22, most: 64, side: 76, chosen: [n_layer - depth, query], name: "predictions",
        value: (row, token) => values[at(row, token)] ?? NaN, words: (row, token) => texts[at(row, token)],
        title: (row, token) => `${texts[at(row, token)]} ${fixed(values[at(row, token)], 4)}`,
      });
      const cell = at(n_layer - depth, query);
      return {
        picture: draw.picture(width, "predictions after each block", [draw.line(width, "the most probable next token, if the model ended there"), lens]),
        summary: `After ${depth ? `block ${depth - 1}` : "the embedding"}, the token predicted to follow ${named(view, query)} is "${texts[cell]}", with probability ${fixed(values[cell], 4)}.`,
        choose: (row, token) => set({ depth: n_layer - row, query: token }),
        move: (down, right) => set({ depth: clamp(depth - down, 0, n_layer), query: clamp(query + right, 0, count - 1) }),
      };
    },
  });

  const SHOWN = 12;
  // Settings without effect replace those of the model.
  const PLAIN = { repetition_penalty: 1, no_repeat_ngram_size: 0 };

  figure("sampling", {
    controls: [
      { name: "temperature", label: "temperature", min: 0.1, max: 3, step: 0.1, start: 1, shown: value => fixed(value, 1) },
      { name: "top_k", label: "top_k", max: 100, start: 0, shown: value => value ? String(value) : "off" },
      { name: "top_p", label: "top_p", min: 0.05, max: 1, step: 0.05, start: 1, shown: value => value < 1 ? fixed(value) : "off" },
      { name: "min_p", label: "min_p", max: 0.5, step: 0.01, start: 0, shown: value => value ? fixed(value) : "off" },
    ],
    load: ({ engine, all, temperature, top_k, top_p, min_p }) => engine.ask("look/next", { prompt: all, top: SHOWN, temperature, top_k, top_p, min_p, ...PLAIN }),
    start: { candidate: 0 },
    draw(view) {
      const { width, config, more: { tokens, kept } } = view, chosen = clamp(view.candidate, 0, tokens.length - 1);
      const rows = tokens.map(one => ({ label: one.token.replaceAll(" ", "·").replaceAll("\n", "↵"), value: one.probability, outline: Math.exp(one.logprob), text: fixed(one.probability, 4) }));
      const [rest, own] = [rows.map(row => row.value), rows.map(row => row.outline)].map(values => Math.max(0, 1 - values.reduce((a, b) => a + b, 0)));
      rows.push({ label: "others", value: rest, outline: own, text: fixed(rest, 4) });
      return {
        picture: draw.picture(width, "probabilities of the next token", [
          draw.line(width, "bars: with the settings; frames: the model alone"),
          draw.bars({ width, rows, top: Math.max(...rows.flatMap(row => [row.value, row.outline])), chosen, name: "probabilities" }),
        ]),
        summary: `${whole(kept)} of ${whole(config.vocab_size)} tokens can follow. "${rows[chosen].label}" has the probability ${fixed(rows[chosen].value, 4)}; the model alone gives it ${fixed(rows[chosen].outline, 4)}.`,
        choose: row => set({ candidate: row }), move: down => set({ candidate: clamp(chosen + down, 0, tokens.length - 1) }),
      };
    },
  });

  const cached = view => ["k", "v"].map(name => `blocks.${view.layer}.attn.hook_${name}`);

  figure("cache", {
    controls: [
      { name: "steps", label: "tokens read", min: 1, max: view => view.tokens.length, start: 3 },
      { name: "layer", label: "layer", options: layers },
      { name: "numbers", label: "numbers", options: () => ["f32", "f16", "q8"], start: "f32" },
    ],
    hooks: cached,
    // Keys and values of a run on the first tokens only, to compare with those of the whole sentence.
    load: view => view.engine.record(view.ids.slice(0, view.steps), cached(view)),
    draw(view) {
      const { width, tokens, layer, head, numbers, more } = view, steps = Math.min(view.steps, tokens.length), newest = steps - 1;
      const each = view.engine.inspection.kv_bytes_per_token[numbers];
      const rows = layers(view).map(n => `block ${n}`).reverse();
      const map = draw.grid({
        width, rows, columns: labels(view), top: 1, high: 16, most: 60, side: 66, digits: 0, chosen: [rows.length - 1 - layer, newest], name: "cache",
        value: (_, token) => token > newest ? 0 : token === newest ? 1 : 0.35,
        words: () => "", title: (_, token) => token > newest ? "not read yet" : token === newest ? "computed in this step" : "cached",
      });
      const difference = Math.max(...cached(view).map(name => more[name].data.reduce((most, value, n) => Math.max(most, Math.abs(value - view.values[name].data[n])), 0)));
      const [key, value] = cached(view).map(name => view.at(name, [newest, head]));
      const strip = (label, values) => draw.strip({ width, label: `${label} of ${named(view, newest)} in head ${layer}.${head}`, values, top: largest([...key, ...value]) });
      return {
        picture: draw.picture(width, "the cache after some tokens", [draw.line(width, "pale: cached; strong: computed in this step"), map, strip("key", key), strip("value", value)]),
        summary: `Step ${steps} computes one token and ${steps} scores per head; without a cache, it computes ${steps} tokens and ${steps * steps} scores. ` +
          `The cache has ${steps} × ${whole(each)} = ${whole(steps * each)} bytes. Its keys and values in block ${layer} differ from those of the whole sentence by ${difference === 0 ? "0" : difference.toExponential(1)}.`,
        choose: (row, token) => set({ steps: token + 1, layer: rows.length - 1 - row }),
        move: (down, right) => set({ steps: clamp(steps + right, 1, tokens.length), layer: clamp(layer - down, 0, rows.length - 1) }),
      };
    },
  });

  const best = scores => Math.max(...scores.flat());
  const pattern = n => `blocks.${n}.attn.hook_pattern`;

  figure("learning", {
    controls: [{ name: "checkpoint", label: "checkpoint", max: view => view.engine.history.length - 1, start: 999, shown: (n, view) => `${view.engine.history[n].training} ${whole(view.engine.history[n].step)}` }],
    hooks: view => layers(view).map(pattern),
    draw(view) {
      const { width, ids, engine: { history }, config: { n_head } } = view, at = clamp(view.checkpoint, 0, history.length - 1), one = history[at];
      const [left, high] = [40, 150], most = Math.ceil(Math.max(...history.map(one => one.loss_per_byte)));
      const x = n => +(left + (width - left - 4) * n / Math.max(1, history.length - 1)).toFixed(1), y = share => +(8 + high * (1 - share)).toFixed(1);
      const series = [["loss", "loss", one => one.loss_per_byte / most], ["previous token", "dashed", one => best(one.previous)], ["induction", "dotted", one => best(one.induction)]];
      const chart = draw.svg("g", { "data-drag": "checkpoint" },
        draw.svg("rect", { x: left, y: 8, width: width - left - 4, height: high, class: "paper" }),
        [[0, "0"], [1, `${most}`]].map(([share, words]) => draw.text(left - 6, y(share) + 4, words, "quiet", "end")),
        series.map(([, kind, value]) => draw.svg("polyline", { class: `curve ${kind}`, points: history.map((one, n) => `${x(n)},${y(value(one))}`).join(" ") })),
        draw.svg("line", { x1: x(at), x2: x(at), y1: 8, y2: 8 + high, class: "mark" }));
      // Mean weight that each head gives to the token before, and to the token after an earlier copy.
      const mean = (n, head, pairs) => pairs.reduce((sum, [i, j]) => sum + view.at(pattern(n), [head, i])[j], 0) / pairs.length;
      const before = ids.slice(1).map((_, n) => [n + 1, n]);
      const copies = ids.flatMap((id, i) => ids.slice(0, i).flatMap((other, j) => other === id && j + 1 < i ? [[i, j + 1]] : []));
      const map = (name, pairs, part) => [draw.line(width, `${name}, on your sentence`), draw.grid({
        width, rows: layers(view).map(n => `layer ${n}`), columns: [...Array(n_head).keys()].map(n => `head ${n}`), top: 1, high: 18, most: 64, side: 60, part, name,
        value: (n, head) => pairs.length ? mean(n, head, pairs) : NaN,
      })];
      return {
        picture: draw.picture(width, "loss and heads over the training", [
          draw.line(width, `solid: loss, from 0 to ${most} nats per byte; dashed: best previous-token head; dotted: best induction head`),
          { node: chart, height: high + 18 }, ...map("weight on the token before", before, 0), ...map("weight on what followed an earlier copy", copies, 1),
        ]),
        summary: `Lesson ${one.training}, step ${whole(one.step)}: loss ${fixed(one.loss_per_byte, 3)} nats per byte, best previous-token head ${fixed(best(one.previous), 3)}, best induction head ${fixed(best(one.induction), 3)}.`,
        drag: (_, at) => set({ checkpoint: clamp(Math.round((at - left) / (width - left - 4) * (history.length - 1)), 0, history.length - 1) }),
      };
    },
  });
}
