// @ts-check
// A page of one report. The address stores the selection: #layer=3&head=1&row=5&column=2.
import { find, keepInAddress, redrawing } from "./dom.js";
import { drawReport } from "./report.js";

const report = JSON.parse(find("report").textContent);
const draw = () => drawReport(report, location.hash.slice(1), keepInAddress);
find("title").textContent = report.title;
redrawing(draw);
addEventListener("hashchange", draw);
