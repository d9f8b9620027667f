"use strict";
// The same text as a command of the program.
const command = (() => {
  // One word of a POSIX shell.
  const quoted = text => /^[A-Za-z0-9_./:@%+=,-]+$/.test(text) && !text.startsWith("-") ? text : `'${text.replaceAll("'", "'\\''")}'`;

  // Values that change nothing: they are said only where a checkpoint may have others of its own.
  const NEUTRAL = { top_p: 1, min_p: 0, repetition_penalty: 1 };

  // A checked request as the page sends it, to a model of so many tokens, which is { source, inspection }. source: { isBuiltIn, tokenizer,
  // dtype }, of which the last two are a tokenizer's own name and the precision it is held in, where they are not the usual ones.
  function of(body, vocabulary, { source, inspection }) {
    const words = ["gpt2", "generate"];
    const give = (flag, value) => words.push(flag, quoted(String(value)));
    const giveField = field => {
      if (!source.isBuiltIn || body[field] !== NEUTRAL[field]) give(`--${field.replaceAll("_", "-")}`, body[field]);
    };
    if (!source.isBuiltIn) give("--model", models.nameOf(source, inspection));
    if (source.tokenizer) give("--tokenizer", source.tokenizer);
    if (source.dtype) give("--dtype", source.dtype);
    give("--max-new-tokens", body.max_tokens);
    if (body.temperature === 0) {
      words.push("--greedy");
    } else {
      // Where none is given, the page takes a new one and shows it; the program counts them from 0.
      if (body.seed !== undefined) give("--seed", BigInt.asUintN(64, BigInt(body.seed)));
      give("--temperature", body.temperature);
      // The program draws from 50 tokens unless it is told otherwise.
      give("--top-k", body.top_k || vocabulary);
      giveField("top_p");
      giveField("min_p");
    }
    giveField("repetition_penalty");
    // What follows `--` is a text, also where it begins with a hyphen.
    if (body.prompt.startsWith("-")) words.push("--");
    words.push(quoted(body.prompt));
    return words.join(" ");
  }

  return { of };
})();
