// The Overview tab: what needs attention most, the charts on the left, and the last lines of the ranks on the right.

import { ChartsView } from "./charts.js";
import { button, make, put } from "./elements.js";
import { LOOK, LogView } from "./log.js";
import { counted } from "./words.js";

// px: charts are higher than LEAST_ROOM; in a narrow panel, the lines below the charts need BELOW (see panel.css)
const LEAST_ROOM = 100, BELOW = 120;

export class Overview {
  constructor(panel) {
    this.panel = panel;
    this.charts = new ChartsView(panel, () => panel.chartRoom(this.element) - this.watch.offsetHeight - (this.isNarrow() ? BELOW : 0));
    this.log = new LogView(panel, { get wrap() { return LOOK.wrap; } });
    this.bar = make("div", { class: "sr-logbar" }, make("span", { class: "sr-spring" }), this.log.lookButtons.wrap);
    this.sentence = make("div", { class: "sr-empty", role: "status" });
    this.right = make("div", { class: "sr-overlog" }, this.sentence, this.bar, this.log.box);
    this.watch = button("sr-tool sr-watch", "", "show more", () => panel.isThere(this.tab) && panel.select(this.tab), { hidden: true });
    this.element = make("div", { class: "sr-overview" }, this.watch, this.charts.element, this.right);
  }

  // Return whether the charts are above the lines instead of beside them.
  isNarrow() {
    return this.right.offsetTop > this.charts.element.offsetTop + LEAST_ROOM;
  }

  // Draw what has changed. Return false if draw() must be called again soon.
  draw() {
    const { metrics: curves, lines, state } = this.panel.run;
    const [watched, tab] = state?.watch ?? [];
    this.tab = tab;
    this.watch.hidden = !watched;
    put(this.watch, watched ? `⚑ ${watched}` : "");
    this.charts.draw(curves);
    const drawn = Boolean(curves?.charts.length), printed = lines.spoken;
    this.element.classList.toggle("sr-uncharted", !drawn);
    this.sentence.hidden = printed;
    this.log.box.hidden = this.bar.hidden = !printed;
    if (!printed) put(this.sentence, sentence(state, drawn));
    return printed ? this.log.draw() : true;
  }

  remove() {
    this.charts.remove();
  }
}

// Say in one sentence that nothing has been printed, and how many reports there are.
function sentence(state, drawn) {
  const reports = state?.reports ?? 0, over = state?.ended > 0;
  if (reports) return `${over ? "Nothing was printed" : "Nothing printed yet"}; ${counted(reports, "report")}${drawn ? " in the charts" : ""}.`;
  if (over) return "The ranks printed nothing.";
  return state?.state === "running" ? "The ranks have not printed anything yet." : "The ranks are starting.";
}
