// What all plots of uPlot have in common: their axes, a cursor that the pointer and the keys move, and the values beside it.

import uPlot from "uplot";
import { make } from "./elements.js";
import { number } from "./words.js";

const FONT = "11px system-ui, sans-serif";
// The intervals of the horizontal axis are whole numbers, because steps, epochs and batches are whole numbers.
export const WHOLE_NUMBERS = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

// Put an element with the values at a point beside the point, on the side with more room.
export function beside(element, left, width, gap) {
  element.style.left = left < width / 2 ? `${left + gap}px` : "auto";
  element.style.right = left < width / 2 ? "auto" : `${width - left + gap}px`;
}

// Return the width of the vertical axis, on which no label is cut.
const wide = (plot, labels) => Math.max(52, 12 + 6.5 * Math.max(0, ...(labels ?? []).map(({ length }) => length)));

// A subclass has the `colour` of texts, and a method read() that shows the values at cursor().
export class Plot {
  constructor() {
    this.place = make("div", { class: "sr-plot" });
    this.reading = make("div", { class: "sr-reading", role: "status", hidden: true });
    this.at = null; // the position to which keys have moved the cursor
    this.dragged = false; // whether the user is dragging; the plot must then stay as it is
  }

  // Let the pointer and the keys move the cursor. The figure contains the plot, and can have the focus.
  follow(figure, released = () => {}) {
    this.figure = figure;
    this.place.addEventListener("mousedown", ({ button }) => {
      if (button) return;
      this.dragged = true;
      addEventListener("mouseup", () => {
        this.dragged = false;
        released();
      }, { capture: true, once: true });
    });
    this.place.addEventListener("mousemove", () => { this.at = null; });
    figure.addEventListener("keydown", (event) => event.target === figure && this.walk(event));
    for (const type of ["focus", "blur"]) figure.addEventListener(type, () => this.read());
    for (const type of ["mouseenter", "mouseleave"]) this.place.addEventListener(type, () => {
      this.pointed = type === "mouseenter";
      this.read();
    });
  }

  // Make the plot anew if its kind has changed, and return whether this was done. Otherwise, only change its size.
  renew(kind, height, data, options) {
    const width = this.place.clientWidth;
    this.place.style.height = `${height}px`;
    if (this.kind === kind) {
      if (this.plot.width !== width || this.plot.height !== height) this.plot.setSize({ width, height });
      return false;
    }
    this.kind = kind;
    this.before = this.plot && { left: this.plot.cursor.left, top: this.plot.cursor.top };
    this.plot?.destroy();
    this.plot = null; // the hooks run while the new plot is being made, and must not use the destroyed one
    this.plot = new uPlot({ width, height, legend: { show: false }, ...options }, data, this.place);
    this.plot.over.append(this.reading);
    return true;
  }

  // Draw the data. The part that is shown, `zoom`, and the cursor stay as they are.
  show(data, zoom = null) {
    this.plot.batch(() => {
      this.plot.setData(data, !zoom);
      if (zoom) this.plot.setScale("x", zoom);
    });
    if (this.at !== null) this.move(this.at);
    else if (this.before?.left >= 0) this.plot.setCursor(this.before);
    this.before = null;
  }

  // Move the cursor to a position on the horizontal axis, and keep it there until the pointer moves.
  move(x) {
    this.at = x;
    this.plot.setCursor({ left: this.plot.valToPos(x, "x"), top: 0 });
  }

  // Return the options of the axes. `write` turns a position on the horizontal axis into text.
  axes(label, write, incrs = WHOLE_NUMBERS, space = 60) {
    const axis = { stroke: () => this.colour, font: FONT, gap: 4, ticks: { show: false, size: 0 } };
    const values = (how) => (plot, splits) => splits.map((value) => (value === null ? "" : how(value)));
    return [{ ...axis, values: values(write), incrs, grid: { show: false }, size: 18, space, label, labelSize: 14, labelGap: 0, labelFont: FONT },
      { ...axis, values: values(number), grid: { stroke: "#8883", width: 1 }, size: wide, space: 28 }];
  }

  // Put the values beside the cursor, and return the index of its position; null if no values are to be shown.
  cursor() {
    const { idx, left } = this.plot?.cursor ?? {};
    this.reading.hidden = idx == null || left < 0 || !(this.pointed || document.activeElement === this.figure);
    if (this.reading.hidden) return null;
    beside(this.reading, left, this.plot.over.clientWidth, 8);
    return idx;
  }

  walk(event) {
    const [x] = this.plot?.data ?? [[]], last = x.length - 1, at = this.plot?.cursor.idx ?? last + 1;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    if (to === undefined || last < 0) return;
    this.move(x[Math.min(Math.max(to, 0), last)]);
    this.read();
    event.preventDefault();
  }
}
