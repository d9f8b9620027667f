// The page at `/`: writes with /v1/completions, scores with echo, counts with /tokenize, looks inside with /look.
import { editor } from "./editor.js";
import { ask, asCurl, asPython, setKey, stream } from "./request.js";

/* global parts */
const { Clock, END, Tokens, element, newSeed, tint } = parts;
const find = id => document.getElementById(id);

// How many alternatives of a token are asked for.
const ALTERNATIVES = 10;
// A slider each: its field in a request, its name, range, step, the value it begins with, and the one that means "off".
const SLIDERS = [
  ["max_tokens", "max-new-tokens", "max tokens", 1, 1024, 1, 100],
  ["temperature", "temperature", "temperature", 0, 2, 0.05, 0.8],
  ["top_k", "top-k", "top-k (0: off)", 0, 200, 1, 50, 0],
  ["top_p", "top-p", "top-p (1: off)", 0, 1, 0.01, 1, 1],
  ["min_p", "min-p", "min-p (0: off)", 0, 1, 0.01, 0, 0],
  ["repetition_penalty", "repetition", "repetition penalty (1: off)", 0.5, 2, 0.05, 1, 1],
  ["presence_penalty", "presence", "presence penalty (0: off)", -2, 2, 0.1, 0, 0],
  ["frequency_penalty", "frequency", "frequency penalty (0: off)", -2, 2, 0.1, 0, 0],
  ["n", "n", "texts side by side", 1, 16, 1, 1, 1],
];
const settings = parts.settings(find("sliders"), SLIDERS, showRequest);
const seed = element("input", { id: "seed", inputMode: "numeric", autocomplete: "off", placeholder: "a new one", oninput: showRequest });
seed.dataset.testid = "seed";
find("sliders").append(element("label", { className: "row" }, "seed", seed));

let model, contextSize, writing = null, last = null, language = asCurl, inside = null, chosen = "";
const area = editor(find("prompt"), find("colours"), find("choices"), changed, takeAlternative);

// ---- What is asked for

// The present request; fields that are off are left out. Fails with the name of a field that holds no number it could.
function request(prompt = area.text) {
  const body = { ...model && { model }, prompt, ...settings.fields(), ...parts.seedOf(seed) };
  const stops = find("stops").value.split("\n").filter(Boolean).map(line => line.replaceAll("\\n", "\n"));
  if (stops.length) body.stop = stops;
  return { ...body, logprobs: ALTERNATIVES, stream: true, stream_options: { include_usage: true } };
}

function showRequest() {
  showRoom();
  if (!find("code").open) return;
  try {
    find("request").textContent = language(request());
  } catch (error) {
    find("request").textContent = error.message;
  }
}

// ---- What is going on, in words

function say(status) {
  Object.assign(find("status"), { textContent: status, className: status.split(":")[0] });
  changed();
}

function buttons() {
  const busy = writing !== null;
  find("prompt").readOnly = busy;
  find("stop").disabled = !busy;
  for (const id of ["write", "score", "attention", "lens", "head"]) find(id).disabled = busy;
  find("again").disabled = busy || !last;
  find("undo").disabled = busy || !area.canUndo;
  find("redo").disabled = busy || !area.canRedo;
}

function failed(error) {
  if (error.status === 401) {
    find("key").hidden = false;
    find("key-value").focus();
  }
  say("error: " + error.message);
}

// Does one thing at a time, which Stop ends.
async function during(name, work) {
  if (writing) return;
  writing = new AbortController();
  say(name);
  let failure = null;
  try {
    await work(writing.signal);
  } catch (error) {
    if (!writing.signal.aborted) failure = error;
  }
  writing = null;
  if (failure) failed(failure);
  else say("ready");
}

// ---- Writing

