// A page of one report. What is chosen stands in the address: #layer=3&head=1&row=5&column=2.
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  document.getElementById("title").textContent = report.title;
  const draw = () => parts.report(report, location.hash.slice(1), chosen => history.replaceState(null, "", "#" + chosen));
  let waiting;
  draw();
  parts.dark.addEventListener("change", draw);
  onresize = () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(draw); };
  onhashchange = draw;
})();
