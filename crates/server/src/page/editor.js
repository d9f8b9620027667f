// The one area that is prompt and result: a text area, the colours of its tokens beneath it, its history, and what else a token
// could have been. The text area stays an ordinary one; only the layer beneath it is drawn.
/* global parts */
const { bits, element, percent, shown, tint, told } = parts;
// Typing within this time is undone together, in ms.
const TOGETHER_MS = 1000;
const HISTORY = 500;

// Calls onChange() after every change, onTake(piece, place, token) when another token is to stand where a piece is.
export function editor(area, layer, box, onChange, onTake) {
  let text = "", pieces = [], regions = [];
  let past = [], future = [], typed = -Infinity;
  let timer;
  const regionOf = new WeakMap();
  const tail = document.createTextNode("\u200b");
  layer.append(tail);

  // What is drawn: pieces, and stretches of text of which nothing is known.
  function wanted() {
    const found = [];
    let at = 0;
    for (const piece of pieces) {
      if (piece.start > at) found.push({ start: at, end: piece.start, text: text.slice(at, piece.start) });
      found.push({ start: piece.start, end: piece.end, text: text.slice(piece.start, piece.end), piece });
      at = piece.end;
    }
    if (at < text.length) found.push({ start: at, end: text.length, text: text.slice(at) });
    // A token without text is shown at the end only: anywhere else it would move the text.
    return found.filter((region, n) => region.text || (n === found.length - 1 && region.piece));
  }

  const isSame = (a, b) => a && b && a.start === b.start && a.text === b.text && !a.piece === !b.piece
    && (!a.piece || (bits(a.piece) === bits(b.piece) && a.piece.tokens.length === b.piece.tokens.length));

  // Draws what has changed since the last time.
  function draw(everything) {
    const now = wanted();
    let same = 0;
    while (!everything && same < now.length && isSame(now[same], regions[same])) same++;
    regions.slice(same).forEach(region => region.node.remove());
    const fresh = now.slice(same);
    for (const region of fresh) {
      region.node = element("span", { className: region.text ? "" : "end" }, region.text || "end of text");
      if (region.piece) {
        tint(region.node, region.piece);
        regionOf.set(region.node, region);
      }
    }
    tail.before(...fresh.map(region => region.node));
    regions = regions.slice(0, same).concat(fresh);
  }

  // A new text that the page made.
  function show(newText, newPieces) {
    hide();
    if (area.value !== newText) area.value = newText;
    [text, pieces] = [newText, newPieces];
    draw();
    onChange();
  }

  // Keeps the end of the text in sight, where it was, while `change` makes it longer.
  function follow(change) {
    const isSeen = () => layer.getBoundingClientRect().bottom <= innerHeight;
    const was = isSeen();
    change();
    if (was && !isSeen()) layer.scrollIntoView({ block: "end" });
  }

  const state = () => ({ text, pieces, caret: area.selectionEnd });
  // What comes now can be undone to here.
  function record() {
    past.push(state());
    if (past.length > HISTORY) past.shift();
    [future, typed] = [[], -Infinity];
  }

  function go(from, to) {
    if (area.readOnly || !from.length) return;
    to.push(state());
    const there = from.pop();
    typed = -Infinity;
    show(there.text, there.pieces);
    area.setSelectionRange(there.caret, there.caret);
  }
  const undo = () => go(past, future), redo = () => go(future, past);

  area.addEventListener("input", () => {
    const now = area.value;
    let kept = 0;
    while (kept < now.length && now[kept] === text[kept]) kept++;
    if (performance.now() - typed > TOGETHER_MS) record();
    typed = performance.now();
    [text, pieces] = [now, pieces.filter(piece => piece.end <= kept && piece.start < kept)];
    hide();
    draw();
    onChange();
  });
  area.addEventListener("beforeinput", event => {
    const way = { historyUndo: undo, historyRedo: redo }[event.inputType];
    if (!way) return;
    event.preventDefault();
    way();
  });
  area.addEventListener("keydown", event => {
    const letter = event.key.toLowerCase();
    if ((event.ctrlKey || event.metaKey) && !event.altKey && (letter === "z" || letter === "y")) {
      event.preventDefault();
      if (letter === "y" || event.shiftKey) redo();
      else undo();
    } else if (event.altKey && event.key === "ArrowDown") {
      event.preventDefault();
      const region = atCaret();
      if (region) choices(region).focus();
    }
  });

  // The piece at the caret, or before it at the end.
  function atCaret() {
    const caret = area.selectionEnd, known = regions.filter(region => region.piece);
    return known.find(region => region.start <= caret && caret < region.end) ?? known.findLast(region => region.end === caret);
  }

  const popup = parts.popup(box, () => area.focus());

  // Shows what else could stand there. Gives what takes the focus.
  function choices(region) {
    hide();
    const lists = region.piece.tokens.map((one, place) => {
      const ones = one.alternatives.map(other => ({ token: other.token, share: Math.exp(other.logprob) }));
      const list = element("div");
      const chosen = ones.findIndex(other => other.token === one.token);
      const take = other => { hide(); area.focus(); onTake(region.piece, other.token); };
      parts.alternatives(list, "what could stand here; Enter goes on from it", ones, Math.max(0, chosen), place === 0 && take);
      const whole = region.piece.tokens.length > 1 ? `${shown(region.text)}, of which ` : "";
      const name = `${whole}${shown(one.token)}: ${one.logprob === null ? "the first token has no probability" : percent(one.logprob)}`;
      return element("div", {}, element("p", {}, name), list);
    });
    return popup.show(region.node, ...lists) ?? area;
  }

  function hide() {
    clearTimeout(timer);
    popup.hide();
  }

  const later = (wait, act) => { clearTimeout(timer); timer = setTimeout(act, wait); };
  function point(event) {
    const region = document.elementsFromPoint(event.clientX, event.clientY).map(node => regionOf.get(node)).find(Boolean);
    if (region && region.node === popup.owner) clearTimeout(timer);
    else if (region) later(event.type === "click" ? 0 : 120, () => choices(region));
    else if (popup.owner) later(300, hide);
  }
  area.addEventListener("pointermove", event => { if (!event.buttons && event.pointerType === "mouse") point(event); });
  area.addEventListener("click", event => { if (event.pointerType !== "mouse") point(event); });
  area.addEventListener("pointerleave", () => later(300, hide));
  box.addEventListener("pointerenter", () => clearTimeout(timer));
  box.addEventListener("pointerleave", () => later(300, hide));
  box.addEventListener("focusout", event => { if (!box.contains(event.relatedTarget)) hide(); });
  parts.dark.addEventListener("change", () => draw(true));

  return {
    get text() { return text; },
    get pieces() { return pieces; },
    get canUndo() { return past.length > 0; },
    get canRedo() { return future.length > 0; },
    // The token at the caret in words.
    get token() {
      const region = atCaret();
      if (!region) return "";
      return told(region.piece, region.text);
    },
    show, follow, record, undo, redo, hide,
  };
}
