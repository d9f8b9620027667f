// A page of how one model learned.
(() => {
  document.getElementById("title").textContent = document.title;
  const history = JSON.parse(document.getElementById("report").textContent);
  const draw = () => parts.learned(history);
  draw();
  parts.dark.addEventListener("change", draw);
})();
