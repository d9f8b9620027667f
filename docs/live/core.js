"use strict";
// Live figures of the course: the engine, the reader's sentence and the controls.
//
// A figure is `<figure class="live" data-figure="NAME">` with a static picture inside. The build of the site
// adds `<meta name="gpt2-engine">` with the address of the engine. Without it, the pictures stay static.
const live = (() => {
  const KEY = "gpt2-figures";
  // Maximum number of tokens in a picture.
  const MOST_TOKENS = 16;
  const WIDEST = 720, NARROWEST = 280;
  const kinds = new Map(), figures = [];

  // ---- Elements

  function html(name, properties = {}, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

  // ---- Engine

  const address = document.querySelector("meta[name=gpt2-engine]")?.content;
  let engine;

  const script = src => new Promise((resolve, reject) => document.head.append(html("script", {
    src, onload: resolve, onerror: () => reject(new Error(`the engine could not be loaded from ${src}`)),
  })));

  // Starts the worker of the page in web/, with the model that the script contains.
  async function begin() {
    await script(address);
    const { worker: code, wasm, files, history, tokenizer } = window.gpt2Engine;
    delete window.gpt2Engine;
    const worker = new Worker(URL.createObjectURL(new Blob([code], { type: "text/javascript" })));
    const pending = new Map();
    let last = 0;
    worker.onmessage = ({ data: { id, value, part, error } }) => {
      const asked = pending.get(id);
      if (!asked || part !== undefined) return;
      pending.delete(id);
      if (error) asked.reject(new Error(error.message));
      else asked.resolve(value);
    };
    worker.onerror = event => {
      event.preventDefault();
      for (const { reject } of pending.values()) reject(new Error(event.message || "the engine could not be started"));
      pending.clear();
    };
    const call = (name, more) => new Promise((resolve, reject) => {
      pending.set(++last, { resolve, reject });
      worker.postMessage({ id: last, call: name, ...more });
    });
    const [, { inspection }] = await Promise.all([call("start", { wasm }), call("open", { name: "built-in", files })]);
    const { config } = await call("load");
    performance.mark("gpt2-engine");
    return {
      call, config, history, inspection,
      ask: (path, body) => call("ask", { path, body: JSON.stringify(body) }),
      record: (ids, hooks) => call("activations", { ids: Uint32Array.from(ids), hooks: hooks.join() }),
      tokenizer,
    };
  }

  // ---- State, kept from chapter to chapter

  const START = { text: "A red ball and a blue cup, a red", layer: 0, head: 0, query: -1, key: 0 };
  const state = { ...START };
  // A page in a frame, or a browser without cookies, has no storage.
  try { Object.assign(state, JSON.parse(sessionStorage.getItem(KEY))); } catch { /* the default sentence */ }

  function set(changes) {
    Object.assign(state, changes);
    try { sessionStorage.setItem(KEY, JSON.stringify(state)); } catch { /* lost at the next chapter */ }
    figures.forEach(refresh);
  }

  // Tokens and recorded activations of the current sentence.
  let current = {};

  async function sentenceOf(engine) {
    if (current.text !== state.text) current = { text: state.text, values: {}, answer: engine.ask("tokenize", { content: state.text, with_pieces: true }) };
    const { text, values, answer } = current, { tokens } = await answer;
    if (!tokens.length) throw new Error("Type a sentence.");
    return { text, values, all: tokens.map(token => token.id), tokens: tokens.slice(0, MOST_TOKENS).map(printable) };
  }

  const printable = ({ id, piece }) => ({ id, label: piece.replaceAll(" ", "·").replaceAll("\n", "↵") });

  // Returns a figure's input: the sentence, the choices that fit it, and the activations that it needs.
  async function prepare(kind) {
    const ready = await engine, { n_layer, n_head } = ready.config;
    const view = { ...state, ...await sentenceOf(ready), engine: ready, config: ready.config };
    view.ids = view.all.slice(0, MOST_TOKENS);
    const last = view.tokens.length - 1;
    view.query = view.query < 0 || view.query > last ? last : view.query;
    for (const [name, count] of [["key", last + 1], ["layer", n_layer], ["head", n_head]]) view[name] = clamp(view[name], 0, count - 1);
    view.at = (hook, place) => part(view.values[hook], place);
    const missing = (kind.hooks?.(view) ?? []).filter(hook => !(hook in view.values));
    if (missing.length) Object.assign(view.values, await ready.record(view.ids, missing));
    view.more = await kind.load?.(view);
    return view;
  }

  // Returns the values at these indices on the first axes.
  function part({ shape, data }, place) {
    const size = shape.slice(place.length).reduce((product, count) => product * count, 1);
    const start = place.reduce((offset, index, axis) => offset * shape[axis] + index, 0) * size;
    return data.subarray(start, start + size);
  }

  // ---- Figures

  // Draws a figure again; changes that arrive meanwhile lead to one further drawing.
  async function refresh(figure) {
    figure.isStale = true;
    if (figure.isBusy) return;
    figure.isBusy = true;
    while (figure.isStale) {
      figure.isStale = false;
      try {
        await (engine ??= begin());
        figure.bar.hidden = false;
        figure.view = await prepare(figure.kind);
        paint(figure);
      } catch (error) {
        figure.readout.textContent = error.message;
      }
    }
    figure.isBusy = false;
  }

  function paint(figure) {
    const { element, holder, kind, view } = figure;
    for (const { show } of figure.controls) show(view);
    if (figure.sentence !== document.activeElement) figure.sentence.value = state.text;
    element.querySelector("img").hidden = true;
    view.width = clamp(holder.clientWidth, NARROWEST, WIDEST);
    figure.drawn = kind.draw(view);
    // The new picture keeps the keyboard's place in the old one.
    const focused = holder.contains(document.activeElement) && document.activeElement.dataset.at;
    holder.replaceChildren(figure.drawn.picture);
    if (focused) holder.querySelector(`[data-at="${focused}"]`)?.focus({ preventScroll: true });
    const rest = view.all.length - view.ids.length;
    figure.readout.textContent = figure.drawn.summary + (rest > 0 ? ` (The figure shows the first ${MOST_TOKENS} tokens.)` : "");
    if (!element.dataset.drawn) performance.mark("gpt2-figure");
    element.dataset.drawn = view.text;
  }

  // A control of one value of the state: a list (`options`), a slider (`max`) or a checkbox.
  function control({ name, label, options, min = 0, max, step = 1, shown = String }) {
    const limit = view => typeof max === "function" ? max(view) : max;
    const put = value => set({ [name]: value });
    const field = options ? html("select", { onchange: () => put(field.value === String(Number(field.value)) ? Number(field.value) : field.value) })
      : max ? html("input", { type: "range", min, step, oninput: () => put(Number(field.value)) })
      : html("input", { type: "checkbox", onchange: () => put(field.checked) });
    field.dataset.control = name;
    const value = html("span", { className: "live-value" });
    const show = view => {
      if (options) {
        const listed = options(view);
        if (listed.length !== field.length) field.replaceChildren(...listed.map(one => html("option", { value: one }, one)));
        field.value = view[name];
      } else if (max) {
        field.max = limit(view);
        // The newest value, which a drag may have changed since.
        field.value = clamp(state[name], min, limit(view));
        value.textContent = shown(Number(field.value), view);
        field.setAttribute("aria-valuetext", value.textContent);
      } else {
        field.checked = view[name];
      }
    };
    return { node: html("label", {}, html("span", {}, label), field, ...max ? [value] : []), show };
  }

  const WAYS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -999], End: [0, 999] };

  // Connects pointer and keyboard to the current drawing, which each change replaces.
  function listen(figure) {
    const { holder } = figure;
    let dragged = null;
    const drag = ({ clientX, clientY }) => {
      const svg = holder.firstElementChild, box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      figure.drawn.drag?.(dragged, (clientX - box.left) * scale, (clientY - box.top) * scale);
    };
    holder.onclick = event => {
      const cell = event.target.closest("[data-cell]");
      if (cell) figure.drawn.choose?.(...cell.dataset.cell.split(",").map(Number));
    };
    holder.onkeydown = event => {
      const way = WAYS[event.key], at = event.target.closest("[data-at]");
      if (!way || !at || !figure.drawn.move || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      event.stopPropagation();
      figure.drawn.move(...way, at.dataset.at);
    };
    holder.onpointerdown = event => {
      dragged = event.target.closest("[data-drag]")?.dataset.drag;
      if (!dragged) return;
      holder.setPointerCapture(event.pointerId);
      drag(event);
    };
    holder.onpointermove = event => dragged && drag(event);
    holder.onpointerup = holder.onpointercancel = () => dragged = null;
  }

  let waiting = 0;

  function open(element) {
    const kind = kinds.get(element.dataset.figure);
    const sentence = html("input", {
      type: "text", value: state.text, maxLength: 300, autocomplete: "off", spellcheck: false,
      oninput() {
        clearTimeout(waiting);
        waiting = setTimeout(() => set({ text: sentence.value, query: -1 }), 150);
      },
    });
    // The book turns pages with the arrow keys and searches with letters.
    const bar = html("div", { className: "live-bar", hidden: true, onkeydown: event => event.stopPropagation() },
      html("label", { className: "live-sentence" }, html("span", {}, "sentence"), sentence));
    const controls = (kind.controls ?? []).map(control), holder = html("div", { className: "live-holder" });
    bar.append(...controls.map(({ node }) => node), html("button", { type: "button", onclick: () => set(START) }, "reset"));
    const readout = html("output", { className: "live-readout" }, "Loading the model …");
    const figure = { element, kind, sentence, bar, controls, holder, readout };
    listen(figure);
    element.prepend(bar, holder, readout);
    figures.push(figure);
    let width = 0;
    new ResizeObserver(() => {
      if (width !== holder.clientWidth && figure.drawn) paint(figure);
      width = holder.clientWidth;
    }).observe(holder);
    refresh(figure);
  }

  // Opens a figure when it comes into view. Readers who save data decide themselves.
  function watch(element) {
    if (!address) {
      element.append(html("p", { className: "live-readout" }, "A static picture. In the book on the project's site, the figure runs the model on your sentence."));
    } else if (navigator.connection?.saveData) {
      const button = html("button", { onclick: () => { button.remove(); open(element); } }, "Run the model here (a download of some megabytes)");
      element.append(button);
    } else {
      new IntersectionObserver((entries, observer) => {
        if (!entries.some(entry => entry.isIntersecting)) return;
        observer.disconnect();
        open(element);
      }).observe(element);
    }
  }

  addEventListener("DOMContentLoaded", () => {
    for (const element of document.querySelectorAll("figure.live")) if (kinds.has(element.dataset.figure)) watch(element);
  });

  return {
    html, clamp, set,
    /** Registers a kind of figure: `controls`, `start` values, `hooks(view)`, `load(view)` and `draw(view)`. */
    figure(name, kind) {
      const controls = (kind.controls ?? []).map(({ name, start = 0 }) => [name, start]);
      for (const [name, value] of [...controls, ...Object.entries(kind.start ?? {})]) {
        START[name] ??= value;
        state[name] ??= START[name];
      }
      kinds.set(name, kind);
    },
  };
})();
