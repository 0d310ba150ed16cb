// The Displays tab: what ranks have shown with display() and plt.show(). A slider selects the time.

import { make, put } from "./elements.js";
import { clock, rankNumbers } from "./words.js";

// A rank often shows several things one after another, and other ranks do so at almost the same time. These displays are one step
// of the slider. A step spans at most SPAN_S, so that a rank that shows pictures all the time does not show them all at once.
const TOGETHER_S = 0.5, SPAN_S = 1;

// Return what the page keeps of the displays after a message: the order, and the HTML of the displays in it. Other displays
// cannot be shown again, because a display that is replaced has a new key.
export function known(displays, { order, html }) {
  const every = { ...displays?.html, ...html };
  return { order, html: Object.fromEntries(order.map(([key]) => [key, every[key]])) };
}

// Divide `order`, which lists the displays as [key, ranks, time], sorted by time, into the steps of the slider. A display that
// several ranks share is listed once.
export function stepsOf(order) {
  const steps = [];
  for (const entry of order) {
    const step = steps.at(-1), time = entry[2];
    if (step && time - step.at(-1)[2] < TOGETHER_S && time - step[0][2] < SPAN_S) step.push(entry);
    else steps.push([entry]);
  }
  return steps;
}

// Return the displays to show at a step: for each rank, its displays in the last step, up to and including number `at`, in which
// it showed something. The result is in the order of the ranks. If ranks are selected, return only their displays.
export function shownAt(steps, at, selected) {
  const last = new Map();
  for (const step of steps.slice(0, at + 1)) {
    const here = new Map();
    for (const entry of step) {
      for (const rank of entry[1]) if (!selected.size || selected.has(rank)) here.set(rank, [...(here.get(rank) ?? []), entry]);
    }
    for (const [rank, found] of here) last.set(rank, found);
  }
  const ranks = [...last.keys()].sort((a, b) => a - b);
  return [...new Set(ranks.flatMap((rank) => last.get(rank)))];
}

export class DisplaysView {
  constructor(panel) {
    this.panel = panel;
    this.tiles = new Map(); // key → element
    this.follow = true; // whether the slider stays at the newest display
    this.slider = make("input", { type: "range", min: "0", max: "0", value: "0", "aria-label": "Time", oninput: () => {
      this.follow = Number(this.slider.value) >= Number(this.slider.max);
      this.panel.schedule();
    } });
    this.words = make("span", { role: "status" });
    this.bar = make("div", { class: "sr-chartbar" }, this.slider, this.words);
    this.grid = make("div", { class: "sr-displays" });
    this.element = make("div", {}, this.bar, this.grid);
  }

  draw() {
    const { displays, state } = this.panel.run;
    if (!displays) return;
    const steps = stepsOf(displays.order);
    this.slider.max = String(Math.max(0, steps.length - 1));
    if (this.follow) this.slider.value = this.slider.max;
    this.bar.hidden = steps.length < 2;
    const at = Math.min(Number(this.slider.value), steps.length - 1);
    const what = state?.pooled || "rank";
    put(this.words, steps.length ? `${clock(steps[at].at(-1)[2])} · ${at + 1} of ${steps.length}` : "");
    this.slider.setAttribute("aria-valuetext", this.words.textContent);
    const found = shownAt(steps, at, this.panel.chosen), keys = new Set(found.map(([key]) => key));
    for (const [key, tile] of this.tiles) {
      if (keys.has(key)) continue;
      tile.remove();
      this.tiles.delete(key);
    }
    found.forEach(([key, ranks], place) => {
      let tile = this.tiles.get(key);
      if (!tile) {
        tile = make("figure", { tabindex: "0" }, make("figcaption"), make("div", { class: "sr-shown" }));
        tile.lastChild.innerHTML = displays.html[key]; // made harmless by views/foreign.py
        this.tiles.set(key, tile);
      }
      put(tile.firstChild, `${what}${ranks.length === 1 ? "" : "s"} ${rankNumbers(ranks)}`);
      tile.setAttribute("aria-label", tile.firstChild.textContent);
      if (this.grid.children[place] !== tile) this.grid.insertBefore(tile, this.grid.children[place] ?? null);
    });
  }
}