async function write() {
  await during("writing", async signal => {
    if (!seed.value.trim()) seed.value = newSeed();
    const body = request(), base = area.text, known = area.pieces;
    last = { text: base, pieces: known };
    area.record();
    const texts = Array.from({ length: body.n ?? 1 }, () => ({ text: "", tokens: new Tokens(), finish: null }));
    const cards = texts.length > 1 ? texts.map((one, n) => card(one, n, base, known)) : [];
    find("texts").replaceChildren(...cards.map(one => one.node));
    find("text").replaceChildren();
    find("numbers").textContent = "";
    let frame = 0;
    const draw = isEnd => {
      cancelAnimationFrame(frame);
      frame = 0;
      if (cards.length) cards.forEach(one => one.draw());
      else area.follow(() => area.show(base + texts[0].text, known.concat(piecesOf(texts[0], base.length))));
      parts.announce(find("text"), texts.map(one => one.text), isEnd);
    };
    const clock = new Clock();
    try {
      await stream("v1/completions", body, signal, chunk => {
        if (chunk.choices.length) clock.tick();
        for (const choice of chunk.choices) {
          const one = texts[choice.index];
          one.text += choice.text;
          one.tokens.take(choice.logprobs);
          one.finish ??= choice.finish_reason;
        }
        frame ||= requestAnimationFrame(() => draw(false));
      });
    } finally {
      draw(true);
      find("numbers").textContent = numbers(clock, texts);
      find("prompt").setSelectionRange(area.text.length, area.text.length);
    }
  });
}

const piecesOf = (one, place) => one.tokens.pieces(one.text, one.tokens.lists.text_offset[0] ?? 0, place);

function numbers(clock, texts) {
  const count = texts.reduce((sum, one) => sum + one.tokens.count, 0);
  return parts.numbers(clock, count, texts.length, texts.length === 1 ? texts[0].finish : null);
}

// One of several texts; it can be taken.
function card(one, n, base, known) {
  const shownText = element("p");
  const take = element("button", {
    textContent: "Take this one",
    onclick() {
      if (writing) return;
      area.record();
      area.show(base + one.text, known.concat(piecesOf(one, base.length)));
      find("texts").replaceChildren();
      find("prompt").focus();
    },
  });
  take.dataset.testid = `take-${n}`;
  return {
    node: element("article", { ariaLabel: `text ${n + 1}` }, shownText, take),
    draw() {
      shownText.replaceChildren(...piecesOf(one, 0).map(piece => {
        const span = element("span", {}, one.text.slice(piece.start, piece.end));
        tint(span, piece);
        return span;
      }));
    },
  };
}

// Takes back what was written last, and writes anew with another seed.
function again() {
  if (writing || !last) return;
  area.record();
  area.show(last.text, last.pieces);
  seed.value = newSeed();
  write();
}

// Cuts the text where a token stands, puts another there and goes on; an end is left at that.
function takeAlternative(piece, token) {
  if (writing) return;
  const cut = area.text.slice(0, piece.start), before = area.pieces.filter(other => other.end <= piece.start && other !== piece);
  const own = piece.tokens[0], added = token === END ? "" : token;
  const logprob = own.alternatives.find(other => other.token === token).logprob;
  area.record();
  const taken = { ...piece, end: piece.start + added.length, tokens: [{ ...own, token, logprob }] };
  area.show(cut + added, before.concat(taken));
  if (token !== END) write();
}

// How probable the text is as it stands.
function score() {
  during("scoring", async signal => {
    const text = area.text;
    if (!text) throw new Error("there is no text to score; write something first");
    const body = { ...model && { model }, prompt: text, max_tokens: 0, echo: true, logprobs: ALTERNATIVES };
    const [choice] = (await ask("v1/completions", body, signal)).choices;
    const tokens = new Tokens();
    tokens.take(choice.logprobs);
    area.show(text, tokens.pieces(text, 0, 0));
    const [mean, count] = tokens.mean;
    find("numbers").textContent = count
      ? `perplexity ${Math.exp(-mean).toPrecision(4)} · ${(-mean / Math.LN2).toPrecision(3)} bits a token, over ${count} tokens`
      : "one token alone has no probability";
  });
}

