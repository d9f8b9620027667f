"use strict";
// The page: writes when it opens, shows what each token was chosen from and what comes next, looks inside, and takes other models.
(() => {
  const { Clock, END, Tokens, alternatives, bits, element, newSeed, percent, shown, tint, told } = parts;
  const find = id => document.getElementById(id);

  // Lower temperatures are refused by the program; 0 is greedy.
  const COLDEST = 0.000001;
  // Lines of a message that the status shows.
  const FIRST_LINES = 4;
  // How many tokens the bars under the text show, and the box beside a token.
  const BARS = 10, CHOICES = 20;
  // What the page opens with, beside the values of the sliders below.
  const OPENING = { prompt: "ROMEO:\nMy love,", seed: "2" };
  // As parts.settings takes them. All are sent, since a checkpoint may have values of its own for what is left out.
  const SLIDERS = [
    ["max_tokens", "max-new-tokens", "most new tokens", 1, 1024, 1, 100, undefined, 1e6],
    ["temperature", "temperature", "temperature", 0, 2, 0.05, 0.8],
    ["top_k", "top-k", "top-k: from the k most probable (0: all)", 0, 200, 1, 50, undefined, 1e6],
    ["top_p", "top-p", "top-p: from those that add up to p", 0.01, 1, 0.01, 1],
  ];
  const FURTHER = [
    ["min_p", "min-p", "min-p: at least this share of the largest", 0, 1, 0.01, 0],
    ["repetition_penalty", "repetition", "repetition penalty (1: off)", 0.5, 2, 0.05, 1],
  ];
  const settings = [parts.settings(find("sliders"), SLIDERS, changed), parts.settings(find("further-sliders"), FURTHER, changed)];
  const controls = settings.flatMap(one => one.made);
  const [prompt, seed, greedy] = ["prompt", "seed", "greedy"].map(find);

  // The model as the engine tells it, and the sources of one that was refused and of the one that this page was used with before.
  let model = null, refused = null, wanted = "";
  // The run that writes now, and what stands under the prompt. Its ids are those of its prompt and of its tokens.
  let running = null;
  let written = { prompt: null, text: "", pieces: [], ids: [], promptIds: 0, isByHand: false };

  // ---- What is asked for

  // The fields of a request for these settings. Fails with the name of a field that holds no number it could.
  function fields() {
    const body = Object.assign({}, ...settings.map(one => one.fields()), parts.seedOf(seed));
    if (greedy.checked) body.temperature = 0;
    if (body.temperature > 0 && body.temperature < COLDEST) throw new Error(`temperature: give 0, or a number from ${COLDEST} on`);
    return body;
  }

  // Without what says how long a text is and which one.
  function sampling() {
    const { max_tokens, seed, ...body } = fields();
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
    for (const id of ["write", "anew"]) find(id).disabled = !model;
    find("go-on").disabled = !model || Boolean(running) || !written.text || isFull(written.ids);
  }

  // Whether the model's context has no room for a token after these.
  const isFull = ids => Boolean(model) && ids.length > model.config.n_positions;

  // A sentence with the first lines of what it lists; all of them are behind a fold.
  function failed(error) {
    const lines = error.message.split("\n").map(line => line.trim()), more = lines.length - FIRST_LINES;
    say(`error: ${lines.slice(0, FIRST_LINES).join(" ")}${more > 0 ? ` and ${more} more` : ""}`);
    find("status-more").hidden = more <= 0;
    find("status-lines").textContent = error.message;
  }

  // What the model is, in one line.
  function about() {
    const { inspection, memory, source } = model;
    const name = source.isBuiltIn ? "a small model of Shakespeare, inside this page" : models.nameOf(source, inspection);
    const size = `${models.size(memory[source.dtype ?? ""] ?? 0)} of memory`;
    find("about").textContent = [name, models.about(inspection), size, source.dtype, "nothing leaves this page"].filter(Boolean).join(" · ");
  }

  // ---- Writing

  // The text anew from the prompt.
  const write = () => begin({ prompt: prompt.value, body: prompt.value, pieces: [], text: "", ids: [], promptIds: 0, isByHand: false });

  // More after what stands there; after another prompt, its text is read anew.
  function goOn() {
    if (!model || running || !written.text) return;
    const isSame = written.prompt === prompt.value;
    begin({ ...written, prompt: prompt.value, body: isSame && written.ids.length ? written.ids : prompt.value + written.text, isByHand: true });
  }

  function anew() {
    seed.value = newSeed();
    write();
  }

  // Begins a run: `from` holds what is kept of the text, and its `body` is what the model goes on from, as a text or as ids.
  async function begin(from) {
    if (!model) return;
    if (running) halt();
    choices.hide();
    if (!seed.value.trim()) seed.value = newSeed();
    try {
      fields();
    } catch (error) {
      failed(error);
      return;
    }
    keep();
    const run = running = { ...from, kept: from.pieces, keptText: from.text, tokens: new Tokens(), added: "", newIds: [], clock: new Clock(), frame: 0 };
    written = { prompt: from.prompt, text: from.text, pieces: from.pieces, ids: from.ids, promptIds: from.promptIds, isByHand: from.isByHand };
    showCommand();
    if (!from.text) find("said").replaceChildren();
    say("writing");
    draw();
    let failure = null;
    try {
      const body = { ...fields(), prompt: from.body, logprobs: 0, return_token_ids: true, stream: true };
      await engine.stream("v1/completions", body, chunk => { if (running === run) hear(run, chunk); });
    } catch (error) {
      failure = error;
    }
    if (running === run) end(run, failure);
  }

  function hear(run, chunk) {
    for (const choice of chunk.choices) {
      run.clock.tick();
      run.added += choice.text;
      run.tokens.take(choice.logprobs);
      if (choice.prompt_token_ids && !run.keptText) run.promptIds = choice.prompt_token_ids.length;
      if (choice.prompt_token_ids) run.ids = choice.prompt_token_ids;
      run.newIds.push(...choice.token_ids ?? []);
      run.finish ??= choice.finish_reason;
    }
    run.frame ||= requestAnimationFrame(() => show(run, false));
  }

  // What a run has written so far, on the page.
  function show(run, isEnd) {
    cancelAnimationFrame(run.frame);
    run.frame = 0;
    const first = run.tokens.lists.text_offset[0] ?? 0;
    written = {
      prompt: run.prompt, text: run.keptText + run.added, promptIds: run.promptIds, ids: run.ids.concat(run.newIds), isByHand: run.isByHand,
      pieces: run.kept.concat(run.tokens.pieces(run.added, first, run.keptText.length)),
    };
    draw();
    parts.announce(find("said"), [written.text], isEnd);
    follow(isEnd);
  }

  function end(run, failure) {
    running = null;
    show(run, true);
    find("numbers").textContent = parts.numbers(run.clock, run.tokens.count, 1, run.finish);
    if (failure && !failure.stopped) failed(failure);
    else say(loading || "ready");
  }

  // Stops the run; what it has written stays.
  function halt() {
    const run = running;
    if (!run) return;
    engine.stop();
    end(run, null);
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
  function stale() {
    paper.classList.toggle("stale", written.text !== "" && written.prompt !== prompt.value);
  }

  const placeOf = node => drawn.findIndex(one => one.node === node);

  function goTo(n) {
    if (drawn.length) drawn[parts.clamp(n, 0, drawn.length - 1)].node.focus();
  }

  paper.addEventListener("click", event => {
    const n = placeOf(event.target);
    if (n < 0) return;
    goTo(n);
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

  // ---- What else could stand there

  const choices = parts.popup(find("choices"), node => goTo(Math.max(0, placeOf(node))));
  let open = null;

  // The ids before the n-th piece: of the prompt, and of the tokens of the pieces before it.
  function idsBefore(n) {
    const tokens = written.pieces.slice(0, n).reduce((sum, piece) => sum + piece.tokens.length, 0);
    return written.ids.slice(0, written.promptIds + tokens);
  }

  async function openChoices(n, isByKey) {
    if (!model || !drawn[n]) return;
    const { piece, node, text } = drawn[n];
    const list = element("div"), kept = element("p", { className: "quiet" });
    const close = element("button", { type: "button", ariaLabel: "close", onclick() { choices.hide(); goTo(n); } }, "×");
    choices.show(node, element("header", {}, element("p", {}, told(piece, text)), close), list, kept);
    open = { n, piece, list, kept, ids: idsBefore(n) };
    await moveChoices(true);
    if (open?.list !== list || find("choices").hidden) return;
    choices.place();
    if (isByKey) (list.querySelector("[tabindex='0']") ?? close).focus();
  }

  // The box as the settings are now.
  const moveChoices = paced(async () => {
    if (!open || find("choices").hidden) return;
    const { n, piece, list, kept, ids } = open;
    try {
      const look = await next(ids, CHOICES);
      if (open?.list !== list) return;
      const present = look.tokens.findIndex(one => one.token === piece.tokens[0].token);
      alternatives(list, "what could stand here; Enter goes on from it", look.tokens.map(bar), Math.max(0, present), one => take(n, ids, one));
      kept.textContent = keptOf(look);
    } catch (error) {
      kept.textContent = error.message;
    }
  });

  // What may come after these ids or this text, at the present settings.
  const next = (prompt, top) => engine.ask("look/next", { ...sampling(), prompt, top });
  const bar = one => ({ ...one, share: one.probability, text: `${one.probability ? "" : "left out, "}model ${percent(one.logprob)}` });
  const keptOf = look => look.kept === 1 ? "These settings leave one token." : `These settings leave ${look.kept} tokens to draw from.`;

  // Cuts the text where a piece stands, puts another token there and goes on; an end is left at that.
  function take(n, ids, one) {
    choices.hide();
    if (running) halt();
    const before = written.pieces.slice(0, n), start = before.at(-1)?.end ?? 0;
    const text = one.token === END ? "" : one.token;
    const piece = { start, end: start + text.length, tokens: [{ token: one.token, logprob: one.logprob, alternatives: [] }] };
    const cut = {
      prompt: written.prompt ?? prompt.value, text: written.text.slice(0, start) + text, pieces: [...before, piece], ids: [...ids, one.id],
      promptIds: written.promptIds, isByHand: true,
    };
    find("said").replaceChildren();
    if (one.token !== END && !isFull(cut.ids)) {
      begin({ ...cut, body: cut.ids });
      goTo(n);
      return;
    }
    written = cut;
    draw();
    follow(true);
    buttons();
  }

  addEventListener("pointerdown", event => {
    // The sliders move what the box shows, so that it stays while they are used.
    if (!find("choices").hidden && !event.target.closest("#choices, #settings, #text span")) choices.hide();
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

  // What stands there: the text, or the prompt while another one is being written.
  const isCurrent = () => written.ids.length > 0 && written.prompt === prompt.value;

  const moveNext = paced(async () => {
    if (!model) return;
    const [ids, isText] = [written.ids, isCurrent()];
    try {
      const look = await next(isText ? ids : prompt.value, BARS);
      const n = written.pieces.length;
      const onTake = one => isText ? take(n, ids, one) : takeFirst(one);
      alternatives(find("next"), "what comes next; Enter goes on with it", look.tokens.map(bar), -1, running ? null : onTake);
      find("next-about").textContent = `After the ${isText ? "text" : "prompt"} above; the bars are what the settings make of the model's own numbers. ${keptOf(look)}`;
    } catch (error) {
      find("next").replaceChildren();
      find("next-about").textContent = isFull(ids) ? "The model's context is full." : error.message;
    }
  });

  // A token chosen right after the prompt.
  async function takeFirst(one) {
    const { tokens } = await engine.ask("tokenize", { prompt: prompt.value });
    written = { prompt: prompt.value, text: "", pieces: [], ids: tokens, promptIds: tokens.length, isByHand: true };
    take(0, tokens, one);
  }

  // Bars and look keep step with the text, the look as long as it is quick.
  function follow(isEnd) {
    moveNext(isEnd);
    if (lookTook < SLOW_MS) moveLook(isEnd && view !== "head");
    find("look-again").hidden = lookTook < SLOW_MS;
  }

  // ---- Looking inside

  const VIEWS = {
    attention: "Each small picture is one head of one layer: rows are tokens that look, columns those they look at. Choose a head, then a cell or a token.",
    head: "How one number of that picture comes about: choose a layer, a head, the token that looks (query) and the one it looks at (key).",
    lens: "What the model would write if it stopped after each layer: rows are layers, from the first at the bottom to the last.",
  };
  // A look that takes longer is taken when it is asked for.
  const SLOW_MS = 700;
  let view = "attention", report = null, lookedAt = null, lookTook = 0;
  const chosen = { attention: "layer=1&head=0&row=7&column=3", lens: "" };

  function showView(name) {
    view = name;
    for (const one of Object.keys(VIEWS)) find(one).ariaPressed = String(one === name);
    find("inside-about").textContent = VIEWS[name];
    find("report").hidden = name === "head" || lookedAt !== name;
    find("head-view").hidden = name !== "head";
    find("looked").hidden = name === "head";
    find("layers-label").hidden = name !== "attention";
    find("show-label").hidden = name !== "lens";
  }

  // Most tokens of a look. The first ones of a text are the same without what follows.
  const MOST = { attention: 256, head: 256, lens: 128 };

  // What is looked at: the ids of the text, from the first on.
  async function looked(name) {
    const ids = isCurrent() ? written.ids : (await engine.ask("tokenize", { prompt: prompt.value })).tokens;
    const most = Math.min(MOST[name], model.config.n_positions);
    find("looked-at").textContent = ids.length > most ? `The text has ${ids.length} tokens; these are the first ${most}.` : "";
    return ids.slice(0, most);
  }

  const moveLook = paced(async () => {
    // While it is being used, a picture stays as it is.
    if (!model || running && find("report").contains(document.activeElement)) return;
    const name = view;
    if (name === "head") return moveHead(true);
    const begun = performance.now();
    const found = await inside(async () => {
      const more = name === "lens" ? { show: find("show").value } : parts.layers(find("layers").value);
      return engine.ask(`look/${name}`, { prompt: await looked(name), ...more });
    });
    if (!running) lookTook = performance.now() - begun;
    if (view !== name) return;
    [report, lookedAt] = [found, found && name];
    find("report").hidden = !found;
    drawReport();
  });

  function drawReport() {
    if (report && lookedAt) parts.report(report, chosen[lookedAt], text => chosen[lookedAt] = text);
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

  const drawHead = parts.head.view({
    async subject() {
      const prompt = await looked("head");
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
      say(model ? "ready" : "loading the built-in model");
    } finally {
      bar.hidden = !loading;
    }
  }

  const tellSource = (about, source) => { find("memory").textContent = models.told(about, source); };

  // A model that is there.
  function taken(loaded) {
    model = loaded;
    refused = null;
    written = { prompt: null, text: "", pieces: [], ids: [], promptIds: 0, isByHand: false };
    [report, lookedAt, lookTook] = [null, null, 0];
    find("report").hidden = true;
    find("head-steps").replaceChildren();
    find("built-in").disabled = Boolean(model.source.isBuiltIn);
    find("dtype").value = model.source.dtype ?? "";
    tellSource(model, model.source);
    about();
    showCommand();
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

  const isFiles = event => event.dataTransfer?.types.includes("Files");
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

  // ---- The same as a command, and as an address

  function showCommand() {
    if (!model) return;
    try {
      find("command").textContent = command.of({ ...fields(), prompt: prompt.value }, model.config.vocab_size, model);
      find("by-hand").hidden = !written.isByHand;
    } catch (error) {
      find("command").textContent = error.message;
    }
  }

  // Prompt and settings, as text behind # of the address.
  function state() {
    const said = new URLSearchParams({ prompt: prompt.value, seed: seed.value });
    for (const { id, number, value } of controls) if (number.value !== String(value)) said.set(id, number.value);
    if (greedy.checked) said.set("greedy", "1");
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
    for (const { id, number, range, value } of controls) range.value = number.value = given.get(id) ?? value;
    wanted = given.get("model") ?? "";
    if (!model && [...find("dtype").options].some(one => one.value === given.get("dtype"))) find("dtype").value = given.get("dtype");
    if (!wanted && model) tellSource(model, model.source);
    if (wanted) find("memory").textContent = `This page was last used with ${wanted}. A page cannot open files by itself: choose them again to go on with that model; until then the built-in one writes.`;
    greedyChanged();
  }

  // Where there is no storage, as in a private window, the address alone has it.
  const kept = {
    read() { try { return localStorage.getItem("gpt2") ?? ""; } catch { return ""; } },
    write(text) { try { localStorage.setItem("gpt2", text); } catch { /* Nothing is lost but this. */ } },
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
  parts.copies(find("copy"), find("command"));
  parts.copies(find("copy-link"), find("link"), address);
  find("copy-link").addEventListener("click", () => Object.assign(find("link"), { textContent: address(), hidden: false }));
  find("start-over").onclick = () => {
    restore("");
    changed();
    write();
  };

  // ---- What is pressed and moved

  function greedyChanged() {
    for (const { field, number } of controls) {
      if (field === "max_tokens" || field === "repetition_penalty") continue;
      number.closest(".row").classList.toggle("off", greedy.checked);
    }
  }

  // Another prompt or setting.
  function changed() {
    showCommand();
    stale();
    keep();
    if (running) return;
    moveNext(true);
    moveChoices(true);
  }

  prompt.oninput = changed;
  seed.oninput = changed;
  greedy.onchange = () => { greedyChanged(); changed(); };
  find("write").onclick = write;
  find("stop").onclick = stop;
  find("go-on").onclick = goOn;
  find("anew").onclick = anew;
  find("new-seed").onclick = () => { seed.value = newSeed(); changed(); };
  find("tour").onclick = tour.start;
  find("show-bits").onchange = () => paper.classList.toggle("numbered", find("show-bits").checked);
  for (const name of Object.keys(VIEWS)) find(name).onclick = () => {
    find("look-again").hidden = true;
    showView(name);
    moveLook(true);
  };
  for (const id of ["show", "layers"]) find(id).onchange = () => moveLook(true);

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
    }
  });
  let waiting;
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => { choices.hide(); drawReport(); }); });
  parts.dark.addEventListener("change", () => {
    parts.surpriseScale(find("scale"));
    draw(true);
    drawReport();
    moveNext(true);
    moveHead(true);
  });
  addEventListener("hashchange", () => {
    const dtype = new URLSearchParams(location.hash.slice(1)).get("dtype") ?? "";
    restore(location.hash.slice(1));
    if (model?.source.isBuiltIn && !wanted && dtype !== (model.source.dtype ?? "")) load({ ...engine.BUILT_IN, dtype });
    else write();
  });

  // ---- The beginning

  // A fault of the engine, and then the model that came back after it. Prompt and text stay, and a text that was asked for between the
  // two is written, unless another model came back.
  function heard(loaded, reason) {
    if (!loaded || loaded.source !== model?.source) running = null;
    if (loaded) {
      const text = written;
      taken(loaded);
      written = text;
      draw();
    }
    if (running) say("writing");
    else failed(reason);
  }

  async function start() {
    restore("");
    opening = state();
    restore(location.hash.slice(1) || kept.read());
    parts.surpriseScale(find("scale"));
    showView(view);
    try {
      const loaded = await engine.start({ ...engine.BUILT_IN, dtype: wanted ? "" : find("dtype").value }, heard);
      const notice = wanted && find("memory").textContent;
      taken(loaded);
      if (notice) find("memory").textContent = notice;
      write();
    } catch (error) {
      failed(error);
    }
  }

  if (!find("worker") && "serviceWorker" in navigator && location.protocol.startsWith("http")) navigator.serviceWorker.register("service-worker.js").catch(() => {});
  start();
})();
