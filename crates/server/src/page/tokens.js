// Which token stands where in a text: from the four lists of `logprobs` to pieces of a JavaScript string.
//
// The server counts characters (code points), a string here counts UTF-16 units. Tokens that hold a part of a character come as
// `bytes:\xe9\x80` and share the offset of that character: together they are one piece.
const BYTES = /^bytes:((?:\\x[0-9a-f]{2})+)$/;
export const END = "<|endoftext|>";

// The text of a token, or null where it is a part of a character alone.
export const textOf = token => BYTES.test(token) ? null : token;

// A token as it is shown: spaces and line ends visible, bytes in hex.
export function shown(token) {
  const bytes = BYTES.exec(token);
  return bytes ? bytes[1] : token.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

// Lists that grow while chunks arrive.
export class Tokens {
  lists = { tokens: [], token_logprobs: [], top_logprobs: [], text_offset: [] };

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

  // The pieces of `text`, whose first character has the offset `first` on the server and the place `place` here:
  // { start, end, tokens: [{ token, logprob, alternatives: [{ token, logprob }] }] }.
  pieces(text, first, place) {
    const { tokens, token_logprobs, top_logprobs, text_offset } = this.lists;
    const units = [place];
    for (const character of text) units.push(units.at(-1) + character.length);
    const at = offset => units[Math.max(0, Math.min(offset - first, units.length - 1))];
    const pieces = [];
    tokens.forEach((token, n) => {
      const [start, end] = [at(text_offset[n]), at(text_offset[n + 1] ?? Infinity)];
      const one = { token, logprob: token_logprobs[n], alternatives: ranked(top_logprobs[n]) };
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

const ranked = map => Object.entries(map ?? {}).map(([token, logprob]) => ({ token, logprob }))
  .sort((a, b) => b.logprob - a.logprob);

// The log probability of a piece, null where there is none.
export const logprobOf = piece => piece.tokens.reduce((sum, one) => sum === null || one.logprob === null ? null : sum + one.logprob, 0);

// How surprising a piece is, in bits; NaN for a piece without a probability.
export function bits(piece) {
  const logprob = logprobOf(piece);
  return logprob === null ? NaN : Math.abs(logprob / Math.LN2);
}

export function percent(logprob) {
  const share = Math.exp(logprob) * 100;
  return (share >= 0.1 ? share.toFixed(share < 10 ? 2 : 1) : share.toPrecision(2)) + " %";
}
