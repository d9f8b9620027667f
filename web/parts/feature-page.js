// A page of features. The report chooses among them, by its rows or its bars; the address keeps what is chosen: #row=3.
(() => {
  const { report, features } = JSON.parse(document.getElementById("report").textContent);
  document.getElementById("title").textContent = report.title;
  const show = chosen => {
    parts.feature(features[chosen.get("row")]);
    // In the frame of a notebook a page has no address to keep it in, and this throws.
    try { history.replaceState(0, "", "#" + chosen) } catch {}
  };
  const draw = () => parts.report(report, location.hash.slice(1), show);
  let waiting;
  draw();
  parts.dark.addEventListener("change", draw);
  onresize = () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(draw); };
  onhashchange = draw;
})();
