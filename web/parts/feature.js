// @ts-check
// Draws a dictionary's feature into feature.html: the tokens that it makes more or less probable, the
// histogram of its activations, and the texts that activate it.
import { bars } from "./bars.js";
import { color, fill, largest, percentOf, short } from "./colors.js";
import { element, find } from "./dom.js";

// A line break would split the line of text.
const inLine = (/** @type {string} */ token) => token.replaceAll("\n", "↵");
const place = (/** @type {string} */ name) => find(`feature-${name}`);

/** @type {(card: import("../types").FeatureCard, text: import("../types").FeatureText) => any} */
const line = (card, text) => element("p", { dir: "auto" },
  element("small", {}, short(text.tokens_acts_list[text.train_token_ind])),
  ...text.tokens.map((token, n) => {
    const value = text.tokens_acts_list[n];
    const made = element("span", { title: short(value), className: n === text.train_token_ind ? "strongest" : "" }, inLine(token));
    if (value > 0) fill(made, color(value, "amount", card.act_max));
    return made;
  }));

/** @param {import("../types").FeatureCard} card */
export function drawFeature(card) {
  place("name").textContent = `feature ${card.index}`;
  place("about").textContent = card.density
    ? `active at ${percentOf(card.density)} of the tokens, with activations from ${short(card.act_min)} to ${short(card.act_max)}`
    : "not active in these texts";
  /** @type {[string, string[]][]} */
  const effects = [["makes more probable", card.top_logits], ["makes less probable", card.bottom_logits]];
  place("logits").replaceChildren(...effects.filter(([, tokens]) => tokens.length)
    .flatMap(([name, tokens]) => [element("dt", {}, name), element("dd", {}, ...tokens.map(token => element("span", {}, inLine(token))))]));

  const { bin_width: width, counts } = card.histogram;
  const view = {
    columns: counts.map((_, bin) => `${short(bin * width)} to ${short((bin + 1) * width)}`), values: counts, scale: "amount",
    top: largest(counts), told: counts.map(count => `${count} ${count === 1 ? "token" : "tokens"}`), name: "tokens by activation",
  };
  const drawn = bars(place("histogram"), view, bin => drawn.choose(bin));
  drawn.choose(0);
  place("texts").replaceChildren(...card.examples_quantiles.flatMap(({ quantile_name: name, examples }) =>
    [element("h3", {}, name), ...examples.map(text => line(card, text))]));
}
