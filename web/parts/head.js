// One attention weight of one head step by step, as a further part of `parts`, so that it can be computed along by hand: query, key, their products and the score, the
// score divided by √d, the mask and softmax over the row, and the values weighted and added up to the context vector.
parts.head = (() => {
  const { element } = parts;
  // Masked tokens that are shown behind a row.
  const MASKED = 3;

  const fixed = value => value.toFixed(4);
  const signed = value => value < 0 ? `(${fixed(value)})` : fixed(value);
  const sum = values => values.reduce((total, value) => total + value, 0);

  // ---- What it is drawn with

  // The numbers of a vector, each on its colour: place by place, as the tables count them.
  function vector(name, values, top) {
    const cells = values.map((value, place) => {
      const rgb = parts.colour(value, "signed", top);
      const cell = element("li", { title: `place ${place}: ${value}` }, fixed(value));
      Object.assign(cell.style, { background: parts.css(rgb), color: parts.ink(rgb) });
      return cell;
    });
    return element("div", { className: "vector" }, element("b", {}, name), element("ol", { role: "list", ariaLabel: name }, ...cells));
  }

  function table(caption, names, rows, last) {
    const line = (kind, texts) => element("tr", {}, ...texts.map((text, n) => {
      const cell = element(n ? kind : "th", {}, text);
      cell.scope = kind === "th" ? "col" : n ? "" : "row";
      return cell;
    }));
    const foot = last ? [element("tfoot", {}, line("td", last))] : [];
    const body = element("table", {}, element("caption", {}, caption), element("thead", {}, line("th", names)),
      element("tbody", {}, ...rows.map(texts => line("td", texts))), ...foot);
    return element("div", { className: "values", tabIndex: 0, role: "group", ariaLabel: caption }, body);
  }

  const formula = text => element("p", { className: "formula" }, text);
  const folded = (name, ...inside) => element("details", {}, element("summary", {}, name), ...inside);

  function step(number, title, words, ...inside) {
    const heading = element("h3", {}, element("span", { className: "number" }, String(number)), title);
    return element("li", {}, heading, element("p", {}, words), ...inside);
  }

  // ---- The six steps

  // The look of `look/head`; onKey(n) is called when another key is chosen in the row.
  function draw(place, look, onKey) {
    const [query, key] = [look.tokens[look.query], look.tokens[look.key]];
    const names = { query: `“${query}” ${look.query}`, key: `“${key}” ${look.key}` };
    const top = parts.largest([...look.q, ...look.k]);
    const isOpen = [...place.querySelectorAll("details")].map(one => one.open);
    place.replaceChildren(
      step(1, `The query vector of ${names.query}`, `${look.isUnmasked ? "The token's own vector" : "The token's residual stream before this layer, after the layer norm"}, multiplied by the head's query matrix${look.isUnmasked ? "" : ", with a bias"}: what this token searches for, like a query to a database.`,
        vector("q", look.q, top)),
      step(2, `The key vector of ${names.key}`, "That token's vector, multiplied by the key matrix in the same way: what it is matched by, like a key in an index.",
        vector("k", look.k, top)),
      products(look),
      scaled(look),
      weights(look, names, onKey),
      context(look, names));
    place.querySelectorAll("details").forEach((one, n) => one.open = isOpen[n] ?? false);
  }

  function products(look) {
    const rows = look.products.map((product, n) => [String(n), fixed(look.q[n]), fixed(look.k[n]), fixed(product)]);
    const terms = look.q.slice(0, 2).map((value, n) => `${signed(value)} · ${signed(look.k[n])}`).join(" + ");
    return step(3, "Multiply component by component and add: the attention score",
      "Their dot product: the larger it is, the more alike the two vectors are, and the more the query attends to the key.",
      vector("q · k, component by component", look.products, parts.largest(look.products)),
      formula(`${terms}${look.q.length > 2 ? " + …" : ""} = ${fixed(look.score)}`),
      folded("Every place as a table", table("q, k and their products", ["place", "q", "k", "q · k"], rows, ["sum", "", "", fixed(look.score)])));
  }

  function scaled(look) {
    const by = fixed(1 / look.scale);
    const isUsual = Math.abs(look.scale * Math.sqrt(look.head_dim) - 1) < 1e-6;
    const root = isUsual ? `√${look.head_dim}` : by;
    return step(4, `Divided by ${root}`,
      isUsual ? "Longer vectors have larger products. Dividing by the square root of their length keeps the scores in the same range: scaled dot product attention."
        : "As this model's configuration demands: it does not scale its scores by the square root of the vectors' length.",
      formula(`${fixed(look.score)} / ${root}${isUsual ? ` = ${fixed(look.score)} / ${by}` : ""} = ${fixed(look.scaled)}`));
  }

  function weights(look, names, onKey) {
    const most = Math.max(...look.scores);
    const powers = look.scores.map(score => Math.exp(score - most)), total = sum(powers);
    const known = look.scores.map((score, n) => [`${look.tokens[n]} ${n}`, fixed(score), fixed(score - most), fixed(powers[n]), fixed(look.weights[n])]);
    const masked = look.tokens.slice(look.scores.length);
    const hidden = masked.slice(0, MASKED).map((token, n) => [`${token} ${look.scores.length + n}`, "−∞", "−∞", "0", "0"]);
    if (masked.length > MASKED) hidden.push([`and ${masked.length - MASKED} more`, "−∞", "−∞", "0", "0"]);
    const bars = element("div");
    const view = {
      columns: look.scores.map((_, n) => `${look.tokens[n]} ${n}`), values: look.weights, scale: "share", top: 1, decimals: 4,
      texts: look.scores.map(score => `score ${fixed(score)}`), name: `attention weights of ${names.query}; Enter selects another key`,
    };
    const list = parts.bars(bars, view, n => list.choose(n), onKey);
    list.choose(look.key);
    const mask = look.isUnmasked ? "This example has no mask: the word attends to all six. "
      : masked.length ? "The causal mask sets the scores of later tokens to −∞, so that their weights are 0. " : "No token comes later, so the causal mask hides nothing. ";
    return step(5, `From all scores of ${names.query} to attention weights: softmax`,
      `${mask}Softmax raises e to each score and divides by the sum, so the weights are positive and add up to 1.`,
      bars,
      formula(`${names.key}: e^(${fixed(look.scores[look.key])} − ${signed(most)}) / ${fixed(total)} = ${fixed(powers[look.key])} / ${fixed(total)} = ${fixed(look.weights[look.key])}`),
      folded("Every token as a table", table("from scores to weights; the largest score is subtracted first, which changes no weight",
        ["key", "score", "− largest", "e^", "weight"], [...known, ...hidden], ["sum", "", "", fixed(total), fixed(sum(look.weights))])));
  }

  function context(look, names) {
    const weight = look.weights[look.key];
    const share = look.v.map(value => weight * value);
    const top = parts.largest([...look.v, ...look.context]);
    const rows = look.v.map((value, n) => [String(n), fixed(value), fixed(share[n]), fixed(look.context[n] - share[n]), fixed(look.context[n])]);
    return step(6, `The values, weighted and added: the context vector of ${names.query}`,
      `A token's value vector is its content, which is retrieved when its key matches. This key contributes ${fixed(weight)} · v; the sum over all keys is the head's output.`,
      vector(`v of ${names.key}`, look.v, top), vector(`${fixed(weight)} · v`, share, top), vector("context vector: the sum over all keys", look.context, top),
      formula(`place 0: ${fixed(weight)} · ${signed(look.v[0])} + what the other keys add, ${signed(look.context[0] - share[0])} = ${fixed(look.context[0])}`),
      folded("Every place as a table", table("from the value to the context vector", ["place", "v", "weight · v", "other keys", "context"], rows)));
  }

  // ---- The example of the articles: six words, three numbers each, and matrices to two; without a mask, as they have it first.

  const EXAMPLE = {
    tokens: ["Your", "journey", "starts", "with", "one", "step"],
    inputs: [[0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64], [0.22, 0.58, 0.33], [0.77, 0.25, 0.1], [0.05, 0.8, 0.55]],
    query: [[0.2961, 0.5166], [0.2517, 0.6886], [0.074, 0.8665]],
    key: [[0.1366, 0.1025], [0.1841, 0.7264], [0.3153, 0.6871]],
    value: [[0.0756, 0.1966], [0.3164, 0.4017], [0.1186, 0.8274]],
  };

  const times = (row, matrix) => matrix[0].map((_, column) => sum(row.map((value, n) => value * matrix[n][column])));

  // The example as an answer of `look/head`: of the second word, to a key.
  function example(key) {
    const { tokens, inputs } = EXAMPLE;
    const q = times(inputs[1], EXAMPLE.query), keys = inputs.map(row => times(row, EXAMPLE.key)), values = inputs.map(row => times(row, EXAMPLE.value));
    const scale = 1 / Math.sqrt(q.length);
    const scores = keys.map(k => sum(k.map((value, n) => value * q[n])) * scale);
    const total = sum(scores.map(Math.exp)), weights = scores.map(score => Math.exp(score) / total);
    const products = keys[key].map((value, n) => value * q[n]);
    return {
      tokens, isUnmasked: true, query: 1, key, head_dim: q.length, scale, q, k: keys[key], products, score: sum(products), scaled: scores[key], scores, weights,
      v: values[key], context: q.map((_, n) => sum(values.map((value, token) => weights[token] * value[n]))),
    };
  }

  // ---- What is chosen

  // The steps in head.html, for the pair that is chosen there or in the picture of attention.
  // subject(): a promise of { prompt, count, layers, heads } of the text and the model, the last two as labels, which are numbers.
  // ask(body): a promise of the answer of `look/head`, or of nothing.
  // chosen: { get(), set(text) } what is chosen in the picture, as text such as layer=1&head=0&row=5&column=2.
  // moved(): called when another pair is chosen; the function that comes back draws it.
  function view({ subject, ask, chosen, moved }) {
    const box = name => document.getElementById("head-" + name);
    const selects = ["layer", "head", "query", "key"].map(name => [name, box(name)]);
    let exampleKey = 1;

    function fill(select, labels, value) {
      select.replaceChildren(...labels.map((label, n) => element("option", { value: n }, label)));
      select.value = parts.clamp(value, 0, labels.length - 1);
    }

    // Layer and head are places in the lists of labels, as in the picture.
    async function place() {
      const { prompt, count, layers, heads } = await subject();
      const given = new URLSearchParams(chosen.get());
      const [layer, head] = [Math.max(0, layers.indexOf(given.get("layer"))), Math.max(0, heads.indexOf(given.get("head")))];
      const query = parts.clamp(given.get("row") | 0, 0, count - 1);
      return { prompt, layers, heads, layer, head, query, key: parts.clamp(given.get("column") | 0, 0, query) };
    }

    function keep({ layers, heads, layer, head, query, key }) {
      chosen.set(String(new URLSearchParams({ layer: layers[layer], head: heads[head], row: query, column: Math.min(key, query) })));
    }

    async function look() {
      const at = await place();
      const found = await ask({ prompt: at.prompt, layer: Number(at.layers[at.layer]), head: Number(at.heads[at.head]), query: at.query, key: at.key });
      return found && { at, found };
    }

    const ofExample = () => ({ at: { layers: ["–"], heads: ["–"], layer: 0, head: 0 }, found: example(exampleKey) });

    async function show() {
      const isExample = box("example").checked;
      const { at, found } = (isExample ? ofExample() : await look()) ?? {};
      if (!found) {
        box("title").textContent = "";
        box("steps").replaceChildren();
        return;
      }
      for (const [, select] of selects.slice(0, 3)) select.disabled = isExample;
      const names = found.tokens.map((token, n) => `${token} ${n}`);
      const lists = [at.layers, at.heads, names, names.slice(0, found.scores.length)];
      [at.layer, at.head, found.query, found.key].forEach((value, n) => fill(selects[n][1], lists[n], value));
      const where = isExample ? ": the six words of the example" : ` in head ${found.head} of layer ${found.layer}`;
      box("title").textContent = `How much “${found.tokens[found.query]}” attends to “${found.tokens[found.key]}”${where}: ${fixed(found.weights[found.key])}`;
      draw(box("steps"), found, takeKey);
    }

    function takeKey(key) {
      if (!box("example").checked) return change("key", key);
      exampleKey = key;
      moved();
    }

    async function change(name, value) {
      keep({ ...await place(), [name]: value });
      moved();
    }

    for (const [name, select] of selects) select.onchange = () => name === "key" ? takeKey(Number(select.value)) : change(name, Number(select.value));
    box("example").onchange = moved;
    return show;
  }

  return { draw, example, view };
})();
