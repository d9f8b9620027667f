"use strict";
// The page: writes, shows what each token was chosen from and what comes next, scores, looks inside, and takes other models.
//
// It asks its transport, `engine`: a server (server.js), or the engine in a worker (engine.js), by the same paths and bodies. Parts of
// the page that only one of them can do have `data-only`; page.css hides them from the other.
(() => {
  const { Clock, END, Tokens, alternatives, bits, element, newSeed, percent, shown, tint, told } = parts;
  const find = id => document.getElementById(id);

  // Lower temperatures are refused by the program; 0 is greedy.
  const COLDEST = 0.000001;
  // Lines of a message that the status shows.
  const FIRST_LINES = 4;
  // How many tokens the bars under the text show, and the box beside a token.
  const BARS = 10, CHOICES = 20;
  // How long the pointer rests on a token before its alternatives are shown, and before they go: ms.
  const POINTED_MS = 150, LEFT_MS = 300;
  // How long nothing is typed before a text is counted, and before a server that others use too is asked what comes next: ms.
  const TYPED_MS = 300;
  // Steps that can be undone.
  const HISTORY = 500;
  // What the page opens with, beside the values of the sliders below.
  const OPENING = { prompt: engine.opening.prompt, seed: engine.opening.seed || newSeed() };
  // As parts.settings takes them. What a checkpoint may have values of its own for is always sent.
  const SLIDERS = [
    ["max_tokens", "max-new-tokens", "max tokens", 1, 1024, 1, 100, undefined, 1e6],
    ["temperature", "temperature", "temperature", 0, 2, 0.05, 0.8],
    ["top_k", "top-k", "top-k: the k most probable (0: all)", 0, 200, 1, 50, undefined, 1e6],
    ["top_p", "top-p", "top-p: those that add up to p", 0.01, 1, 0.01, 1],
  ];
  const FURTHER = [
    ["min_p", "min-p", "min-p: at least this share of the largest", 0, 1, 0.01, 0],
    ["repetition_penalty", "repetition", "repetition penalty (1: off)", 0.5, 2, 0.05, 1],
    ["presence_penalty", "presence", "presence penalty (0: off)", -2, 2, 0.1, 0, 0],
    ["frequency_penalty", "frequency", "frequency penalty (0: off)", -2, 2, 0.1, 0, 0],
    ["n", "n", "completions side by side", 1, 16, 1, 1, 1],
  ];
  const settings = [parts.settings(find("sliders"), SLIDERS, changed), parts.settings(find("further-sliders"), FURTHER, changed)];
  const controls = settings.flatMap(one => one.made);
  const [prompt, seed, greedy, stops] = ["prompt", "seed", "greedy", "stops"].map(find);

  // The model as the transport describes it, and the sources of one that was refused and of the one that this page was used with before.
  let model = null, refused = null, wanted = "";
  // What runs now; close(failure) ends it on the page.
  let running = null;
  // The text under the prompt. Its ids are those of its prompt and of its tokens; a scored text begins with the prompt (isWhole).
  const NOTHING = { prompt: null, text: "", pieces: [], ids: [], promptIds: 0, isByHand: false, isWhole: false };
  let written = NOTHING;

  // ---- What is asked for

  // The fields of a request for these settings. Fails with the name of a field that holds no number it could.
  function fields() {
    const body = Object.assign({}, ...settings.map(one => one.fields()), parts.seedOf(seed));
    const stop = stops.value.split("\n").filter(Boolean).map(line => line.replaceAll("\\n", "\n"));
    if (stop.length) body.stop = stop;
    if (greedy.checked) body.temperature = 0;
    if (body.temperature > 0 && body.temperature < COLDEST) throw new Error(`temperature: give 0, or a number from ${COLDEST} on`);
    return body;
  }

  // Without how long a text is, where it ends, and which one it is.
  function sampling() {
    const { max_tokens, seed, n, stop, ...body } = fields();
    return body;
  }

  // ---- What is going on, in words

  function say(status) {
    Object.assign(find("status"), { textContent: status, className: status.split(/[: ]/)[0] });
    find("status-more").hidden = true;
    buttons();
  }

  function buttons() {
    find("stop").disabled = !running && !loading;
    for (const id of ["write", "again", "score"]) find(id).disabled = !model;
    find("go-on").disabled = !model || Boolean(running) || !written.text || isFull(written.ids);
    find("undo").disabled = !past.length;
    find("redo").disabled = !future.length;
  }

  // Whether the model's context has no room for a token after these.
  const isFull = ids => Boolean(model) && ids.length > model.config.n_positions;

  // A sentence with the first lines of what it lists; all of them are behind a fold. A server may ask for its key.
  function failed(error) {
    if (error.status === 401) {
      find("key").hidden = false;
      find("key-value").focus();
    }
    const lines = error.message.split("\n").map(line => line.trim()), more = lines.length - FIRST_LINES;
    say(`error: ${lines.slice(0, FIRST_LINES).join(" ")}${more > 0 ? ` and ${more} more` : ""}`);
    find("status-more").hidden = more <= 0;
    find("status-lines").textContent = error.message;
  }

  function about() {
    find("model").textContent = model.title;
    find("about").textContent = model.about;
    if (engine.isShared) document.title = `${model.name} · gpt2`;
  }

  // ---- Back and forth

  const past = [], future = [];
  const step = () => ({ before: prompt.value, text: written });

  // What comes now can be undone to here.
  function record() {
    past.push(step());
    if (past.length > HISTORY) past.shift();
    future.length = 0;
  }

  function travel(from, to) {
    if (!from.length) return;
    if (running) halt();
    choices.hide();
    to.push(step());
    const { before, text } = from.pop();
    prompt.value = before;
    put(text);
    changed();
  }
  const undo = () => travel(past, future), redo = () => travel(future, past);

  // Shows a text that is complete.
  function put(text) {
    written = text;
    find("texts").replaceChildren();
    draw();
    follow(true);
    buttons();
  }

  // ---- Writing

  // The text anew from the prompt.
  const write = () => begin({ ...NOTHING, prompt: prompt.value }, prompt.value);

  // More after the text; after another prompt, its text is read anew.
  function goOn() {
    if (!model || running || !written.text) return;
    if (isStale() && written.isWhole) return write();
    const isKnown = !isStale() && written.ids.length > 0;
    begin({ ...written, prompt: prompt.value, isByHand: true }, isKnown ? written.ids : prompt.value + written.text);
  }

  function anew() {
    seed.value = newSeed();
    write();
  }

  // Begins a run. `from` is what is kept of the text, and `body` what the model continues: a text or ids.
  async function begin(from, body) {
    if (!model) return;
    if (running) halt();
    choices.hide();
    if (!seed.value.trim()) seed.value = newSeed();
    let asked;
    try {
      asked = { ...fields(), prompt: body, logprobs: 0, return_token_ids: true, stream: true };
    } catch (error) {
      failed(error);
      return;
    }
    record();
    keep();
    const texts = Array.from({ length: asked.n ?? 1 }, () => ({ tokens: new Tokens(), added: "", ids: [] }));
    const run = running = { from, texts, promptIds: from.ids, clock: new Clock(), frame: 0, close: failure => end(run, failure) };
    run.cards = texts.length > 1 ? texts.map((one, n) => card(run, one, n)) : [];
    find("texts").replaceChildren(...run.cards.map(one => one.node));
    written = from;
    showCommand();
    if (!from.text) find("said").replaceChildren();
    say("writing");
    draw();
    let failure = null;
    try {
      await engine.stream("v1/completions", asked, chunk => { if (running === run) hear(run, chunk); });
    } catch (error) {
      failure = error;
    }
    if (running === run) end(run, failure);
  }

  function hear(run, chunk) {
    for (const choice of chunk.choices) {
      const one = run.texts[choice.index];
      run.clock.tick();
      one.added += choice.text;
      one.tokens.take(choice.logprobs);
      one.ids.push(...choice.token_ids ?? []);
      one.finish ??= choice.finish_reason;
      if (choice.prompt_token_ids) run.promptIds = choice.prompt_token_ids;
    }
    run.frame ||= requestAnimationFrame(() => show(run, false));
  }

  const piecesOf = (one, place) => one.tokens.pieces(one.added, one.tokens.lists.text_offset[0] ?? 0, place);

  // What one of a run's texts has become.
  function textOf({ from, promptIds }, one) {
    return {
      ...from, text: from.text + one.added, pieces: from.pieces.concat(piecesOf(one, from.text.length)), ids: promptIds.concat(one.ids),
      promptIds: from.text ? from.promptIds : promptIds.length,
    };
  }

  // What a run has written so far, on the page.
  function show(run, isEnd) {
    cancelAnimationFrame(run.frame);
    run.frame = 0;
    for (const one of run.cards) one.draw();
    if (!run.cards.length) written = textOf(run, run.texts[0]);
    draw();
    parts.announce(find("said"), run.texts.map(one => run.from.text + one.added), isEnd);
    follow(isEnd);
  }

  function end(run, failure) {
    running = null;
    show(run, true);
    const [first] = run.texts, count = run.texts.reduce((sum, one) => sum + one.tokens.count, 0);
    find("numbers").textContent = parts.numbers(run.clock, count, run.texts.length, run.texts.length > 1 ? null : first.finish);
    settle(failure);
  }

  function settle(failure) {
    running = null;
    if (failure && !failure.stopped) failed(failure);
    else say(loading || "ready");
  }

  // Stops what runs; what it has written stays.
  function halt() {
    if (!running) return;
    engine.stop();
    running.close(null);
  }

  // One of several texts; it can be taken.
  function card(run, one, n) {
    const words = element("p");
    const taken = element("button", {
      type: "button",
      onclick() {
        if (running) halt();
        record();
        put(textOf(run, one));
        prompt.focus();
      },
    }, "Take this one");
    taken.dataset.testid = `take-${n}`;
    return {
      node: element("article", { ariaLabel: `completion ${n + 1}` }, words, taken),
      draw() {
        words.replaceChildren(...piecesOf(one, 0).map(piece => {
          const span = element("span", {}, one.added.slice(piece.start, piece.end));
          tint(span, piece);
          return span;
        }));
      },
    };
  }

  // ---- How probable a text is

  // Prompt and text as one; a text of another prompt is none of it.
  const whole = () => isStale() ? prompt.value : written.isWhole ? written.text : prompt.value + written.text;

  async function score() {
    if (!model) return;
    if (running) halt();
    choices.hide();
    const text = whole(), run = running = { close: settle };
    say("scoring");
    let failure = null;
    try {
      if (!text) throw new Error("there is no text to score; write something first");
      const body = { prompt: text, max_tokens: 0, echo: true, logprobs: 0, return_token_ids: true };
      const [{ logprobs, prompt_token_ids }] = (await engine.ask("v1/completions", body)).choices;
      if (running !== run) return;
      const tokens = new Tokens();
      tokens.take(logprobs);
      record();
      put({ prompt: prompt.value, text, pieces: tokens.pieces(text, 0, 0), ids: prompt_token_ids, promptIds: 0, isByHand: true, isWhole: true });
      const [mean, count] = tokens.mean;
      find("numbers").textContent = count
        ? `perplexity ${Math.exp(-mean).toPrecision(4)} · ${(-mean / Math.LN2).toPrecision(3)} bits a token, over ${count} tokens`
        : "one token alone has no probability";
    } catch (error) {
      failure = error;
    }
    if (running === run) settle(failure);
  }

  // ---- How long it is

  let counting;
  function countSoon() {
    clearTimeout(counting);
    if (!running) counting = setTimeout(count, TYPED_MS);
  }

  async function count() {
    const place = find("count"), text = whole();
    try {
      const said = await engine.ask("tokenize", { prompt: text });
      if (text !== whole()) return;
      place.dataset.count = said.count;
      place.textContent = `${said.count} of ${model.config.n_positions} tokens`;
    } catch {
      // The next request that matters says what is wrong.
      place.textContent = "";
      delete place.dataset.count;
    }
    showRoom();
  }

  function showRoom() {
    const left = model.config.n_positions - Number(find("count").dataset.count), most = settings[0].number("max_tokens");
    find("room").textContent = left < most ? `room for ${left} more; max tokens is ${most}` : "";
  }

  // ---- The written text, a span a token

  const paper = find("text");
  let drawn = [], at = 0;
  const isSame = (a, b) => a.text === b.text && a.bits === b.bits;

  // Draws what has changed since the last time.
  function draw(everything) {
    const now = written.pieces.map(piece => ({ piece, text: written.text.slice(piece.start, piece.end), bits: bits(piece) }));
    let same = 0;
    while (!everything && same < now.length && same < drawn.length && isSame(now[same], drawn[same])) now[same].node = drawn[same++].node;
    drawn.slice(same).forEach(one => one.node.remove());
    for (const one of now.slice(same)) one.node = token(one);
    paper.append(...now.slice(same).map(one => one.node));
    drawn = now;
    stale();
    if (!drawn[at]) at = Math.max(0, drawn.length - 1);
    if (drawn[at]) drawn[at].node.tabIndex = 0;
  }

  function token({ piece, text, bits }) {
    const name = told(piece, text);
    const kind = text.startsWith("\n") ? "line" : text ? "" : "end";
    const node = element("span", { className: kind, role: "option", tabIndex: -1, ariaLabel: name, ariaSelected: "false" }, text);
    if (!isNaN(bits)) node.dataset.bits = bits.toFixed(1);
    tint(node, piece);
    return node;
  }

  // Whether the text still belongs to the prompt above it.
  const isStale = () => written.text !== "" && written.prompt !== prompt.value;
  const stale = () => paper.classList.toggle("stale", isStale());

  const placeOf = node => drawn.findIndex(one => one.node === node);

  function goTo(n) {
    if (drawn.length) drawn[parts.clamp(n, 0, drawn.length - 1)].node.focus();
  }

  paper.addEventListener("click", event => {
    const n = placeOf(event.target);
    if (n < 0) return;
    goTo(n);
    pointLater();
    openChoices(n);
  });
  paper.addEventListener("keydown", event => {
    if (!drawn.length) return;
    if (event.key === "Enter" && !event.ctrlKey && !event.metaKey || event.key === " " || event.key === "ArrowDown" && event.altKey) {
      event.preventDefault();
      openChoices(at, true);
      return;
    }
    const way = parts.direction(event);
    if (way) goTo(at + way[0] + way[1]);
  });
  paper.addEventListener("focusin", event => {
    const n = placeOf(event.target);
    if (n < 0 || n === at) return;
    if (drawn[at]) drawn[at].node.tabIndex = -1;
    at = n;
    drawn[at].node.tabIndex = 0;
  });
  for (const type of ["pointerover", "focusin"]) paper.addEventListener(type, event => {
    const one = drawn[placeOf(event.target)];
    if (one) find("token").textContent = told(one.piece, one.text);
  });

  // ---- Alternatives of a token

  const choices = parts.popup(find("choices"), node => goTo(Math.max(0, placeOf(node))));
  let open = null;
  const isOpen = () => !find("choices").hidden;

  // A mouse that rests on a token shows them as well, until it leaves; after a click or a key they stay.
  let pointed;
  function pointLater(ms, act) {
    clearTimeout(pointed);
    pointed = act && setTimeout(() => { if (!running && !(isOpen() && open.isPinned)) act(); }, ms);
  }
  const leave = () => pointLater(LEFT_MS, choices.hide);
  paper.addEventListener("pointerover", event => {
    const n = placeOf(event.target);
    if (event.pointerType !== "mouse" || event.buttons) return;
    if (n < 0) leave();
    else pointLater(POINTED_MS, () => openChoices(n, false, true));
  });
  paper.addEventListener("pointerleave", leave);
  find("choices").addEventListener("pointerenter", () => pointLater());
  find("choices").addEventListener("pointerleave", leave);

  // The ids before the n-th piece: of the prompt, and of the tokens of the pieces before it.
  function idsBefore(n) {
    const tokens = written.pieces.slice(0, n).reduce((sum, piece) => sum + piece.tokens.length, 0);
    return written.ids.slice(0, written.promptIds + tokens);
  }

  async function openChoices(n, isByKey, isPointed) {
    if (!model || !drawn[n]) return;
    const { piece, node, text } = drawn[n];
    const list = element("div"), kept = element("p", { className: "quiet" });
    const close = element("button", { type: "button", ariaLabel: "close", onclick() { choices.hide(); goTo(n); } }, "×");
    choices.show(node, element("header", {}, element("p", {}, told(piece, text)), close), list, kept);
    open = { n, piece, list, kept, ids: idsBefore(n), isPinned: !isPointed };
    await moveChoices(true);
    if (open?.list !== list || !isOpen()) return;
    choices.place();
    if (isByKey) (list.querySelector("[tabindex='0']") ?? close).focus();
  }

  // The box as the settings are now.
  const moveChoices = paced(async () => {
    if (!open || !isOpen()) return;
    const { n, piece, list, kept, ids } = open;
    try {
      const look = await next(ids, CHOICES);
      if (open?.list !== list) return;
      const present = look.tokens.findIndex(one => one.token === piece.tokens[0].token);
      alternatives(list, "alternatives; Enter continues from one", look.tokens.map(bar), Math.max(0, present), one => take(written, n, ids, one));
      kept.textContent = keptOf(look);
    } catch (error) {
      kept.textContent = error.message;
    }
  });

  // What may come after these ids or this text, at the present settings.
  const next = (prompt, top) => {
    const own = typeof prompt === "string" ? {} : { prompt_tokens: Math.min(written.promptIds, prompt.length) };
    return engine.ask("look/next", { ...sampling(), ...own, prompt, top });
  };
  const bar = one => ({ ...one, share: one.probability, text: `${one.probability ? "" : "left out, "}model ${percent(one.logprob)}` });
  const keptOf = look => look.kept === 1 ? "These settings leave one token." : `These settings leave ${look.kept} tokens to sample from.`;

  // Cuts a text before a piece, puts another token there and continues; after an end nothing comes.
  function take(from, n, ids, one) {
    choices.hide();
    if (running) halt();
    const before = from.pieces.slice(0, n), start = before.at(-1)?.end ?? 0;
    const text = one.token === END ? "" : one.token;
    const piece = { start, end: start + text.length, tokens: [{ token: one.token, logprob: one.logprob }] };
    const cut = {
      ...from, prompt: from.prompt ?? prompt.value, text: from.text.slice(0, start) + text, pieces: [...before, piece],
      ids: [...ids, one.id], isByHand: true,
    };
    find("said").replaceChildren();
    if (one.token !== END && !isFull(cut.ids)) {
      begin(cut, cut.ids);
      goTo(n);
      return;
    }
    record();
    put(cut);
  }

  addEventListener("pointerdown", event => {
    // The sliders move what the box shows, so that it stays while they are used.
    if (isOpen() && !event.target.closest("#choices, #settings, #text span")) choices.hide();
  });

  // ---- What comes next

  // Calls `work` one at a time, so that it takes a tenth of the time at most; what is urgent is never left out.
  function paced(work) {
    let isBusy = false, isWaiting = false, free = 0;
    return async function go(isUrgent) {
      if (isBusy || !isUrgent && performance.now() < free) {
        isWaiting ||= isBusy && isUrgent;
        return;
      }
      isBusy = true;
      const begun = performance.now();
      await work().catch(error => { find("inside-error").textContent = error.message; });
      isBusy = false;
      free = performance.now() + 9 * (performance.now() - begun);
      if (isWaiting) {
        isWaiting = false;
        await go(true);
      }
    };
  }

  // Whether the text belongs to the prompt; otherwise the prompt alone is looked at.
  const isCurrent = () => written.ids.length > 0 && written.prompt === prompt.value;

  const moveNext = paced(async () => {
    if (!model) return;
    const [from, isText] = [written, isCurrent()];
    if (!isText && !prompt.value) {
      find("next").replaceChildren();
      find("next-about").textContent = "";
      return;
    }
    try {
      const look = await next(isText ? from.ids : prompt.value, BARS);
      const onTake = one => isText ? take(from, from.pieces.length, from.ids, one) : takeFirst(one);
      alternatives(find("next"), "what comes next; Enter continues with it", look.tokens.map(bar), -1, running ? null : onTake);
      find("next-about").textContent = `After the ${isText ? "text" : "prompt"} above; the bars are the model's probabilities after your settings are applied. ${keptOf(look)}`;
    } catch (error) {
      find("next").replaceChildren();
      find("next-about").textContent = isFull(from.ids) ? "The model's context is full." : error.message;
    }
  });

  // A token chosen right after the prompt.
  async function takeFirst(one) {
    const text = prompt.value;
    try {
      const { tokens } = await engine.ask("tokenize", { prompt: text });
      take({ ...NOTHING, prompt: text, ids: tokens, promptIds: tokens.length }, 0, tokens, one);
    } catch (error) {
      failed(error);
    }
  }

  // Bars and view follow the text, the view if it is quick. A server is asked for the bars of a whole text alone.
  function follow(isEnd) {
    const isQuick = !engine.isShared && lookTook < SLOW_MS;
    if (isEnd) countSoon();
    if (isEnd || !engine.isShared) moveNext(isEnd);
    if (isQuick) moveLook(isEnd && view !== "head");
    find("look-again").hidden = isQuick;
  }

  // ---- Looking inside

  const VIEWS = {
    attention: "Each small picture is one head of one layer: rows are query tokens, columns are the key tokens they attend to. Choose a head, then a cell or a token.",
    head: "How one of its numbers is computed: choose a layer, a head, the token that attends (query) and the one it attends to (key).",
    lens: "What the model would predict if it stopped after each layer: rows are layers, from the first at the bottom to the last.",
    features: "What the MLPs react to: the strongest features of each layer at each token, of transcoders that stand for the MLPs. Rows are layers, from the first at the bottom. Choose a cell to see its feature.",
    graph: "Which features carry the prediction of the next token, and what they add to each other. Nodes stand over their token; choose one to see its edges.",
  };
  // What each view asks for beside the text.
  const ASKED = {
    attention: () => parts.layers(find("layers").value),
    lens: () => ({ show: find("show").value }),
    features: () => parts.layers(find("layers").value),
    graph: () => ({ node_threshold: Number(find("share").value) }),
  };
  // A look that takes longer is taken when a button is pressed.
  const SLOW_MS = 700;
  let view = "attention", report = null, lookedAt = null, lookedIds = [], lookTook = 0;
  const chosen = { attention: "layer=1&head=0&row=7&column=3", lens: "", features: "row=9999&column=9999", graph: "" };

  function showView(name) {
    view = name;
    for (const one of Object.keys(VIEWS)) find(one).ariaPressed = String(one === name);
    find("inside-about").textContent = VIEWS[name];
    find("head-view").hidden = name !== "head";
    find("looked").hidden = name === "head";
    find("layers-label").hidden = name !== "attention" && name !== "features";
    find("show-label").hidden = name !== "lens";
    find("share-label").hidden = name !== "graph";
    showLooked();
  }

  // What was found, where it is of the present view.
  function showLooked() {
    const isFound = Boolean(report) && lookedAt === view;
    find("report").hidden = !isFound || view === "graph";
    find("graph-part").hidden = !isFound || view !== "graph";
    if (!isFound || !ofFeatures.includes(view)) showFeature(null);
  }

  // Most tokens of a look. The first ones of a text are the same without what follows.
  const MOST = { attention: 256, head: 256, lens: 128, features: 128, graph: 64 };

  // What is looked at: the ids of the text, from the first on.
  async function looked(name) {
    const ids = isCurrent() ? written.ids : (await engine.ask("tokenize", { prompt: prompt.value })).tokens;
    const most = Math.min(MOST[name], model.config.n_positions);
    find("looked-at").textContent = ids.length > most ? `The text has ${ids.length} tokens; these are the first ${most}.` : "";
    return ids.slice(0, most);
  }

  const moveLook = paced(async () => {
    // While it is being used, a picture stays as it is.
    if (!model || running && ["report", "graph-part", "feature-part"].some(id => find(id).contains(document.activeElement))) return;
    const name = view;
    if (name === "head") return moveHead(true);
    const begun = performance.now();
    let ids = [];
    const found = await inside(async () => {
      ids = await looked(name);
      return engine.ask(`look/${name}`, { prompt: ids, ...ASKED[name]() });
    });
    if (!running) lookTook = performance.now() - begun;
    if (view !== name) return;
    [report, lookedAt, lookedIds] = [found, found && name, ids];
    find(name === "graph" ? "graph-title" : "report-title").textContent = found?.title ?? "";
    showLooked();
    drawReport();
  });

  function drawReport() {
    if (!report || lookedAt !== view) return;
    if (view === "graph") parts.graph(report, chosen.graph, chooseNode);
    else parts.report(report, chosen[view], chooseCell);
  }

  function chooseCell(said) {
    chosen[lookedAt] = said;
    if (lookedAt !== "features") return;
    const [row, column] = ["row", "column"].map(name => Number(said.get(name)));
    const [layers, tokens] = report.axes;
    const text = report.texts[row * tokens.labels.length + column];
    showFeature(text ? { layer: parseInt(layers.labels[row]), feature: parseInt(text) } : null);
  }

  function chooseNode(state) {
    chosen.graph = state;
    const id = new URLSearchParams(state).get("node");
    const [layer, feature] = id.split("_").map(Number);
    showFeature(report.points.find(point => point.id === id).kind === "feature" ? { layer, feature } : null);
  }

  // ---- A feature of the text

  const ofFeatures = ["features", "graph"];
  // Which one is to be shown, and which one is: what was asked and the answer.
  let wantedFeature = null, shownFeature = null;

  function showFeature(feature) {
    wantedFeature = feature && { ...feature, prompt: lookedIds };
    if (feature) moveFeature(true);
    else find("feature-part").hidden = true;
  }

  const moveFeature = paced(async () => {
    const asked = wantedFeature;
    if (!asked) return;
    const isSame = shownFeature && Object.keys(asked).every(key => shownFeature.asked[key] === asked[key]);
    const card = isSame ? shownFeature.card : await inside(() => engine.ask("look/feature", asked));
    if (!card || wantedFeature !== asked) return;
    shownFeature = { asked, card };
    drawFeature();
    find("feature-part").hidden = false;
  });

  function drawFeature() {
    if (!shownFeature) return;
    const { asked, card } = shownFeature;
    parts.feature(card);
    find("feature-name").textContent = `feature ${asked.feature} of layer ${asked.layer}`;
  }

  // The answer, or a sentence under the buttons.
  async function inside(ask) {
    try {
      const found = await ask();
      find("inside-error").textContent = "";
      return found;
    } catch (error) {
      find("inside-error").textContent = error.message;
    }
  }

  // ---- A head step by step

  // A server does not say how many layers and heads there are; the attention of one token has them.
  async function heads() {
    if (model.config.n_layer) return;
    const { axes } = await engine.ask("look/attention", { prompt: [0] });
    [model.config.n_layer, model.config.n_head] = axes.map(axis => axis.labels.length);
  }

  const drawHead = parts.head.view({
    async subject() {
      const [prompt] = await Promise.all([looked("head"), heads()]);
      const labels = count => Array.from({ length: count }, (_, n) => String(n));
      return { prompt, count: prompt.length, layers: labels(model.config.n_layer), heads: labels(model.config.n_head) };
    },
    ask: body => inside(() => engine.ask("look/head", body)),
    chosen: { get: () => chosen.attention, set: text => chosen.attention = text },
    moved: () => moveHead(true),
  });
  const moveHead = paced(async () => {
    if (model && view === "head") await drawHead();
  });

  // ---- Other models

  // What is being loaded, as the status says it.
  let loading = "";

  // Loads a source, and writes with it; where that fails the model before stays.
  async function load(source) {
    if (running) halt();
    refused = null;
    say(loading = `loading ${models.nameOf(source)}`);
    const bar = find("progress");
    try {
      const loaded = await engine.load(source, about => {
        tellSource(about, source);
        models.check(about);
      }, (done, total) => Object.assign(bar, { hidden: false, value: total ? done / total : 0 }));
      loading = "";
      taken(loaded);
      write();
    } catch (error) {
      // Another one may be being loaded by now.
      if (error.replaced) return;
      loading = "";
      if (!source.isBuiltIn) refused = source;
      find("dtype").value = model?.source.dtype ?? "";
      if (!error.stopped) return failed(error);
      if (model) tellSource(model, model.source);
      say(model ? "ready" : "starting");
    } finally {
      bar.hidden = !loading;
    }
  }

  const tellSource = (about, source) => { find("memory").textContent = models.told(about, source); };

  // A model that is there. The text stays if it is the same model as before.
  function taken(loaded) {
    const isSame = model?.name === loaded.name && model.config.n_positions === loaded.config.n_positions;
    model = loaded;
    refused = null;
    [report, lookedAt, lookTook, shownFeature] = [null, null, 0, null];
    if (!isSame && written !== NOTHING) {
      record();
      put(NOTHING);
    }
    showLooked();
    find("head-steps").replaceChildren();
    about();
    showCommand();
    buttons();
    if (!engine.load) return;
    find("built-in").disabled = Boolean(model.source.isBuiltIn);
    find("dtype").value = model.source.dtype ?? "";
    tellSource(model, model.source);
  }

  function choose(files) {
    try {
      const source = models.source(files, refused ?? (model?.source.isBuiltIn ? null : model?.source));
      wanted = "";
      load({ ...source, dtype: find("dtype").value });
    } catch (error) {
      failed(error);
    }
  }

  for (const id of ["model-file", "model-folder"]) find(id).onchange = () => {
    const files = [...find(id).files];
    // So that the same files can be chosen again.
    find(id).value = "";
    if (files.length) choose(files);
  };
  find("dtype").onchange = () => { if (model) load({ ...refused ?? model.source, dtype: find("dtype").value }); };
  find("built-in").onclick = () => load(engine.BUILT_IN);

  const isFiles = event => engine.load && event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", event => {
    if (!isFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  addEventListener("dragleave", event => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
  addEventListener("drop", async event => {
    if (!isFiles(event)) return;
    event.preventDefault();
    document.body.classList.remove("dropping");
    try {
      choose(await models.dropped(event.dataTransfer));
    } catch (error) {
      failed(error);
    }
  });

  // ---- The same as a command or a program, and as an address

  const LANGUAGES = { "as-program": command.ofProgram, "as-curl": command.ofCurl, "as-python": command.ofPython };
  let language = engine.load ? "as-program" : "as-curl";

  function showCommand() {
    if (!model) return;
    for (const id in LANGUAGES) find(id).ariaPressed = String(id === language);
    const isCommand = language === "as-program", place = find(isCommand ? "command" : "request");
    find("command").hidden = !isCommand;
    find("request").hidden = isCommand;
    find("by-hand").hidden = !written.isByHand;
    try {
      const body = { prompt: prompt.value, ...fields() };
      const request = { ...engine.isShared && { model: model.name }, ...body, stream: true };
      place.textContent = isCommand ? command.ofProgram(body, model) : LANGUAGES[language](request, engine.address(), engine.hasKey);
    } catch (error) {
      place.textContent = error.message;
    }
  }

  // Prompt and settings, as text behind # of the address.
  function state() {
    const said = new URLSearchParams({ prompt: prompt.value, seed: seed.value });
    for (const { id, number, value } of controls) if (number.value !== String(value)) said.set(id, number.value);
    if (greedy.checked) said.set("greedy", "1");
    if (stops.value) said.set("stops", stops.value);
    if (model?.source.dtype) said.set("dtype", model.source.dtype);
    const own = wanted || (model && !model.source.isBuiltIn ? models.nameOf(model.source, model.inspection) : "");
    if (own) said.set("model", own);
    return String(said);
  }

  function restore(text) {
    const given = new URLSearchParams(text);
    prompt.value = given.get("prompt") ?? OPENING.prompt;
    seed.value = given.get("seed") || OPENING.seed;
    greedy.checked = given.get("greedy") === "1";
    stops.value = given.get("stops") ?? "";
    for (const { id, number, range, value } of controls) range.value = number.value = given.get(id) ?? value;
    wanted = given.get("model") ?? "";
    if (!model && [...find("dtype").options].some(one => one.value === given.get("dtype"))) find("dtype").value = given.get("dtype");
    if (!wanted && model && engine.load) tellSource(model, model.source);
    if (wanted) find("memory").textContent = `This page was last used with ${wanted}. A page cannot open files by itself: choose them again to use that model; until then the built-in one writes.`;
    greedyChanged();
  }

  // The address alone has it without storage, as in a private window, and with a server: what is written to one is not left behind.
  const kept = {
    read() { try { return engine.isShared ? "" : localStorage.getItem("gpt2") ?? ""; } catch { return ""; } },
    write(text) { try { if (!engine.isShared) localStorage.setItem("gpt2", text); } catch { /* Nothing is lost but this. */ } },
  };
  let keeping, opening;
  function keep() {
    clearTimeout(keeping);
    keeping = setTimeout(() => {
      const text = state() === opening ? "" : state();
      kept.write(text);
      try { history.replaceState(0, "", text ? "#" + text : location.href.split("#")[0]); } catch { /* A page in a frame has no address of its own. */ }
    }, 300);
  }

  const address = () => location.href.split("#")[0] + "#" + state();
  for (const id in LANGUAGES) find(id).onclick = () => { language = id; showCommand(); };
  parts.copies(find("copy"), find("code"), () => find(language === "as-program" ? "command" : "request").textContent);
  parts.copies(find("copy-link"), find("link"), address);
  find("copy-link").addEventListener("click", () => Object.assign(find("link"), { textContent: address(), hidden: false }));
  find("start-over").onclick = () => {
    restore("");
    changed();
    writeOpening();
  };

  // ---- What is pressed and moved

  function greedyChanged() {
    for (const { field, number } of controls) {
      if (!["temperature", "top_k", "top_p", "min_p"].includes(field)) continue;
      number.closest(".row").classList.toggle("off", greedy.checked);
    }
  }

  // Another prompt or setting.
  let typing;
  function changed() {
    showCommand();
    stale();
    keep();
    if (running || !model) return;
    showRoom();
    countSoon();
    clearTimeout(typing);
    if (engine.isShared) typing = setTimeout(moved, TYPED_MS);
    else moved();
  }

  function moved() {
    moveNext(true);
    moveChoices(true);
  }

  for (const field of [prompt, seed, stops]) field.oninput = changed;
  greedy.onchange = () => { greedyChanged(); changed(); };
  find("write").onclick = write;
  find("stop").onclick = stop;
  find("go-on").onclick = goOn;
  find("again").onclick = anew;
  find("undo").onclick = undo;
  find("redo").onclick = redo;
  find("score").onclick = score;
  find("new-seed").onclick = () => { seed.value = newSeed(); changed(); };
  find("tour").onclick = tour.start;
  find("show-bits").onchange = () => paper.classList.toggle("numbered", find("show-bits").checked);
  for (const name of Object.keys(VIEWS)) find(name).onclick = () => {
    find("look-again").hidden = true;
    showView(name);
    moveLook(true);
  };
  for (const id of ["show", "layers", "share"]) find(id).onchange = () => moveLook(true);
  find("key-use").onclick = () => {
    engine.setKey(find("key-value").value.trim());
    find("key-value").value = "";
    find("key").hidden = true;
    prompt.focus();
    begun();
  };
  find("key-value").onkeydown = event => { if (event.key === "Enter") find("key-use").click(); };

  function stop() {
    if (loading) engine.cancel();
    else halt();
  }

  addEventListener("keydown", event => {
    if (event.key === "Escape") {
      choices.hide();
      stop();
    } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      if (event.shiftKey) anew();
      else write();
    } else if (/^[zy]$/i.test(event.key) && (event.ctrlKey || event.metaKey) && !event.target.matches("input, textarea")) {
      // A field undoes its own typing.
      event.preventDefault();
      if (event.shiftKey || event.key === "y") redo();
      else undo();
    }
  });
  // How the built-in model learned, shown on demand.
  let drawLearned = () => {};
  find("show-learned").onclick = async () => {
    try {
      const history = await engine.history();
      drawLearned = () => parts.learned(history);
      find("learned").hidden = false;
      find("learned-error").textContent = "";
      drawLearned();
      find("learned-at").focus();
    } catch (error) {
      find("learned-error").textContent = `error: ${error.message}`;
    }
  };
  let waiting;
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => { choices.hide(); drawReport(); }); });
  parts.dark.addEventListener("change", () => {
    parts.surpriseScale(find("scale"));
    draw(true);
    drawReport();
    drawFeature();
    drawLearned();
    moveNext(true);
    moveHead(true);
  });
  addEventListener("hashchange", () => {
    const dtype = new URLSearchParams(location.hash.slice(1)).get("dtype") ?? "";
    restore(location.hash.slice(1));
    if (engine.load && model?.source.isBuiltIn && !wanted && dtype !== (model.source.dtype ?? "")) load({ ...engine.BUILT_IN, dtype });
    else writeOpening();
  });

  // ---- The beginning

  // A fault of the engine, and then the model that came back after it. Prompt and text stay, and a text that was asked for between the
  // two is written, unless another model came back.
  function heard(loaded, reason) {
    if (!loaded || loaded.source !== model?.source) running = null;
    if (loaded) taken(loaded);
    if (running) say("writing");
    else failed(reason);
  }

  async function start() {
    restore("");
    opening = state();
    restore(location.hash.slice(1) || kept.read());
    parts.surpriseScale(find("scale"));
    showView(view);
    begun();
  }

  async function begun() {
    try {
      const loaded = await engine.start({ ...engine.BUILT_IN, dtype: wanted ? "" : find("dtype").value }, heard);
      const notice = wanted && find("memory").textContent;
      taken(loaded);
      if (notice) find("memory").textContent = notice;
      writeOpening();
    } catch (error) {
      failed(error);
    }
  }

  // What the page does with a prompt that it came with: a server that others use too writes when it is told to.
  function writeOpening() {
    if (!engine.isShared) return write();
    if (!running) say("ready");
    follow(true);
  }

  start();
})();
