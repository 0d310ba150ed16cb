// The Stream tab: figures of the stream, the time that each of the last batches took, and the charts of the metrics.

import uPlot from "uplot";
import { ChartsView } from "./charts.js";
import { BATCH_PARTS, BATCH_TITLE, RED } from "./constants.js";
import { fillPairs, make, put, toggle } from "./elements.js";
import { Plot } from "./plot.js";
import { span, stacked, ticks, told, top } from "./stream.js";
import { ago, duration } from "./words.js";

const PARTS = Object.keys(BATCH_PARTS);
const LEAST_HEIGHT = 140, MOST_HEIGHT = 260; // px
const TICK = 3; // px: the height of the mark of a batch that was trained again

export class StreamView extends Plot {
  constructor(panel) {
    super();
    this.panel = panel;
    this.choice = new Map(); // the parts that the user has switched on or off
    this.figures = make("dl", { class: "sr-streamfigures" });
    this.facts = make("small");
    this.toggles = PARTS.map((name) => {
      const element = toggle(name, `show the time of ${name} in the chart`, true, (on) => {
        this.choice.set(name, on);
        panel.schedule();
      });
      element.style.setProperty("--sr-c", BATCH_PARTS[name]);
      element.classList.add("sr-streampart");
      return element;
    });
    this.split = make("div", { class: "sr-split", role: "img" }, ...PARTS.map((name) => make("div", { style: `background: ${BATCH_PARTS[name]}` })));
    this.legend = make("small", { hidden: true });
    this.bars = make("figure", { role: "figure", tabindex: "0", "aria-label": BATCH_TITLE },
      make("figcaption", {}, make("b", {}, BATCH_TITLE), ...this.toggles), this.split, this.place, this.legend);
    this.follow(this.bars);
    this.charts = new ChartsView(panel, () => this.room());
    this.grid = make("div", { class: "sr-streamgrid" }, this.bars, this.charts.element);
    this.element = make("div", { class: "sr-stream" }, this.figures, this.facts, this.grid);
  }

  // Return the height that is available for the charts.
  room() {
    return this.panel.chartRoom(this.panel.bodies.stream) - this.grid.offsetTop;
  }

  draw() {
    const { stream, curves, state } = this.panel.run, message = stream.told;
    if (!message || !this.element.clientWidth) return;
    this.drawFigures(message, state);
    put(this.facts, message.facts);
    const batches = stream.batches;
    this.bars.hidden = !batches.length;
    this.charts.draw(curves);
    this.grid.classList.toggle("sr-uncharted", this.charts.element.hidden);
    if (batches.length) this.drawBars(message, stream, batches);
  }

  // A value that is a number is a point in time.
  drawFigures({ figures }, state) {
    const shown = figures.filter(([, value]) => !(state?.ended && typeof value === "number"))
      .map(([name, value]) => [name, typeof value === "number" ? ago(this.panel.now() - value) : value]);
    const signature = JSON.stringify(shown);
    if (signature === this.figured) return;
    this.figured = signature;
    this.figures.replaceChildren(...shown.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  }

  drawBars(message, stream, batches) {
    const width = this.place.clientWidth, colour = getComputedStyle(this.element).color;
    const shown = new Set(PARTS.filter((name) => this.choice.get(name) ?? message.parts[PARTS.indexOf(name)][0]));
    const around = this.place.offsetTop + (this.legend.hidden ? 4 : 22);
    const height = Math.min(Math.max(this.room() - around, LEAST_HEIGHT), MOST_HEIGHT);
    const signature = [message, width, height, colour, devicePixelRatio, [...shown].join()];
    if (!width || signature.every((each, at) => each === this.drawn?.[at])) return;
    this.drawn = signature;
    this.batches = batches;
    this.first = stream.first;
    this.colour = colour;
    this.legend.hidden = !message.legend;
    put(this.legend, message.legend);
    this.drawShares(message.parts, shown);
    const { parts, data } = stacked(batches, shown, stream.first), kind = JSON.stringify([parts, devicePixelRatio]);
    this.heights = data[1] ?? [0];
    this.renew(kind, height, data, this.options(parts));
    this.show(data);
    this.read();
  }

  // Show the part of the whole time in the buttons, and as a bar.
  drawShares(parts, shown) {
    const whole = parts.reduce((sum, [, , seconds]) => sum + seconds, 0) || 1;
    const words = parts.map(([, share], at) => `${PARTS[at]} ${share}`);
    parts.forEach(([, , seconds], at) => {
      put(this.toggles[at], words[at]);
      this.toggles[at].hidden = !seconds;
      this.toggles[at].setAttribute("aria-pressed", String(shown.has(PARTS[at])));
      this.split.children[at].style.width = `${(100 * seconds) / whole}%`;
      this.split.children[at].title = `${PARTS[at]}: ${duration(seconds)} in all batches`;
    });
    this.split.setAttribute("aria-label", `The whole time: ${words.join(", ")}`);
  }

  options(parts) {
    const bars = uPlot.paths.bars({ size: [0.8, 40], align: 0 });
    const [x, y] = this.axes("batch", (at) => this.batches[at - this.first]?.batch ?? "");
    return {
      scales: { x: { time: false, range: () => span(this.batches, this.first) }, y: { range: () => [0, 1.05 * top(this.heights) || 1] } },
      axes: [{ ...x, splits: (plot, axis, low, high, unit) => ticks(this.batches, unit, this.first) }, y],
      series: [{}, ...parts.map((name) => ({ fill: BATCH_PARTS[name], width: 0, paths: bars, points: { show: false } }))],
      padding: [16, null, null, null],
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      hooks: { draw: [(plot) => this.drawMarks(plot)], setCursor: [() => this.read()] },
    };
  }

  // Mark the batches on which new ranks have trained again, and write the heights of bars that are cut.
  drawMarks(plot) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio, half = Math.max(1, 0.4 * Math.abs(plot.valToPos(1, "x", true) - plot.valToPos(0, "x", true)));
    ctx.save();
    ctx.fillStyle = RED;
    this.batches.forEach(({ how }, at) => {
      if (how === "replayed") ctx.fillRect(plot.valToPos(this.first + at, "x", true) - half, bbox.top + bbox.height, 2 * half, TICK * ratio);
    });
    const highest = top(this.heights);
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    Object.assign(ctx, { textAlign: "center", textBaseline: "bottom" });
    ctx.fillStyle = this.colour;
    this.heights.forEach((height, at) => {
      if (height > highest) ctx.fillText(duration(height), plot.valToPos(this.first + at, "x", true), bbox.top - 2 * ratio);
    });
    ctx.restore();
  }

  // Show the times of the batch at the cursor.
  read() {
    const idx = this.cursor();
    if (idx !== null && this.batches[idx]) fillPairs(this.reading, told(this.batches[idx]));
  }

  remove() {
    this.plot?.destroy();
    this.charts.remove();
  }
}