// ---- Counting

let countTimer, counting;
function changed() {
  buttons();
  find("token").textContent = area.token;
  showRequest();
  clearTimeout(countTimer);
  if (!writing) countTimer = setTimeout(count, 300);
}

async function count() {
  counting?.abort();
  counting = new AbortController();
  try {
    const said = await ask("tokenize", { prompt: area.text }, counting.signal);
    contextSize = said.max_model_len;
    find("count").dataset.count = said.count;
    find("count").textContent = `${said.count} of ${contextSize} tokens`;
  } catch {
    // The next request that matters says what is wrong.
    find("count").textContent = "";
    delete find("count").dataset.count;
  }
  showRoom();
}

function showRoom() {
  const left = contextSize - Number(find("count").dataset.count);
  const wanted = settings.number("max_tokens");
  find("room").textContent = left < wanted ? `room for ${left} more; max tokens is ${wanted}` : "";
}

// ---- Looking inside

function look(path, more) {
  during("looking", async signal => {
    inside = await ask(path, { prompt: area.text, ...more() }, signal);
    find("report").hidden = false;
    find("head-view").hidden = true;
    find("report-title").textContent = inside.title;
    drawInside();
  });
}

// The head, the row and the column of the attention that was looked at last, step by step.
let attention = null;
const byHand = parts.head.view({
  subject: () => attention,
  ask: body => ask("look/head", body),
  chosen: { get: () => chosen, set: text => chosen = text },
  moved: () => during("looking", byHand),
});

function stepByStep() {
  during("looking", async signal => {
    const prompt = area.text, { axes, tokens } = await ask("look/attention", { prompt, ...parts.layers(find("layers").value) }, signal);
    attention = { prompt, count: tokens.length, layers: axes[0].labels, heads: axes[1].labels };
    await byHand();
    find("report").hidden = true;
    find("head-view").hidden = false;
  });
}

function drawInside() {
  if (inside) parts.report(inside, chosen, text => chosen = text);
}

// ---- What is pressed

find("write").onclick = write;
find("stop").onclick = () => writing?.abort();
find("again").onclick = again;
find("undo").onclick = () => area.undo();
find("redo").onclick = () => area.redo();
find("score").onclick = score;
find("attention").onclick = () => look("look/attention", () => parts.layers(find("layers").value));
find("lens").onclick = () => look("look/lens", () => ({ show: find("show").value }));
find("head").onclick = stepByStep;
find("stops").oninput = showRequest;
find("code").ontoggle = showRequest;
for (const [id, of] of [["as-curl", asCurl], ["as-python", asPython]]) {
  find(id).onclick = () => {
    language = of;
    for (const other of ["as-curl", "as-python"]) find(other).ariaPressed = String(other === id);
    showRequest();
  };
}
parts.copies(find("copy"), find("request"));
find("key-use").onclick = () => {
  setKey(find("key-value").value.trim());
  find("key-value").value = "";
  find("key").hidden = true;
  find("prompt").focus();
  begin();
};
find("key-value").onkeydown = event => { if (event.key === "Enter") find("key-use").click(); };
addEventListener("keydown", event => {
  if (event.key === "Escape") {
    area.hide();
    writing?.abort();
  } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (event.shiftKey) again();
    else write();
  }
});
document.addEventListener("selectionchange", () => { find("token").textContent = area.token; });
let waiting;
onresize = () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => { area.hide(); drawInside(); }); };

async function begin() {
  try {
    const [first] = (await ask("v1/models")).data;
    model = first.id;
    contextSize = first.max_model_len;
    find("model").textContent = model;
    document.title = `${model} · gpt2`;
    if (!writing) say("ready");
  } catch (error) {
    failed(error);
  }
}

const legend = () => parts.surpriseScale(find("scale"));
parts.dark.addEventListener("change", () => { legend(); drawInside(); });
legend();
seed.value = newSeed();
begin();
