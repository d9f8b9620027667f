// @ts-check
// Learning history of a model: the measurements from `story-probes history` for every stored checkpoint, with
// a slider over the checkpoints.
import { bars } from "./bars.js";
import { percentOf, short } from "./colors.js";
import { element, find } from "./dom.js";
import { heatmap } from "./heatmap.js";
import { drawn } from "./svg.js";

/** @typedef {import("../types").Checkpoint} Checkpoint */

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [720, 272, 34, 40, 12, 42];

const best = (/** @type {number[][]} */ scores) => Math.max(...scores.flat());
const named = (/** @type {Checkpoint} */ one) => `lesson ${one.training}, step ${one.step.toLocaleString("en")}`;

/**
 * Plots the loss and the best heads over all checkpoints.
 *
 * Returns a function that moves the line for the current checkpoint.
 *
 * @param {HTMLElement} place
 * @param {Checkpoint[]} history
 */
function lines(place, history) {
  const losses = history.map(one => one.loss_per_byte);
  const most = Math.ceil(Math.max(...losses));
  const x = (/** @type {number} */ at) => LEFT + (WIDTH - LEFT - RIGHT) * (history.length > 1 ? at / (history.length - 1) : 0);
  const y = (/** @type {number} */ share) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share;
  const line = (/** @type {number[]} */ shares, /** @type {string} */ stroke, /** @type {string} */ kind) => drawn("polyline", {
    points: shares.map((share, at) => `${x(at).toFixed(1)},${y(share).toFixed(1)}`).join(" "), stroke, class: kind,
  });
  const text = (/** @type {string} */ words, /** @type {Record<string, any>} */ place, anchor = "start") => drawn("text", { ...place, "text-anchor": anchor }, words);
  /** @type {[string, number[], string, string][]} */
  const series = [
    ["loss, nats per byte, on the left scale", losses.map(loss => loss / most), "var(--ink)", "solid"],
    ["best previous-token head", history.map(one => best(one.previous)), "var(--blue)", "dashed"],
    ["best induction head", history.map(one => best(one.induction)), "var(--mark)", "dotted"],
  ];
  const now = drawn("line", { class: "now", y1: TOP, y2: HEIGHT - BOTTOM });
  /** @type {[number, string][]} */
  const lessons = history.flatMap((one, at) => at && one.training === history[at - 1].training ? [] : [[at, one.training]]);
  const picture = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" },
    ...[0, 0.5, 1].flatMap(share => [
      drawn("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(share), y2: y(share) }),
      text(short(share * most), { x: LEFT - 6, y: y(share) + 4 }, "end"),
      text(percentOf(share), { x: WIDTH - RIGHT + 2, y: y(share) + 4 }),
    ]),
    // Alternates between two heights, because some phases are short.
    ...lessons.map(([at, name], n) => text(name, { x: x(at), y: HEIGHT - (n % 2 ? 8 : 22) })),
    ...series.map(([, shares, stroke, kind]) => line(shares, stroke, kind)), now);
  picture.ariaLabel = `${series.map(([name]) => name).join("; ")}, over ${history.length} checkpoints`;
  const legend = element("p", { className: "quiet" }, series.map(([name, , , kind]) => `${kind}: ${name}`).join("; "));
  place.replaceChildren(picture, legend);
  return (/** @type {number} */ at) => { now.setAttribute("x1", x(at)); now.setAttribute("x2", x(at)); };
}

/** @param {HTMLElement} place @param {Checkpoint} one */
function heads(place, one) {
  place.replaceChildren();
  /** @type {[string, number[][]][]} */
  const kinds = [["previous token", one.previous], ["induction", one.induction]];
  for (const [name, scores] of kinds) {
    const field = element("div");
    const readout = element("output", { className: "quiet" });
    place.append(element("figure", {}, element("figcaption", {}, name), field, readout));
    const label = (/** @type {string} */ kind) => (/** @type {any} */ _, /** @type {number} */ n) => `${kind} ${n}`;
    const view = { rows: scores.map(label("layer")), columns: scores[0].map(label("head")), values: scores.flat(), scale: "share", top: 1, bottomUp: true, name };
    const say = (/** @type {number} */ row = -1, /** @type {number} */ column = -1) => {
      readout.textContent = row < 0 ? "" : `layer ${row}, head ${column}: ${percentOf(scores[row][column])}`;
    };
    const map = heatmap(field, view, say, (row, column) => { map.choose(row, column); say(row, column); });
  }
}

/** @param {HTMLElement} place @param {Checkpoint} one */
function figures(place, one) {
  // Only fractions of prompts have a bar, not head scores ("best …"), losses ("… nats") or logit differences.
  const shares = Object.entries(one.figures).filter(([name, value]) => value >= 0 && value <= 1 && !/^best |nats|logit/.test(name));
  const view = { columns: shares.map(([name]) => name), values: shares.map(([, value]) => value), scale: "share", top: 1, name: "fraction of prompts" };
  const list = bars(place, view, chosen => list.choose(chosen));
  list.choose(0);
}

/**
 * Draws the history into the elements of learned.html, starting with its last checkpoint.
 * @param {Checkpoint[]} history
 */
export function drawLearned(history) {
  const place = (/** @type {string} */ name) => find(`learned-${name}`);
  const [slider, said, sample] = ["at", "said", "sample"].map(place);
  const move = lines(place("lines"), history);
  const show = () => {
    const at = Number(slider.value), one = history[at];
    said.textContent = `${named(one)}: loss ${short(one.loss_per_byte)} nats per byte, best induction head ${percentOf(best(one.induction))}`;
    slider.setAttribute("aria-valuetext", named(one));
    move(at);
    heads(place("heads"), one);
    figures(place("figures"), one);
    sample.textContent = one.sample;
  };
  slider.max = history.length - 1;
  slider.value = history.length - 1;
  slider.oninput = show;
  show();
}
