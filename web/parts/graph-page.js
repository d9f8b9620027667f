// @ts-check
// A page of one attribution graph. The address stores the selection:
// #node=3_1201_4&pinned=3_1201_4,E_5335_1&group.names=E_5335_1
import { find, keepInAddress, redrawing } from "./dom.js";
import { drawFeature } from "./feature.js";
import { drawGraph } from "./graph.js";

const graph = JSON.parse(find("report").textContent);
let kept = location.hash.slice(1);
/** @type {(point: import("../types").GraphPoint) => void} */
const showCard = ({ card }) => {
  find("feature").hidden = !card;
  if (card) drawFeature(card);
};
const draw = () => drawGraph(graph, kept, at => {
  kept = at;
  keepInAddress(at);
}, {}, showCard);
find("title").textContent = graph.title;
redrawing(draw);
addEventListener("hashchange", () => {
  kept = location.hash.slice(1);
  draw();
});
