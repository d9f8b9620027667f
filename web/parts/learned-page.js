// @ts-check
// A page that shows how one model learned.
import { find, redrawing } from "./dom.js";
import { drawLearned } from "./learned.js";

find("title").textContent = document.title;
const history = JSON.parse(find("report").textContent);
redrawing(() => drawLearned(history));
