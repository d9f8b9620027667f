// A page of one report. The address holds the selection: #layer=3&head=1&row=5&column=2.
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  document.getElementById("title").textContent = report.title;
  // In the frame of a notebook a page has no address to keep it in, and this throws.
  const draw = () => parts.report(report, location.hash.slice(1), at => { try { history.replaceState(0, "", "#" + at) } catch {} });
  let waiting;
  draw();
  parts.dark.addEventListener("change", draw);
  onresize = () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(draw); };
  onhashchange = draw;
})();
