// The Stream tab: figures of the stream, the time that each of the last batches took, and the charts of the metrics.

import uPlot from "uplot";
import { ChartsView, FONT } from "./charts.js";
import { BATCH_PARTS, BATCH_TITLE, RED } from "./constants.js";
import { fillPairs, make, put, toggle } from "./elements.js";
import { span, stacked, told } from "./stream.js";
import { ago, duration } from "./words.js";

const PARTS = Object.keys(BATCH_PARTS);
const LEAST_HEIGHT = 140, MOST_HEIGHT = 260; // px
const TICK = 3; // px: the height of the mark of a batch that was trained again
const WHOLE = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

export class StreamView {
  constructor(panel) {
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
    this.place = make("div", { class: "sr-plot" });
    this.reading = make("div", { class: "sr-reading", role: "status", hidden: true });
    this.legend = make("small", { hidden: true });
    this.bars = make("figure", { role: "figure", tabindex: "0", "aria-label": BATCH_TITLE },
      make("figcaption", {}, make("b", {}, BATCH_TITLE), ...this.toggles), this.split, this.place, this.legend);
    this.bars.addEventListener("keydown", (event) => event.target === this.bars && this.walk(event));
    this.bars.addEventListener("blur", () => this.read());
    this.bars.addEventListener("focus", () => this.read());
    this.place.addEventListener("mouseenter", () => { this.pointed = true; });
    this.place.addEventListener("mouseleave", () => { this.pointed = false; this.read(); });
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
    if (batches.length) this.drawBars(message, batches);
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

  drawBars(message, batches) {
    const width = this.place.clientWidth, colour = getComputedStyle(this.element).color;
    const shown = new Set(PARTS.filter((name) => this.choice.get(name) ?? message.parts[PARTS.indexOf(name)][0]));
    const around = this.place.offsetTop + (this.legend.hidden ? 4 : 22);
    const height = Math.min(Math.max(this.room() - around, LEAST_HEIGHT), MOST_HEIGHT);
    const signature = [message, width, height, colour, devicePixelRatio, [...shown].join()];
    if (!width || signature.every((each, at) => each === this.drawn?.[at])) return;
    this.drawn = signature;
    this.batches = batches;
    this.colour = colour;
    this.legend.hidden = !message.legend;
    put(this.legend, message.legend);
    this.drawShares(message.parts, shown);
    const { parts, data } = stacked(batches, shown), kind = JSON.stringify([parts, devicePixelRatio]);
    this.place.style.height = `${height}px`;
    if (this.kind !== kind) {
      this.kind = kind;
      this.plot?.destroy();
      this.plot = null; // the hooks run while the new plot is being made, and must not use the destroyed one
      this.plot = new uPlot({ width, height, ...this.options(parts) }, data, this.place);
      this.plot.over.append(this.reading);
    } else {
      if (this.plot.width !== width || this.plot.height !== height) this.plot.setSize({ width, height });
      this.plot.setData(data);
    }
    this.read();
  }

  // Show the part of the whole time in the buttons, and as a bar.
  drawShares(parts, shown) {
    const whole = parts.reduce((sum, [, , seconds]) => sum + seconds, 0) || 1;
    const words = parts.map(([, share], at) => `${PARTS[at]} ${share}`);
    parts.forEach(([, , seconds], at) => {
      put(this.toggles[at], words[at]);
      this.toggles[at].setAttribute("aria-pressed", String(shown.has(PARTS[at])));
      this.split.children[at].style.width = `${(100 * seconds) / whole}%`;
      this.split.children[at].title = `${PARTS[at]}: ${duration(seconds)} in all batches`;
    });
    this.split.setAttribute("aria-label", `The whole time: ${words.join(", ")}`);
  }

  options(parts) {
    const axis = { stroke: () => this.colour, font: FONT, ticks: { show: false, size: 0 } };
    const bars = uPlot.paths.bars({ size: [0.8, 40], align: 0 });
    return {
      scales: { x: { time: false, range: () => span(this.batches) }, y: { range: (plot, low, high) => [0, high > 0 ? 1.05 * high : 1] } },
      axes: [
        { ...axis, values: (plot, splits) => splits.map((at) => this.batches[at]?.batch ?? ""), incrs: WHOLE, grid: { show: false }, size: 18, gap: 4,
          space: 60, label: "batch", labelSize: 14, labelGap: 0, labelFont: FONT },
        { ...axis, values: (plot, splits) => splits.map((value) => (value === null ? "" : String(Number(value.toPrecision(4))))),
          grid: { stroke: "#8883", width: 1 }, size: 52, gap: 4, space: 28 },
      ],
      series: [{}, ...parts.map((name) => ({ fill: BATCH_PARTS[name], width: 0, paths: bars, points: { show: false } }))],
      legend: { show: false },
      padding: [8, null, null, null],
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      hooks: { draw: [(plot) => this.drawReplayed(plot)], setCursor: [() => this.read()] },
    };
  }

  // Mark the batches on which new ranks have trained again.
  drawReplayed(plot) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio, half = Math.max(1, 0.4 * Math.abs(plot.valToPos(1, "x", true) - plot.valToPos(0, "x", true)));
    ctx.save();
    ctx.fillStyle = RED;
    this.batches.forEach(({ how }, at) => {
      if (how === "replayed") ctx.fillRect(plot.valToPos(at, "x", true) - half, bbox.top + bbox.height, 2 * half, TICK * ratio);
    });
    ctx.restore();
  }

  // Show the times of the batch at the cursor.
  read() {
    const { idx, left } = this.plot?.cursor ?? {}, batch = idx == null ? null : this.batches[idx];
    this.reading.hidden = !batch || left < 0 || !(this.pointed || document.activeElement === this.bars);
    if (this.reading.hidden) return;
    fillPairs(this.reading, told(batch));
    const width = this.plot.over.clientWidth;
    this.reading.style.left = left < width / 2 ? `${left + 8}px` : "auto";
    this.reading.style.right = left < width / 2 ? "auto" : `${width - left + 8}px`;
  }

  walk(event) {
    const last = (this.batches?.length ?? 0) - 1, at = this.plot?.cursor.idx ?? last + 1;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    if (to === undefined || last < 0) return;
    this.plot.setCursor({ left: this.plot.valToPos(Math.min(Math.max(to, 0), last), "x"), top: 0 });
    this.read();
    event.preventDefault();
  }

  remove() {
    this.plot?.destroy();
    this.charts.remove();
  }
}
