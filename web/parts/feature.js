// A feature of a dictionary, as a further part of `parts`: the tokens that it speaks for and against, how often it has which activation,
// and texts that it is active in, each token as dark as the feature is strong there. Drawn into the elements of feature.html.
parts.feature = card => {
  const { colour, css, element, ink } = parts;
  const place = name => document.getElementById("feature-" + name);
  const short = value => String(Number(value.toPrecision(3)));
  // A line break would end the line of the text.
  const shown = token => token.replaceAll("\n", "↵");
  const word = token => element("span", {}, shown(token));

  place("name").textContent = `feature ${card.index}`;
  place("about").textContent = card.density
    ? `active at ${short(card.density * 100)}% of the tokens, from ${short(card.act_min)} to ${short(card.act_max)}`
    : "not active in these texts";
  place("logits").replaceChildren(...[["makes more probable", card.top_logits], ["makes less probable", card.bottom_logits]]
    .filter(([, tokens]) => tokens.length)
    .flatMap(([name, tokens]) => [element("dt", {}, name), element("dd", {}, ...tokens.map(word))]));

  const { bin_width: width, counts } = card.histogram;
  const view = {
    columns: counts.map((_, bin) => `${short(bin * width)} to ${short((bin + 1) * width)}`), values: counts, scale: "amount",
    top: parts.largest(counts), name: "tokens by activation",
  };
  const bars = parts.bars(place("histogram"), view, bin => bars.choose(bin));
  bars.choose(0);

  const token = text => (token, n) => {
    const value = text.tokens_acts_list[n];
    const rgb = value > 0 && colour(value, "amount", card.act_max);
    const made = element("span", { title: short(value), className: n === text.train_token_ind ? "strongest" : "" }, shown(token));
    if (rgb) Object.assign(made.style, { background: css(rgb), color: ink(rgb) });
    return made;
  };
  const line = text => element("p", { dir: "auto" },
    element("small", {}, short(text.tokens_acts_list[text.train_token_ind])), ...text.tokens.map(token(text)));
  place("texts").replaceChildren(...card.examples_quantiles.flatMap(({ quantile_name: name, examples }) =>
    [element("h3", {}, name), ...examples.map(line)]));
};
