// The Displays tab: what ranks have shown with display() and plt.show(). A slider selects the time.

import { make, put } from "./elements.js";
import { clock, rankNumbers } from "./words.js";

const TOGETHER_S = 0.5; // ranks often show pictures at almost the same time; these pictures are one step of the slider

// Return what the page keeps of the displays after a message: the order, and the HTML of the displays in it. Other displays
// cannot be shown again, because a display that is replaced has a new key.
export function known(displays, { order, html }) {
  const every = { ...displays?.html, ...html };
  return { order, html: Object.fromEntries(order.map(([key]) => [key, every[key]])) };
}

// Return the positions of the slider: the times of the displays. A time is left out if another display follows within
// TOGETHER_S.
export function moments(order) {
  const times = order.map(([, , time]) => time);
  return times.filter((time, at) => !(times[at + 1] - time < TOGETHER_S));
}

// Return the displays to show at a time: the last display of each rank until then. `order` lists the displays as
// [key, ranks, time], sorted by time. A display that several ranks share is listed once. If ranks are selected, return
// only their displays.
export function shownAt(order, time, selected) {
  const last = new Map();
  for (const entry of order) {
    if (entry[2] > time) break;
    for (const rank of entry[1]) if (!selected.size || selected.has(rank)) last.set(rank, entry);
  }
  return [...new Set(last.values())].sort((a, b) => Math.min(...a[1]) - Math.min(...b[1]));
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
    const { order } = displays, times = moments(order);
    this.slider.max = String(Math.max(0, times.length - 1));
    if (this.follow) this.slider.value = this.slider.max;
    this.bar.hidden = times.length < 2;
    const at = Math.min(Number(this.slider.value), times.length - 1), time = times[at];
    const what = state?.pooled ? "item" : "rank";
    put(this.words, `${clock(time)} · ${at + 1} of ${times.length}`);
    this.slider.setAttribute("aria-valuetext", this.words.textContent);
    const found = shownAt(order, time, this.panel.chosen), keys = new Set(found.map(([key]) => key));
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
