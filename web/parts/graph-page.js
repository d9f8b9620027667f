// A page of one attribution graph. The address holds the selection: #node=3_1201_4&pinned=3_1201_4,E_5335_1&group.names=E_5335_1
(() => {
  const graph = JSON.parse(document.getElementById("report").textContent);
  document.getElementById("title").textContent = graph.title;
  // In the frame of a notebook a page has no address to keep it in, and this throws.
  let kept = location.hash.slice(1);
  const draw = () => parts.graph(graph, kept, at => { kept = at; try { history.replaceState(0, "", "#" + at) } catch {} });
  let waiting;
  draw();
  parts.dark.addEventListener("change", draw);
  onresize = () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(draw); };
  onhashchange = () => { kept = location.hash.slice(1); draw(); };
})();
