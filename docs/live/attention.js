"use strict";
// Figures of the chapters on vectors and attention. All numbers come from recorded hook points.
{
  const { clamp, figure, set } = live, { fixed, largest } = draw;

  const LAYER = { name: "layer", label: "layer", options: view => [...Array(view.config.n_layer).keys()] };
  const HEAD = { name: "head", label: "head", options: view => [...Array(view.config.n_head).keys()] };
  const hook = (view, name) => `blocks.${view.layer}.attn.hook_${name}`;
  const vector = (view, name, token) => view.at(hook(view, name), [token, view.head]);
  const weights = (view, query, head = view.head) => view.at(hook(view, "pattern"), [head, query]);
  const dot = (a, b) => a.reduce((sum, value, n) => sum + value * b[n], 0);
  const cosine = (a, b) => dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b));
  const labels = view => view.tokens.map(token => token.label);
  const named = (view, n) => `"${view.tokens[n].label}" (${n})`;

  function softmax(scores) {
    const top = Math.max(...scores), parts = scores.map(score => Math.exp(score - top)), sum = parts.reduce((a, b) => a + b, 0);
    return parts.map(value => value / sum);
  }

  // Moves the query along the tokens, or query and key in a square of scores.
  const alongTokens = view => ({
    choose: (_, token) => set({ query: token }),
    move: (down, right) => set({ query: clamp(view.query + down + right, 0, view.tokens.length - 1) }),
  });
  const inSquare = view => ({
    choose: (query, key) => set({ query, key }),
    move(down, right) {
      const last = view.tokens.length - 1;
      set({ query: clamp(view.query + down, 0, last), key: clamp(view.key + right, 0, last) });
    },
  });

  figure("embeddings", {
    controls: [{ name: "channel", label: "number", max: view => view.config.n_embd - 1 }],
    hooks: () => ["hook_embed", "hook_pos_embed", "blocks.0.hook_resid_pre"],
    draw(view) {
      const { width, query, channel, tokens } = view;
      const rows = [["token", "hook_embed"], ["+ position", "hook_pos_embed"], ["= sum", "blocks.0.hook_resid_pre"]]
        .map(([label, name]) => [label, view.at(name, [query])]);
      const top = largest(rows.flatMap(([, values]) => [...values]));
      const strips = rows.map(([label, values]) => draw.strip({ width, label, values, top, chosen: channel, drag: "channel" }));
      const alike = ["hook_embed", "blocks.0.hook_resid_pre"];
      const cosines = draw.grid({
        width, rows: ["token", "sum"], columns: labels(view), top: 1, chosen: [0, query], name: "cosines", side: 52,
        value: (row, token) => cosine(view.at(alike[row], [query]), view.at(alike[row], [token])),
      });
      const parts = [draw.chips(width, tokens, [query]), ...strips, draw.line(width, `cosine of ${named(view, query)} with each token`), cosines];
      const [token, position, sum] = rows.map(([, values]) => fixed(values[channel], 4));
      return {
        picture: draw.picture(width, "embedding of a token and its position", parts),
        summary: `Number ${channel} of ${named(view, query)}: ${token} + ${position} = ${sum}.`,
        ...alongTokens(view),
        drag: (_, x) => set({ channel: clamp(Math.floor(x / width * view.config.n_embd), 0, view.config.n_embd - 1) }),
      };
    },
  });

  figure("dot-product", {
    controls: [LAYER, HEAD],
    hooks: view => [hook(view, "q"), hook(view, "k")],
    draw(view) {
      const { width, query, key, tokens } = view, all = [...tokens.keys()];
      const scores = all.map(i => all.map(j => dot(vector(view, "q", i), vector(view, "k", j))));
      const q = vector(view, "q", query), k = vector(view, "k", key), products = q.map((value, n) => value * k[n]);
      const top = largest([...q, ...k]), one = { width };
      const square = draw.grid({ width, rows: labels(view), columns: labels(view), top: largest(scores.flat()), digits: 1, chosen: [query, key], name: "scores", value: (i, j) => scores[i][j] });
      const parts = [
        draw.line(width, "query · key, each row a query"), square,
        draw.strip({ ...one, label: `query of ${named(view, query)}`, values: q, top }),
        draw.strip({ ...one, label: `key of ${named(view, key)}`, values: k, top }),
        draw.strip({ ...one, label: `products, with the sum ${fixed(scores[query][key], 3)}`, values: products, top: largest([...products]) }),
      ];
      return {
        picture: draw.picture(width, "dot products of queries and keys", parts),
        summary: `Query of ${named(view, query)} · key of ${named(view, key)} = ${fixed(scores[query][key], 3)}.`,
        ...inSquare(view),
      };
    },
  });

  figure("attention-weights", {
    controls: [LAYER, HEAD, { name: "sharpness", label: "temperature", min: -1, max: 1, step: 0.05, start: 0, shown: value => fixed(10 ** value) }],
    hooks: view => [hook(view, "attn_scores"), hook(view, "pattern")],
    draw(view) {
      const { width, query, tokens } = view, temperature = 10 ** view.sharpness;
      const scores = [...view.at(hook(view, "attn_scores"), [view.head, query])].slice(0, query + 1);
      // At temperature 1, the weights are the model's own.
      const parts = temperature === 1 ? [...weights(view, query)].slice(0, query + 1) : softmax(scores.map(score => score / temperature));
      const best = parts.indexOf(Math.max(...parts)), chosen = Math.min(view.key, query);
      const rows = parts.map((value, n) => ({ label: tokens[n].label, value, text: `${fixed(scores[n] / temperature)}  ${fixed(value, 4)}` }));
      return {
        picture: draw.picture(width, "scores and weights of a query", [
          draw.chips(width, tokens, [query], { name: "query" }),
          { node: draw.text(width, 13, "score  weight", "quiet", "end"), height: draw.LINE },
          draw.bars({ width, rows, top: 1, chosen, right: 120, name: "weights" }),
        ]),
        summary: `${named(view, query)} gives ${named(view, chosen)} the weight ${fixed(parts[chosen], 4)}. The largest is ${fixed(parts[best], 4)}, for ${named(view, best)}.`,
        choose: (row, token, part) => set(part < 0 ? { query: token } : { key: row }),
        move: (down, right, at) => at === "chips" ? alongTokens(view).move(down, right) : set({ key: clamp(chosen + down, 0, query) }),
      };
    },
  });

  figure("queries-keys-values", {
    controls: [LAYER, HEAD],
    hooks: view => ["q", "k", "v", "z", "pattern", "attn_scores"].map(name => hook(view, name)),
    draw(view) {
      const { width, query, key, tokens } = view, isHidden = key > query, last = tokens.length - 1;
      const [q, k, v, z] = [["q", query], ["k", key], ["v", key], ["z", query]].map(([name, token]) => vector(view, name, token));
      const row = draw.chips(width, tokens, [query, key], { gap: 20 }), places = row.places;
      const handle = (name, token, y) => draw.svg("g", {
        "data-drag": name, "data-at": name, tabindex: 0, role: "slider", "aria-label": `${name} token`, "aria-valuemin": 0, "aria-valuemax": last, "aria-valuenow": token, "aria-valuetext": tokens[token].label,
      }, draw.svg("rect", { x: clamp(places[token].x - 26, 0, width - 52), y, width: 52, height: 18, rx: 9, class: "handle" }),
      draw.text(clamp(places[token].x, 26, width - 26), y + 13, name, "on", "middle"));
      const handles = [handle("query", query, places[query].top - 20), handle("key", key, places[key].bottom + 2)];
      const scale = Math.sqrt(q.length), forward = dot(q, k) / scale, back = dot(vector(view, "q", key), vector(view, "k", query)) / scale;
      const top = largest([...q, ...k]), weight = weights(view, query)[key];
      const strip = (label, values, most) => draw.strip({ width, label, values, top: most });
      return {
        picture: draw.picture(width, "query, key and value of two tokens", [
          { node: draw.svg("g", {}, row.node, ...handles), height: row.height },
          strip(`query of ${named(view, query)}`, q, top), strip(`key of ${named(view, key)}`, k, top),
          draw.line(width, `score: query · key / √${q.length} = ${fixed(forward, 3)}; with the roles exchanged ${fixed(back, 3)}`, ""),
          strip(`value of ${named(view, key)}, weight ${fixed(weight, 4)}`, v, largest([...v, ...z])),
          strip(`output for ${named(view, query)}: the sum of all values, each times its weight`, z, largest([...v, ...z])),
        ]),
        summary: `The query of ${named(view, query)} and the key of ${named(view, key)} have the score ${fixed(forward, 3)}; ${isHidden ? "the key is later than the query, so its weight is 0" : `its weight is ${fixed(weight, 4)}`}.`,
        choose: (_, token) => set({ query: token }),
        move: (down, right, at) => set({ [at === "key" ? "key" : "query"]: clamp((at === "key" ? key : query) + down + right, 0, last) }),
        drag(name, x, y) {
          const far = place => Math.hypot(place.x - x, 2 * ((place.top + place.bottom) / 2 - y));
          const nearest = places.reduce((best, place, n) => far(place) < far(places[best]) ? n : best, 0);
          if (nearest !== view[name]) set({ [name]: nearest });
        },
      };
    },
  });

  // Weights of the sentence before the last edit, to mark the rows that the edit changed.
  let now, before;

  figure("causal-mask", {
    controls: [LAYER, HEAD, { name: "masked", label: "mask", start: true }],
    hooks: view => ["q", "k", "pattern"].map(name => hook(view, name)),
    draw(view) {
      const { width, query, key, tokens, masked } = view, all = [...tokens.keys()], scale = Math.sqrt(vector(view, "q", 0).length);
      const rows = {
        true: all.map(i => [...weights(view, i)]),
        false: all.map(i => softmax(all.map(j => dot(vector(view, "q", i), vector(view, "k", j)) / scale))),
      };
      const place = `${view.layer}.${view.head}`;
      if (now?.text !== view.text || now.place !== place) [before, now] = [now?.place === place ? now : undefined, { text: view.text, place, rows }];
      const old = before?.rows[masked];
      const edited = all.map(i => !old?.[i] ? "" : old[i].some((weight, j) => weight !== (rows[masked][i][j] ?? 0)) ? "changed" : "the same");
      const square = draw.grid({
        width, rows: labels(view), columns: labels(view), top: 1, chosen: [query, key], name: "weights", right: 64,
        value: (i, j) => masked && j > i ? NaN : rows[masked][i][j],
      });
      const marks = edited.map((words, i) => draw.text(square.end + 6, i * square.tall + square.tall / 2 + 4, words, words === "changed" ? "mark-text" : "quiet"));
      const changed = edited.filter(words => words === "changed").length, count = edited.filter(Boolean).length;
      return {
        picture: draw.picture(width, "weights with and without the mask", [{ node: draw.svg("g", {}, square.node, ...marks), height: square.height }]),
        summary: `${named(view, query)} gives ${named(view, key)} the weight ${fixed(rows[masked][query][key], 4)}.${count ? ` Your last edit changed ${changed} of ${count} rows.` : ""}`,
        ...inSquare(view),
      };
    },
  });

  figure("multi-head", {
    controls: [LAYER],
    hooks: view => [hook(view, "pattern")],
    draw(view) {
      const { width, query, key, tokens, head } = view, heads = [...Array(view.config.n_head).keys()];
      const across = Math.max(1, Math.min(heads.length, Math.floor(width / 150))), room = Math.floor(width / across) - 12;
      const maps = heads.map(one => {
        const strongest = weights(view, query, one).reduce((best, weight, n, row) => weight > row[best] ? n : best, 0);
        const map = draw.grid({
          width: room, side: 0, rows: labels(view), columns: labels(view), top: 1, part: one, chosen: [query, key], foot: false, most: 30,
          name: `weights of head ${view.layer}.${one}`, value: (i, j) => j > i ? NaN : weights(view, i, one)[j],
        });
        const words = draw.text(0, map.height + 10, draw.cut(`→ ${tokens[strongest].label} ${fixed(weights(view, query, one)[strongest])}`, room));
        return { node: draw.svg("g", {}, draw.text(0, 12, `head ${view.layer}.${one}`, one === head ? "strong" : "quiet"), draw.svg("g", { transform: "translate(0 18)" }, map.node, words)), height: map.height + 36 };
      });
      const lines = [];
      for (let n = 0; n < maps.length; n += across) {
        const some = maps.slice(n, n + across);
        lines.push({ node: draw.svg("g", {}, some.map(({ node }, at) => draw.svg("g", { transform: `translate(${at * (room + 12)} 0)` }, node))), height: some[0].height });
      }
      const each = heads.map(one => `${view.layer}.${one}: ${fixed(weights(view, query, one)[key], 4)}`).join(", ");
      return {
        picture: draw.picture(width, "attention weights of all heads of a layer", [draw.chips(width, tokens, [query], { name: "query" }), ...lines]),
        summary: `Weights that ${named(view, query)} gives ${named(view, key)}: ${each}.`,
        choose: (row, token, part) => set(part < 0 ? { query: token } : { query: row, key: token, head: part }),
        move: (down, right, at) => at === "chips" ? alongTokens(view).move(down, right) : inSquare(view).move(down, right),
      };
    },
  });
}
