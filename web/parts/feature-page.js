// @ts-check
// A page of features. The report's rows or bars select one; the address stores the selection: #row=3.
import { find, keepInAddress, redrawing } from "./dom.js";
import { drawFeature } from "./feature.js";
import { drawReport } from "./report.js";

const { report, features } = JSON.parse(find("report").textContent);
const draw = () => drawReport(report, location.hash.slice(1), chosen => {
  drawFeature(features[Number(chosen.get("row"))]);
  keepInAddress(chosen);
});
find("title").textContent = report.title;
redrawing(draw);
addEventListener("hashchange", draw);
