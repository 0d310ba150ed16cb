// The charts of the Overview and Metrics tabs.

import { GREEN, RANK_COLOURS, RED } from "./constants.js";
import { background, button, choice, download, make, put, refillChoice, toggle } from "./elements.js";
import { Plot, WHOLE_NUMBERS } from "./plot.js";
import { axesOf, csv, isPositive, laid, placed, plotted, readings, SMOOTHING } from "./series.js";
import { number, ticking } from "./words.js";

const LEAST_WIDTH = 320, LEAST_HEIGHT = 160, MOST_HEIGHT = 260; // px; the width is also in panel.css
const TICK = 6; // px: the height of a checkpoint's mark
const ODD = 4; // px: the height of the mark of values that are not finite
const RING = 4; // px: the radius of the mark of the best value
const NEAR = 8; // px: the largest distance from a rank's line at which a click selects the rank
// Intervals of time are whole seconds, minutes, hours or days.
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, ...WHOLE_NUMBERS.map((days) => days * 172800)];

// The settings for the charts in all tabs of a panel.
export const newLooks = () => ({ log: false, smoothing: "off", axis: null });

// All charts of a run. They share a cursor: if the user points at a step in one chart, all charts mark this step.
// `room` returns the height that is available for all charts together, or 0 for the smallest height.
export class ChartsView {
  constructor(panel, room = () => 0) {
    this.panel = panel;
    this.room = room;
    this.charts = [];
    const set = (change) => {
      Object.assign(panel.looks, change);
      panel.schedule();
    };
    this.logButton = toggle("log scale", "use a logarithmic scale in charts whose values are all positive", panel.looks.log, (log) => set({ log }));
    this.smoothing = choice("Smoothing", Object.keys(SMOOTHING), (smoothing) => set({ smoothing }));
    this.axis = choice("Horizontal axis", [], (axis) => set({ axis }));
    this.wholeButton = button("sr-tool", "reset zoom", "show all steps again", () => this.showWhole(), { hidden: true });
    this.hint = make("small", {}, "drag to zoom");
    this.bar = make("div", { class: "sr-chartbar", role: "toolbar", "aria-label": "Charts" }, this.logButton,
      make("label", {}, "smoothing: ", this.smoothing), this.axisLabel = make("label", {}, "by: ", this.axis), this.hint, this.wholeButton);
    this.grid = make("div", { class: "sr-chartgrid" });
    this.legend = make("small");
    this.element = make("div", { class: "sr-charts" }, this.bar, this.grid, this.legend);
  }

  // Draw the charts in `told`, the latest message of kind "charts". Do nothing if the charts are not visible, or if
  // nothing that they depend on has changed.
  draw(told) {
    this.element.hidden = !told?.charts.length;
    if (!told) return;
    const { looks, chosen } = this.panel, width = this.grid.clientWidth;
    if (!width || this.charts.some(({ dragged }) => dragged)) return;
    const colour = getComputedStyle(this.element).color, room = this.room(), dense = devicePixelRatio;
    const looked = JSON.stringify([width, room, colour, dense, looks]);
    if (told === this.told && looked === this.looked && chosen === this.chosen) return;
    Object.assign(this, { told, looked, chosen, colour, ground: background(this.element) });
    this.control();
    put(this.legend, told.legend ?? "");
    while (this.charts.length > told.charts.length) this.charts.pop().remove();
    told.charts.forEach((chart, at) => {
      if (!this.charts[at]) {
        this.charts[at] = new Chart(this);
        this.grid.append(this.charts[at].element);
      }
      this.charts[at].describe(chart, told);
    });
    // All charts and captions are in the page now, so the widths are final, and the remaining height is known.
    this.height = this.heightOf(width, room);
    told.charts.forEach((chart, at) => this.charts[at].draw(chart, told));
  }

  // Show the current settings in the controls, and what this run's axis can show.
  control() {
    const { looks } = this.panel, axes = axesOf(this.told);
    this.axisName = axes.includes(looks.axis) ? looks.axis : this.told.axis;
    this.logButton.setAttribute("aria-pressed", String(looks.log));
    this.smoothing.value = looks.smoothing;
    refillChoice(this.axis, axes);
    this.axis.value = this.axisName;
    this.axisLabel.hidden = axes.length < 2;
  }

