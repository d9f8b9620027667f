// What a page that writes with a model draws with, as further functions of `parts`: where each token of a text is and how surprising, its
// alternatives, settings with sliders, and the small things around them.
//
// The model counts characters (code points), a string here counts UTF-16 units. Tokens that hold a part of a character come as
// `bytes:\xe9\x80` and share the offset of that character: together they are one piece.
Object.assign(parts, (() => {
  const { element } = parts;
  const BYTES = /^bytes:((?:\\x[0-9a-f]{2})+)$/;
  const END = "<|endoftext|>";
  // The strongest colour: one in 4,096.
  const TOP_BITS = 12;

  // ---- Tokens

  // The text of a token, or null where it is a part of a character alone.
  const textOf = token => BYTES.test(token) ? null : token;

  // A token as it is shown: spaces and line ends visible, bytes in hex.
  function shown(token) {
    const bytes = BYTES.exec(token);
    return bytes ? bytes[1] : token.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
  }

  // The lists of `logprobs`, which grow while chunks arrive.
  class Tokens {
    lists = { tokens: [], token_logprobs: [], text_offset: [] };

    take(logprobs) {
      for (const name in this.lists) this.lists[name].push(...logprobs?.[name] ?? []);
    }

    get count() {
      return this.lists.tokens.length;
    }

    // Mean of the log probabilities that there are, and of how many.
    get mean() {
      const known = this.lists.token_logprobs.filter(logprob => logprob !== null);
      return [known.reduce((sum, logprob) => sum + logprob, 0) / known.length, known.length];
    }

    // The pieces of `text`, whose first character has the offset `first` in the model's text and the place `place` here:
    // { start, end, tokens: [{ token, logprob }] }.
    pieces(text, first, place) {
      const { tokens, token_logprobs, text_offset } = this.lists;
      const units = [place];
      for (const character of text) units.push(units.at(-1) + character.length);
      const at = offset => units[Math.max(0, Math.min(offset - first, units.length - 1))];
      const pieces = [];
      tokens.forEach((token, n) => {
        const [start, end] = [at(text_offset[n]), at(text_offset[n + 1] ?? Infinity)];
        const one = { token, logprob: token_logprobs[n] };
        const last = pieces.at(-1);
        const joins = last && last.start === start && last.offset === text_offset[n] && textOf(token) === null;
        if (joins) {
          last.tokens.push(one);
          last.end = end;
        } else {
          pieces.push({ start, end, offset: text_offset[n], tokens: [one] });
        }
      });
      return pieces;
    }
  }

  // The log probability of a piece, null where there is none.
  const logprobOf = piece => piece.tokens.reduce((sum, one) => sum === null || one.logprob === null ? null : sum + one.logprob, 0);

  // How surprising a piece is, in bits; NaN for a piece without a probability.
  function bits(piece) {
    const logprob = logprobOf(piece);
    return logprob === null ? NaN : Math.abs(logprob / Math.LN2);
  }

  function percent(logprob) {
    const share = Math.exp(logprob) * 100;
    return (share >= 0.1 ? share.toFixed(share < 10 ? 2 : 1) : share.toPrecision(2)) + " %";
  }

  // A piece in words.
  function told(piece, text) {
    const logprob = logprobOf(piece), name = shown(text || piece.tokens[0].token);
    return logprob === null ? name : `${name} ${percent(logprob)}, ${bits(piece).toFixed(1)} bits`;
  }

  // Colours an element by how surprising a piece is.
  function tint(node, piece) {
    const value = bits(piece);
    const rgb = isNaN(value) ? null : parts.colour(value, "amount", TOP_BITS);
    Object.assign(node.style, { background: rgb ? parts.css(rgb) : "", color: rgb ? parts.ink(rgb) : "" });
  }

  // Which colour is how surprising.
  function surpriseScale(place) {
    parts.scaleBar(place, "amount", TOP_BITS);
    place.append(element("span", {}, "bits of surprise: 0 is a certain token, 1 a toss of a coin, 12 one in 4,096"));
  }

  // ---- Alternatives of a token

  // A list of tokens to choose one from. ones: [{ token, share, text }], share is the length of the bar, text follows its number;
  // `chosen` is the place of the present one, or -1. If the list has the focus it keeps it when it is drawn anew. Calls onTake(one).
  function alternatives(list, name, ones, chosen, onTake) {
    const usable = one => textOf(one.token) !== null;
    const focused = [...list.children].indexOf(document.activeElement);
    const view = {
      columns: ones.map(one => shown(one.token)), values: ones.map(one => one.share), texts: ones.map(one => one.text),
      decimals: 4, scale: "share", top: 1, name,
    };
    const bars = parts.bars(list, view, n => bars.choose(n), n => { if (onTake && usable(ones[n])) onTake(ones[n]); });
    ones.forEach((one, n) => list.children[n].ariaDisabled = String(!onTake || !usable(one)));
    const current = Math.min(focused < 0 ? chosen : focused, ones.length - 1);
    bars.choose(current);
    if (focused >= 0) list.children[current]?.focus();
    else if (current < 0 && ones.length) list.firstChild.tabIndex = 0;
  }

  // A box that opens beside the element of a token. Esc closes it, and `back(node)` puts the focus where it was.
  function popup(box, back) {
    let owner = null;

    // Shows `contents`.
    function show(node, ...contents) {
      hide();
      owner = node;
      node.classList.add("current");
      box.replaceChildren(...contents);
      box.hidden = false;
      place();
    }

    // Under the token, or above it where there is no room.
    function place() {
      const [frame, word] = [box.parentElement.getBoundingClientRect(), owner.getClientRects()[0]];
      const above = word.bottom + box.offsetHeight > innerHeight && word.top > box.offsetHeight;
      const left = Math.max(0, Math.min(word.left - frame.left, frame.width - box.offsetWidth));
      const top = above ? word.top - box.offsetHeight - frame.top : word.bottom - frame.top - 2;
      Object.assign(box.style, { left: left + "px", top: top + "px" });
    }

    function hide() {
      owner?.classList.remove("current");
      owner = null;
      box.hidden = true;
    }

    box.addEventListener("keydown", event => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      const node = owner;
      hide();
      back(node);
    });
    return { show, place, hide };
  }

  // ---- Settings

  // A number with a slider for each [field, id, name, least, most, step, value, off, limit]; at the value `off` a request lacks the field,
  // and the number may go beyond the slider, to `limit`.
  function settings(place, list, onChange) {
    const made = list.map(([field, id, name, min, end, step, value, off, max = end]) => {
      const range = element("input", { type: "range", min, max: end, step, ariaLabel: name, tabIndex: -1 });
      const number = element("input", { id, type: "number", min, max, step: "any", required: true });
      if (Number.isInteger(step)) number.step = step;
      number.dataset.testid = id;
      range.value = number.value = value;
      range.oninput = () => { number.value = range.value; onChange(); };
      number.oninput = () => { range.value = number.value; onChange(); };
      place.append(element("label", { className: "row" }, name, number), element("div", { className: "row" }, range));
      return { field, id, name, range, number, off, min, max, value };
    });
    return {
      made,
      number: field => made.find(one => one.field === field).number.valueAsNumber,
      // The fields of a request. Fails with the name of one that holds no number it could.
      fields() {
        const body = {};
        for (const { field, name, number, off, min, max } of made) {
          if (!number.checkValidity()) throw new Error(`${name}: give a ${number.step === "any" ? "" : "whole "}number from ${min} to ${max}`);
          if (number.valueAsNumber !== off) body[field] = number.valueAsNumber;
        }
        return body;
      },
    };
  }

  const newSeed = () => String(crypto.getRandomValues(new Uint32Array(1))[0]);

  // The seed in a field as those of a request: none where it is empty.
  function seedOf(input) {
    if (!input.value.trim()) return {};
    const seed = /^\s*-?\d+\s*$/.test(input.value) ? Number(input.value) : NaN;
    if (!Number.isSafeInteger(seed)) throw new Error(`seed: give a whole number up to ${Number.MAX_SAFE_INTEGER}, or nothing for a new one`);
    return { seed };
  }

  // ---- Small things

  // The field of a look for layers as 3, 0-5 or 0,4,8-11; none for all.
  function layers(text) {
    const found = [];
    for (const part of text.split(",").map(part => part.trim()).filter(Boolean)) {
      const [, from, to] = /^(\d{1,4})(?:-(\d{1,4}))?$/.exec(part) ?? [];
      if (from === undefined || Number(to ?? from) < Number(from)) throw new Error(`layers: “${part}” is neither a number nor a range such as 0-5`);
      for (let layer = Number(from); layer <= Number(to ?? from); layer++) found.push(layer);
    }
    return found.length ? { layers: found } : {};
  }

  // Tells ends of sentences to those who listen, not every token.
  function announce(place, texts, isEnd) {
    const rest = texts.join("\n").slice(place.textContent.length);
    const whole = isEnd ? rest : texts.length > 1 ? "" : /^[^]{30,}[.!?\n](?=\s)/.exec(rest)?.[0] ?? "";
    if (whole) place.append(whole);
  }

  // When a text began, when its first and its last token came: ms.
  class Clock {
    begin = performance.now();

    tick() {
      this.last = performance.now();
      this.first ??= this.last;
    }

    // Tokens a second after the first ones; none where there is nothing to divide by.
    pace(count, texts) {
      const seconds = (this.last - this.first) / 1000;
      return count > texts && seconds > 0 ? (count - texts) / seconds : undefined;
    }
  }

  // How long it took, in words; `why` is the reason of the only text's end.
  function numbers(clock, count, texts, why) {
    if (!clock.first) return "";
    const pace = clock.pace(count, texts);
    const end = { length: "max tokens or the end of the context", stop: "the end of the text or a stop" }[why];
    return [`${count} tokens`, `the first after ${Math.round(clock.first - clock.begin)} ms`,
      pace && `${pace.toFixed(1)} tokens/s`, end && `ended by ${end}`].filter(Boolean).join(" · ");
  }

  // A button that copies the text of an element, or what `textOf()` gives; where a page may not, the element is selected.
  function copies(button, node, textOf = () => node.textContent) {
    const name = button.textContent;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(textOf());
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(node);
        button.textContent = "Selected: press Ctrl+C";
      }
      setTimeout(() => button.textContent = name, 2000);
    });
  }

  return {
    Clock, END, Tokens, alternatives, announce, bits, copies, layers, newSeed, numbers, percent, popup, seedOf, settings, shown, surpriseScale,
    tint, told,
  };
})());
