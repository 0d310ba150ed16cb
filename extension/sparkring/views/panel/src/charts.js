// The charts of the Metrics tab.

import uPlot from "uplot";
import { button, make, put, toggle } from "./elements.js";
import { isPositive, plotted, RANK_COLOURS, readings } from "./series.js";
import { number } from "./words.js";

const HEIGHT = 160; // px
const GREEN = "#23935a", RED = "#dd4a45"; // as in markup.py
const TICK = 6; // px: the height of a checkpoint's mark
// The intervals of the axis are whole numbers, because steps and epochs are whole numbers.
const WHOLE = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

// All charts of a run. They share a cursor: when the user points at a step in one chart, all charts mark this step.
export class ChartsView {
  constructor(panel) {
    this.panel = panel;
    this.charts = [];
    this.log = false;
    this.logButton = toggle("log scale", "logarithmic scale, for charts with only positive values", false, (on) => {
      Object.assign(this, { log: on, told: null });
      this.panel.schedule();
    });
    this.wholeButton = button("sr-tool", "reset zoom", "show all steps again", () => this.showWhole(), { hidden: true });
    this.hint = make("small", {}, "drag to zoom");
    this.bar = make("div", { class: "sr-chartbar", role: "toolbar", "aria-label": "Charts" }, this.logButton, this.hint, this.wholeButton);
    this.grid = make("div", { class: "sr-chartgrid" });
    this.legend = make("small");
    this.element = make("div", { class: "sr-charts" }, this.bar, this.grid, this.legend);
  }

  // Draw the charts in `told`, the latest message of kind "charts". Do nothing if the charts are not visible, or if
  // neither the message nor their width and text colour have changed.
  draw(told) {
    this.element.hidden = !told?.charts.length;
    const width = this.grid.clientWidth, colour = getComputedStyle(this.element).color;
    if (!told || !width || (told === this.told && width === this.width && colour === this.colour)) return;
    const looks = colour === this.colour ? null : colour;
    Object.assign(this, { told, width, colour });
    put(this.legend, told.legend ?? "");
    while (this.charts.length > told.charts.length) this.charts.pop().remove();
    told.charts.forEach((chart, at) => {
      if (!this.charts[at]) {
        this.charts[at] = new Chart(this);
        this.grid.append(this.charts[at].element);
      }
    });
    // All charts are in the page now, so their widths are final.
    told.charts.forEach((chart, at) => this.charts[at].draw(chart, told, looks));
  }

  showWhole() {
    this.unzoom();
    this.logButton.focus(); // "reset zoom" will be hidden; without this line, its focus would go to the page
  }

  unzoom() {
    for (const chart of this.charts) chart.showWhole();
  }

  zoomed() {
    const some = this.charts.some((chart) => chart.isZoomed());
    this.wholeButton.hidden = !some;
    this.hint.hidden = some;
  }

  remove() {
    for (const chart of this.charts) chart.remove();
  }
}

// Curves that belong together, such as loss and val_loss, and their values at the cursor.
class Chart {
  constructor(view) {
    this.view = view;
    this.caption = make("figcaption");
    this.place = make("div", { class: "sr-plot" });
    this.reading = make("div", { class: "sr-reading", role: "status", hidden: true });
    this.element = make("figure", { tabindex: "0", role: "figure" }, this.caption, this.place);
    this.element.addEventListener("keydown", (event) => this.walk(event));
    this.element.addEventListener("focus", () => this.read());
    this.element.addEventListener("blur", () => this.leave());
    this.place.addEventListener("mouseenter", () => { this.pointed = true; });
    this.place.addEventListener("mouseleave", () => this.leave());
  }

  draw(chart, told, newColour) {
    this.chart = chart;
    this.told = told;
    this.caption.replaceChildren(...chart.curves.flatMap(({ name, last, colour }, at) => [
      ...(at ? [" \u00a0 "] : []), make("b", { style: `--sr-c: ${colour}` }, name), ` ${last}`]));
    if (this.element.getAttribute("aria-label") !== chart.words) this.element.setAttribute("aria-label", chart.words);
    const { data, series, bands } = plotted(chart);
    const log = this.view.log && isPositive(chart), width = this.place.clientWidth;
    const kind = JSON.stringify([log, told.axis, chart.curves.map(({ name, ranks, undone, low }) => [name, Object.keys(ranks), undone.length, !low])]);
    if (this.kind !== kind) {
      this.plot?.destroy();
      this.plot = null; // the hooks run while the new plot is being made, and must not use the destroyed one
      this.kind = kind;
      this.plot = new uPlot({ width, height: HEIGHT, ...this.options(log), series, bands }, data, this.place);
      this.plot.over.append(this.reading);
    } else {
      const zoomed = this.isZoomed();
      if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
      this.plot.setData(data, !zoomed);
      if (zoomed || newColour) this.plot.redraw();
    }
    this.read();
  }