  // Return the height of each plot. All plots together fill the available height, if this is possible within limits.
  heightOf(width, room) {
    const { columnGap, rowGap } = getComputedStyle(this.grid), gap = parseFloat(columnGap) || 0;
    const columns = Math.min(Math.max(1, Math.floor((width + gap) / (LEAST_WIDTH + gap))), this.charts.length);
    const rows = Math.ceil(this.charts.length / columns);
    const caption = Math.max(...this.charts.map((chart) => chart.caption.offsetHeight));
    const around = this.grid.offsetTop - this.element.offsetTop + this.legend.offsetHeight + 8; // the bar, the legend and margins
    const each = Math.floor((room - around) / rows - caption - (parseFloat(rowGap) || 0) * (rows - 1) / rows);
    return Math.min(Math.max(each, LEAST_HEIGHT), MOST_HEIGHT);
  }

  showWhole() {
    this.unzoom();
    this.logButton.focus(); // "reset zoom" will be hidden; without this line, the page would get the focus
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
class Chart extends Plot {
  constructor(view) {
    super();
    this.view = view;
    this.caption = make("figcaption");
    this.csvButton = button("sr-tool", "CSV", "copy the values as CSV", () => this.takeValues());
    this.pngButton = button("sr-tool", "PNG", "copy the chart as a picture (PNG)", () => this.takePicture());
    this.element = make("figure", { tabindex: "0", role: "figure" }, this.caption, this.place,
      make("div", { class: "sr-take" }, this.csvButton, this.pngButton));
    this.follow(this.element, () => view.panel.schedule());
    this.place.addEventListener("click", (event) => this.choose(event));
  }

  // Write the caption, with the name, the last value and the best value of each curve.
  describe(chart, told) {
    const axis = this.view.axisName;
    this.chart = chart;
    this.told = told;
    this.laid = laid(chart, told, axis);
    this.element.classList.toggle("sr-used", Boolean(chart.used));
    this.caption.replaceChildren(...this.laid.curves.map(({ name, last, best, colour }) => make("span", {},
      make("b", { style: `--sr-c: ${colour}` }, name), ` ${last}`, best ? ` · best ${number(best.value)} at ${placed(axis, best.x)}` : "")));
    for (const [element, name, words] of [[this.element, "aria-label", chart.words],
      [this.csvButton, "aria-label", `CSV: copy the values of ${this.name()}`], [this.pngButton, "aria-label", `PNG: copy the chart of ${this.name()}`]]) {
      if (element.getAttribute(name) !== words) element.setAttribute(name, words);
    }
  }

  name() {
    return this.chart.curves.map(({ name }) => name).join(", ");
  }

  get colour() {
    return this.view.colour;
  }

  draw() {
    const { looks, chosen } = this.view.panel, { axisName, height } = this.view;
    const { data, series, bands } = plotted(this.laid, { smoothing: SMOOTHING[looks.smoothing], chosen });
    const log = looks.log && isPositive(this.laid), { min, max } = this.plot?.scales.x ?? {};
    const zoom = this.isZoomed() && this.axisName === axisName ? { min, max } : null;
    const kind = JSON.stringify([log, axisName, devicePixelRatio, series.map(({ dash, width, rank }) => [dash, width === 0, rank !== undefined]), bands]);
    if (this.axisName !== axisName) this.at = null;
    this.axisName = axisName;
    if (!this.renew(kind, height, data, { ...this.options(log), series, bands })) {
      series.forEach(({ stroke, width, alpha, rank, spanGaps }, at) => {
        if (at) Object.assign(this.plot.series[at], { stroke: () => stroke, width, alpha, rank, spanGaps });
      });
    }
    this.show(data, zoom);
    this.read();
  }

  options(log) {
    const { axisName } = this.view;
    return {
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      axes: axisName === "time" ? this.axes("time since the start", ticking, TIMES, 80) : this.axes(axisName, number),
      cursor: { y: false, points: { show: false }, sync: { key: this.view.panel.id } },
      hooks: {
        drawAxes: [(plot) => this.drawMarks(plot)],
        draw: [(plot) => this.drawBest(plot)],
        setCursor: [() => this.read()],
        setScale: [(plot, scale) => { if (scale === "x") this.view.zoomed(); }],
      },
    };
  }

  // Mark where restarted ranks resumed, where checkpoints were saved, and, along the top, where values are not finite.
  drawMarks(plot) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio, bottom = bbox.top + bbox.height;
    const lines = (places, top, colour, dashes) => {
      ctx.beginPath();
      for (const place of places) {
        const x = plot.valToPos(this.laid.moved(place), "x", true);
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
    ctx.fillStyle = RED;
    for (const span of this.chart.odd ?? []) {
      const ends = span.map((place) => plot.valToPos(this.laid.moved(place), "x", true));
      const [left, right] = ends.map((x) => Math.min(Math.max(x, bbox.left), bbox.left + bbox.width));
      if (ends[1] >= bbox.left && ends[0] <= left) ctx.fillRect(left - ratio, bbox.top, right - left + 2 * ratio, ODD * ratio);
    }
    ctx.restore();
  }

  // Mark the best value of each curve with a ring.
  drawBest(plot) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio;
    ctx.save();
    ctx.lineWidth = 2 * ratio;
    ctx.fillStyle = this.view.ground;
    ctx.setLineDash([]);
    for (const { best, colour } of this.laid.curves) {
      if (!best) continue;
      const x = plot.valToPos(best.x, "x", true), y = plot.valToPos(best.value, "y", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.arc(x, Math.min(Math.max(y, bbox.top), bbox.top + bbox.height), RING * ratio, 0, 2 * Math.PI);
      ctx.strokeStyle = colour;
      ctx.fill();
      ctx.stroke();
    }
    ctx.restore();
  }

  // Show the values of the curves beside the cursor, and highlight the rank that a click would select.
  read() {
    const idx = this.cursor(), near = this.pointed && idx !== null ? this.nearest() : null;
    if (this.plot) this.plot.over.style.cursor = near === null ? "" : "pointer";
    if (idx === null) return;
    const rows = readings(this.laid, idx);
    this.reading.replaceChildren(
      make("b", {}, placed(this.view.axisName, this.laid.x[idx])), ...this.chart.curves.map(({ name }) => make("b", {}, name)),
      ...rows.flatMap(([name, rank, values]) => [
        make("span", { class: rank < 0 ? "" : `sr-tag sr-c${rank % RANK_COLOURS.length}${rank === near ? " sr-near" : ""}` }, name),
        ...values.map((value) => make("span", { class: rank === near && rank >= 0 ? "sr-near" : false }, value))]));
    this.reading.style.gridTemplateColumns = `repeat(${1 + this.chart.curves.length}, auto)`;
  }

  // Return the rank whose line is nearest to the cursor; null if none is near.
  nearest() {
    const { idx, top } = this.plot.cursor;
    let found = null, least = NEAR;
    this.plot.series.forEach(({ rank }, at) => {
      const value = rank === undefined ? null : this.plot.data[at][idx];
      const far = value == null ? Infinity : Math.abs(this.plot.valToPos(value, "y") - top);
      if (far < least) [found, least] = [rank, far];
    });
    return found;
  }

  // A click on the line of a rank selects the rank, as a click on the rank's lane does. After a drag, uPlot suppresses the click.
  choose(event) {
    const rank = this.plot.cursor.idx == null ? null : this.nearest();
    if (rank !== null) this.view.panel.ranks.toggle(rank, event, this.view.panel.tab);
  }

  takeValues() {
    const text = csv(this.chart, this.told);
    this.take(() => navigator.clipboard.writeText(text), () => new Blob([text], { type: "text/csv" }), "csv");
  }

  takePicture() {
    const picture = this.picture();
    this.take(() => navigator.clipboard.write([new ClipboardItem({ "image/png": picture })]), () => picture, "png");
  }

  // Copy something. If this page is not allowed to write to the clipboard, save a file instead.
  async take(copy, blob, ending) {
    const { panel } = this.view;
    try {
      await copy();
      panel.say("copied");
    } catch (error) {
      download(await blob(), `${panel.run.id} ${this.name()}.${ending}`.replace(/[^\w.-]+/g, "-"));
      panel.say("saved as a file, because this page cannot use the clipboard");
    }
  }

  // Return a promise of a PNG with the caption and the chart.
  picture() {
    const { canvas } = this.plot.ctx, ratio = devicePixelRatio, left = this.plot.bbox.left, line = 18 * ratio;
    const captions = [...this.caption.children], top = captions.length * line + 6 * ratio;
    const whole = make("canvas", { width: canvas.width, height: canvas.height + top }), ctx = whole.getContext("2d");
    ctx.fillStyle = this.view.ground;
    ctx.fillRect(0, 0, whole.width, whole.height);
    ctx.textBaseline = "middle";
    captions.forEach(({ firstChild, textContent }, at) => {
      const name = firstChild.textContent, y = (at + 0.6) * line;
      const write = (text, x, weight, colour) => {
        ctx.font = `${weight} ${12 * ratio}px system-ui, sans-serif`;
        ctx.fillStyle = colour;
        ctx.fillText(text, x, y);
        return x + ctx.measureText(text).width;
      };
      write(textContent.slice(name.length), write(name, left, 600, getComputedStyle(firstChild).color), 400, this.view.colour);
    });
    ctx.drawImage(canvas, 0, top);
    return new Promise((done) => whole.toBlob(done, "image/png"));
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
