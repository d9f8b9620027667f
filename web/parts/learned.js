// How a model learned, as a further part of `parts`: what `story-probes history` measured of every model that was kept, and a slider over them.
parts.learned = (() => {
  const { element } = parts;
  const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [720, 272, 34, 40, 12, 42];

  const drawn = (name, attributes, ...children) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const best = scores => Math.max(...scores.flat());
  const named = one => `lesson ${one.training}, step ${one.step.toLocaleString("en")}`;

  // The loss, and the best heads, over all checkpoints; `now` is the line that the slider moves.
  function lines(place, history) {
    const losses = history.map(one => one.loss_per_byte);
    const most = Math.ceil(Math.max(...losses));
    const x = at => LEFT + (WIDTH - LEFT - RIGHT) * (history.length > 1 ? at / (history.length - 1) : 0);
    const y = share => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share;
    const line = (shares, colour, className) => drawn("polyline", {
      points: shares.map((share, at) => `${x(at).toFixed(1)},${y(share).toFixed(1)}`).join(" "), stroke: colour, class: className,
    });
    const text = (words, place, anchor = "start") => drawn("text", { ...place, "text-anchor": anchor }, words);
    const series = [
      ["loss, nats per byte, on the left scale", losses.map(loss => loss / most), "var(--ink)", "solid"],
      ["best previous-token head", history.map(one => best(one.previous)), "#1c7ed6", "dashed"],
      ["best induction head", history.map(one => best(one.induction)), "var(--mark)", "dotted"],
    ];
    const now = drawn("line", { class: "now", y1: TOP, y2: HEIGHT - BOTTOM });
    const lessons = history.flatMap((one, at) => at && one.training === history[at - 1].training ? [] : [[at, one.training]]);
    const picture = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" },
      ...[0, 0.5, 1].flatMap(share => [
        drawn("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(share), y2: y(share) }),
        text(String(share * most), { x: LEFT - 6, y: y(share) + 4 }, "end"),
        text(String(share), { x: WIDTH - RIGHT + 6, y: y(share) + 4 }),
      ]),
      // Up and down in turn, because some lessons are short.
      ...lessons.map(([at, name], n) => text(name, { x: x(at), y: HEIGHT - (n % 2 ? 8 : 22) })),
      ...series.map(([, shares, colour, className]) => line(shares, colour, className)), now);
    picture.ariaLabel = `${series.map(([name]) => name).join("; ")}, over ${history.length} checkpoints`;
    const legend = element("p", { className: "quiet" }, series.map(([name, , , className]) => `${className}: ${name}`).join("; "));
    place.replaceChildren(picture, legend);
    return at => { now.setAttribute("x1", x(at)); now.setAttribute("x2", x(at)); };
  }

  function heads(place, one) {
    place.replaceChildren();
    for (const [name, scores] of [["previous token", one.previous], ["induction", one.induction]]) {
      const field = element("div");
      const readout = element("output", { className: "quiet" });
      place.append(element("figure", {}, element("figcaption", {}, name), field, readout));
      const label = kind => (_, n) => `${kind} ${n}`;
      const view = {
        rows: scores.map(label("block")), columns: scores[0].map(label("head")), values: scores.flat(), scale: "sequential", top: 1,
        bottomUp: true, name,
      };
      const say = (row, column) => { readout.textContent = row === undefined ? "" : `block ${row}, head ${column}: ${scores[row][column]}`; };
      const map = parts.heatmap(field, view, say, (row, column) => { map.choose(row, column); say(row, column); });
    }
  }

  function figures(place, one) {
    // Shares of prompts alone have a bar: no scores of heads ("best …"), losses ("… nats") and differences of logits.
    const shares = Object.entries(one.figures).filter(([name, value]) => value >= 0 && value <= 1 && !/^best |nats|logit/.test(name));
    const view = { columns: shares.map(([name]) => name), values: shares.map(([, value]) => value), scale: "sequential", top: 1, decimals: 2, name: "shares of prompts" };
    const list = parts.bars(place, view, chosen => list.choose(chosen));
    list.choose(0);
  }

  // Draws the history into the elements of learned.html, beginning with its last model.
  return history => {
    const place = name => document.getElementById(`learned-${name}`);
    const [slider, said, sample] = ["at", "said", "sample"].map(place);
    const move = lines(place("lines"), history);
    const show = () => {
      const at = Number(slider.value), one = history[at];
      said.textContent = `${named(one)}: loss ${one.loss_per_byte} nats per byte, best induction head ${best(one.induction)}`;
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
  };
})();