  options(log) {
    const colour = () => this.view.colour;
    const axis = {
      stroke: colour, font: "11px system-ui, sans-serif", ticks: { show: false, size: 0 },
      values: (plot, splits) => splits.map((value) => (value === null ? "" : number(value))),
    };
    return {
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      axes: [
        { ...axis, incrs: WHOLE, grid: { show: false }, size: 18, gap: 4, space: 60, label: this.told.axis,
          labelSize: 14, labelGap: 0, labelFont: axis.font },
        { ...axis, grid: { stroke: "#8883", width: 1 }, size: 52, gap: 4, space: 28 },
      ],
      legend: { show: false },
      cursor: { y: false, points: { show: false }, sync: { key: this.view.panel.id } },
      hooks: {
        drawAxes: [(plot) => this.drawMarks(plot)],
        setCursor: [() => this.read()],
        setScale: [(plot, scale) => { if (scale === "x") this.view.zoomed(); }],
      },
    };
  }

  // Mark where restarted ranks resumed, and where checkpoints were saved.
  drawMarks(plot) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio, bottom = bbox.top + bbox.height;
    const lines = (places, top, colour, dashes) => {
      ctx.beginPath();
      for (const place of places) {
        const x = plot.valToPos(place, "x", true);
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.moveTo(x, bottom);
        ctx.lineTo(x, top);
      }
      ctx.strokeStyle = colour;
      ctx.lineWidth = 1.2 * ratio;
      ctx.setLineDash(dashes.map((each) => each * ratio));
      ctx.stroke();
    };
    ctx.save();
    lines(this.told.restarts, bbox.top, RED, [3, 3]);
    lines(this.told.checkpoints, bottom - TICK * ratio, GREEN, []);
    ctx.restore();
  }

  // Show the values of the curves beside the cursor.
  read() {
    const { idx, left } = this.plot?.cursor ?? {};
    const wanted = (this.pointed || document.activeElement === this.element) && idx != null && left >= 0;
    this.reading.hidden = !wanted;
    if (!wanted) return;
    const rows = readings(this.chart, idx);
    this.reading.replaceChildren(
      make("b", {}, `${this.told.axis} ${number(this.chart.x[idx])}`), ...this.chart.curves.map(({ name }) => make("b", {}, name)),
      ...rows.flatMap(([name, rank, values]) => [
        make("span", { class: rank < 0 ? "" : `sr-tag sr-c${rank % RANK_COLOURS.length}` }, name), ...values.map((value) => make("span", {}, value))]));
    this.reading.style.gridTemplateColumns = `repeat(${1 + this.chart.curves.length}, auto)`;
    const width = this.plot.over.clientWidth;
    this.reading.style.left = left < width / 2 ? `${left + 8}px` : "auto";
    this.reading.style.right = left < width / 2 ? "auto" : `${width - left + 8}px`;
  }

  leave() {
    this.pointed = false;
    this.read();
  }

  walk(event) {
    const { x } = this.chart, at = this.plot.cursor.idx ?? x.length - 1;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: x.length - 1 }[event.key];
    if (to === undefined) return;
    const place = x[Math.min(Math.max(to, 0), x.length - 1)];
    this.plot.setCursor({ left: this.plot.valToPos(place, "x"), top: 0 });
    this.read();
    event.preventDefault();
  }

  isZoomed() {
    const { min, max } = this.plot?.scales.x ?? {}, x = this.plot?.data[0];
    return min != null && (min > x[0] || max < x[x.length - 1]);
  }

  showWhole() {
    const x = this.plot.data[0];
    this.plot.setScale("x", { min: x[0], max: x[x.length - 1] });
  }

  remove() {
    this.plot?.destroy();
    this.element.remove();
  }
}
