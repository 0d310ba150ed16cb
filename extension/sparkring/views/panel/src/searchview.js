// The Search tab: all curves of the metric, the best value so far, the parameters as parallel coordinates, and how much
// each of them matters.

import { make, put } from "./elements.js";
import { bestOf, bests, brushed, extent, marks, place, roundNumbers, trialsOf } from "./search.js";
import { number } from "./words.js";

const HEIGHT = 170, AXES_HEIGHT = 210; // px
const BLUE = "#2f80d0", GREY = "#8a8a8a", GREEN = "#23935a", AMBER = "#b97a10"; // as in markup.py
const LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 30; // px around a chart, for its labels
const ENDS = 46; // px beside the first and the last of the parallel axes
const NEAR = 12; // px: how near to a line or an axis the pointer has to be

export class SearchView {
  constructor(panel) {
    this.panel = panel;
    this.brushes = new Map(); // by the number of an axis, the lower and the upper end of what is chosen on it
    this.hovered = null; // the number of the trial under the pointer
    this.log = false;
    this.logButton = make("button", { type: "button", class: "sr-toggle", "aria-pressed": "false",
      title: "logarithmic scale of the metric", onclick: () => this.setLog(!this.log) }, "log scale");
    this.count = make("span", { class: "sr-count", role: "status" });
    this.reset = make("button", { type: "button", class: "sr-tool", hidden: true, title: "choose all trials again",
      onclick: () => this.choose(new Map()) }, "reset");
    this.curves = new Drawing("Curves of all trials", HEIGHT, this);
    this.history = new Drawing("Best value so far", HEIGHT, this);
    this.axes = new Drawing("Parameters of all trials", AXES_HEIGHT, this);
    this.axes.canvas.addEventListener("pointerdown", (event) => this.brush(event));
    this.hint = make("small", {}, "drag along an axis to choose trials");
    this.shares = make("div", { class: "sr-shares" });
    this.reading = make("div", { class: "sr-reading", hidden: true });
    this.element = make("div", { class: "sr-search" },
      make("div", { class: "sr-chartbar", role: "toolbar", "aria-label": "Search" }, this.logButton, this.hint, this.count, this.reset),
      make("div", { class: "sr-searchgrid" }, this.curves.element, this.history.element), this.axes.element, this.shares, this.reading);
  }

  setLog(on) {
    this.log = on;
    this.logButton.setAttribute("aria-pressed", String(on));
    this.panel.schedule();
  }

  choose(brushes) {
    this.brushes = brushes;
    this.panel.schedule();
  }

  draw() {
    const { search, items } = this.panel.run;
    const width = this.element.clientWidth;
    if (!search || !width) return;
    const colour = getComputedStyle(this.element).color;
    const signature = [search, items.changes, width, colour, this.log, this.brushes, this.hovered];
    if (signature.every((each, at) => each === this.drawn?.[at])) return;
    this.drawn = signature;
    const trials = trialsOf(items.rows.values(), search.metric);
    this.dimensions = this.axesOf(search, trials);
    const chosen = new Set(brushed(trials, this.dimensions, this.brushes).map(({ item }) => item));
    const best = bestOf(trials, search.mode);
    const looks = (trial) => this.looks(trial, best, chosen);
    put(this.count, this.brushes.size ? `${chosen.size} of ${trials.length} trials` : "");
    this.reset.hidden = !this.brushes.size;
    this.drawCurves(search, trials, looks, colour);
    this.drawHistory(search, trials, looks, colour);
    this.drawAxes(trials, looks, colour);
    this.drawShares(search);
    this.read(search, trials);
  }

  // How a trial is drawn: its colour, opacity and width, and whether it comes after the others, so that it is on top.
  looks(trial, best, chosen) {
    const isBest = trial === best, isHovered = trial.item === this.hovered;
    const colour = isBest ? AMBER : trial.whole ? BLUE : trial.state === "running" ? GREEN : GREY;
    const alpha = !chosen.has(trial.item) ? 0.07 : isBest || isHovered ? 1 : trial.whole || trial.state === "running" ? 0.6 : 0.35;
    return { colour, alpha: isHovered ? 1 : alpha, width: isHovered ? 3 : isBest ? 2.2 : 1.2,
             order: isHovered ? 4 : isBest ? 3 : trial.state === "running" ? 2 : trial.whole ? 1 : 0 };
  }

  // Return the axes of the parallel coordinates: one for each parameter, and the metric as the last one.
  axesOf(search, trials) {
    const axes = search.parameters.map((parameter) => ({ name: parameter.name, marks: marks(parameter),
      at: (trial) => place(parameter, trial.parameters[parameter.name]) }));
    const [low, high] = extent(trials.map(({ value }) => value), search.mode);
    const log = this.log && low > 0, metric = { low, high, log, choices: [] };
    const inside = (value) => Math.min(1, Math.max(0, place(metric, value)));
    return [...axes, { name: search.metric, marks: marks(metric), at: ({ value }) => inside(value) }];
  }

  drawCurves(search, trials, looks, colour) {
    const points = trials.flatMap(({ curve }) => curve), chart = this.curves;
    const several = trials.filter(({ curve }) => curve.length > 1).length;
    chart.element.hidden = !several;
    if (!several) return;
    const first = Math.min(...points.map(([x]) => x)), last = Math.max(...points.map(([x]) => x));
    const plane = chart.plane([first, Math.max(last, first + 1)], extent(points.map(([, y]) => y), search.mode), this.log, colour);
    chart.title(search.metric, "step or epoch");
    chart.lines(trials, looks, ({ curve }) => curve.map(([x, y]) => plane(x, y)));
  }

  drawHistory(search, trials, looks, colour) {
    const chart = this.history, steps = bests(trials, search.mode);
    chart.element.hidden = !trials.length;
    if (!trials.length) return;
    const plane = chart.plane([0, Math.max(1, trials[trials.length - 1].item)], extent(trials.map(({ value }) => value), search.mode),
      this.log, colour);
    chart.title(`best ${search.metric}`, "trial");
    chart.dots(trials, looks, ({ item, value }) => plane(item, value));
    const stairs = steps.flatMap(([item, value], at) => [...(at ? [plane(item, steps[at - 1][1])] : []), plane(item, value)]);
    chart.line(stairs, { colour: AMBER, alpha: 1, width: 1.6 });
  }

  drawAxes(trials, looks, colour) {
    const chart = this.axes, axes = this.dimensions, width = chart.begin(colour);
    const x = (axis) => ENDS + (axis * (width - 2 * ENDS)) / Math.max(1, axes.length - 1);
    const y = (share) => TOP + 22 + (1 - share) * (AXES_HEIGHT - TOP - 40);
    this.place = { x, y, width };
    chart.title("parameters", "");
    chart.lines(trials, looks, (trial) => axes.map(({ at }, axis) => [x(axis), at(trial)]).filter(([, share]) => share !== null)
      .map(([left, share]) => [left, y(share)]));
    axes.forEach(({ name, marks: labels }, axis) => {
      chart.line([[x(axis), y(0)], [x(axis), y(1)]], { colour, alpha: 0.6, width: 1 });
      chart.text(name, x(axis), y(1) - 10, { align: "center", bold: true, most: (width - 2 * ENDS) / axes.length + 20 });
      for (const [share, value] of labels) {
        const left = axis === axes.length - 1;
        chart.text(typeof value === "number" ? number(value) : value, x(axis) + (left ? 5 : -5), y(share),
          { align: left ? "left" : "right", most: ENDS - 4, halo: true });
      }
      const brush = this.brushes.get(axis);
      if (brush) chart.box(x(axis) - 6, y(brush[1]), 12, y(brush[0]) - y(brush[1]));
    });
  }

  drawShares(search) {
    const ranked = Object.entries(search.importance).sort(([, a], [, b]) => b - a);
    this.shares.hidden = !ranked.length;
    const told = JSON.stringify(ranked);
    if (told === this.sharesDrawn) return;
    this.sharesDrawn = told;
    this.shares.replaceChildren(make("b", {}, "Importance of the parameters"), ...ranked.flatMap(([name, share]) => [
      make("span", {}, name), make("div", { class: "sr-bar" }, make("div", { style: `width: ${100 * share}%` })),
      make("span", { class: "sr-n" }, `${Math.round(100 * share)} %`)]));
  }

  // Choose trials by dragging along an axis. A click on an axis removes what was chosen on it.
  brush(event) {
    if (!this.place) return;
    const { x, y } = this.place, [left, top] = this.axes.at(event);
    const axis = this.dimensions.findIndex((_, at) => Math.abs(x(at) - left) < NEAR);
    if (axis < 0) return;
    const share = (height) => Math.min(1, Math.max(0, (height - y(0)) / (y(1) - y(0))));
    const canvas = this.axes.canvas, from = share(top);
    canvas.setPointerCapture(event.pointerId);
    const move = (moved) => {
      const to = share(this.axes.at(moved)[1]), brushes = new Map(this.brushes);
      if (Math.abs(to - from) < 0.02) brushes.delete(axis);
      else brushes.set(axis, [Math.min(from, to), Math.max(from, to)]);
      this.choose(brushes);
    };
    const end = (last) => {
      move(last);
      canvas.removeEventListener("pointermove", move);
    };
    canvas.addEventListener("pointermove", move);
    canvas.addEventListener("pointerup", end, { once: true });
    event.preventDefault();
  }

  hover(drawing, event) {
    const found = event.type === "pointerleave" || event.buttons ? null : drawing.nearest(drawing.at(event));
    this.pointed = found === null ? null : [drawing, drawing.at(event)];
    if (found === this.hovered) return;
    this.hovered = found;
    this.panel.schedule();
  }

  // Show the trial under the pointer, beside it.
  read(search, trials) {
    const trial = trials.find(({ item }) => item === this.hovered);
    this.reading.hidden = !trial || !this.pointed;
    if (this.reading.hidden) return;
    const [drawing, [left, top]] = this.pointed;
    const told = [["trial", `${trial.item} ${trial.state}`], [search.metric, number(trial.value)], ...Object.entries(trial.parameters)];
    this.reading.replaceChildren(...told.flatMap(([name, value]) => [make("b", {}, name),
      make("span", {}, typeof value === "number" ? number(value) : value)]));
    const width = drawing.canvas.clientWidth, { offsetLeft, offsetTop } = drawing.canvas;
    const toLeft = left > width / 2;
    this.reading.style.left = toLeft ? "auto" : `${offsetLeft + left + 12}px`;
    this.reading.style.right = toLeft ? `${this.element.clientWidth - offsetLeft - left + 12}px` : "auto";
    this.reading.style.top = `${offsetTop + Math.max(0, top - 20)}px`;
  }

  open(drawing, event) {
    const found = drawing.nearest(drawing.at(event));
    if (found === null) return;
    this.panel.items.chosen = found;
    this.panel.select("items");
  }
}

// One canvas with lines or dots, each of a trial.
class Drawing {
  constructor(words, height, view) {
    this.words = words;
    this.height = height;
    this.caption = make("figcaption");
    this.canvas = make("canvas", { role: "img", "aria-label": words, style: `height: ${height}px` });
    this.element = make("figure", {}, this.caption, this.canvas);
    this.paths = []; // pairs of the number of a trial and its points
    for (const type of ["pointermove", "pointerleave"]) this.canvas.addEventListener(type, (event) => view.hover(this, event));
    this.canvas.addEventListener("dblclick", (event) => view.open(this, event));
  }

  title(text, below) {
    put(this.caption, text);
    if (below) this.text(below, (LEFT + this.width - RIGHT) / 2, this.height - 6, { align: "center" });
  }

  // Clear the canvas, and return its width. `colour` is that of the text around it.
  begin(colour) {
    const ratio = devicePixelRatio, width = this.canvas.clientWidth;
    this.canvas.width = width * ratio;
    this.canvas.height = this.height * ratio;
    this.context = this.canvas.getContext("2d");
    this.context.scale(ratio, ratio);
    const paper = getComputedStyle(this.canvas).getPropertyValue("--jp-layout-color0").trim() || "Canvas";
    Object.assign(this, { width, colour, paper, paths: [], clip: null });
    return width;
  }

  // Clear the canvas, draw axes for these ranges, and return the function that computes where a point is.
  plane([left, right], [low, high], log, colour) {
    const width = this.begin(colour), scaled = log && low > 0 ? Math.log10 : (value) => value;
    const across = (x) => LEFT + ((x - left) / (right - left)) * (width - LEFT - RIGHT);
    const up = (y) => this.height - BOTTOM - ((scaled(y) - scaled(low)) / (scaled(high) - scaled(low))) * (this.height - TOP - BOTTOM);
    for (const at of roundNumbers(scaled(low), scaled(high), 4)) {
      const value = scaled === Math.log10 ? 10 ** at : at;
      this.line([[LEFT, up(value)], [width - RIGHT, up(value)]], { colour: "#888888", alpha: 0.2, width: 1 });
      this.text(number(value), LEFT - 6, up(value), { align: "right" });
    }
    for (const at of roundNumbers(left, right, Math.max(2, width / 70)).filter(Number.isInteger)) {
      this.text(number(at), across(at), this.height - BOTTOM + 10, { align: "center" });
    }
    this.clip = [LEFT, TOP - 4, width - LEFT - RIGHT + 2, this.height - TOP - BOTTOM + 8];
    return (x, y) => [across(x), up(scaled === Math.log10 && y <= 0 ? low : y)];
  }

  lines(trials, looks, points) {
    this.each(trials, looks, (trial, look) => {
      const path = points(trial);
      this.paths.push([trial.item, path]);
      this.line(path, look);
      if (path.length === 1) this.dot(path[0], look);
    });
  }

  dots(trials, looks, point) {
    this.each(trials, looks, (trial, look) => {
      const at = point(trial);
      this.paths.push([trial.item, [at]]);
      this.dot(at, look);
    });
  }

  each(trials, looks, draw) {
    trials.map((trial) => [trial, looks(trial)]).sort(([, a], [, b]) => a.order - b.order).forEach(([trial, look]) => draw(trial, look));
  }

  inside(look, draw) {
    const { context } = this;
    context.save();
    if (this.clip) {
      context.beginPath();
      context.rect(...this.clip);
      context.clip();
    }
    Object.assign(context, { strokeStyle: look.colour, fillStyle: look.colour, globalAlpha: look.alpha, lineWidth: look.width, lineJoin: "round" });
    context.beginPath();
    draw(context);
    context.restore();
  }

  line(points, look) {
    this.inside(look, (context) => {
      points.forEach(([x, y]) => context.lineTo(x, y));
      context.stroke();
    });
  }

  dot([x, y], look) {
    this.inside(look, (context) => {
      context.arc(x, y, 1.2 + look.width, 0, 2 * Math.PI);
      context.fill();
    });
  }

  box(x, y, width, height) {
    this.inside({ colour: BLUE, alpha: 0.35, width: 1 }, (context) => {
      context.rect(x, y, width, height);
      context.fill();
    });
  }

  text(text, x, y, { align, bold = false, most, halo = false }) {
    const { context } = this;
    Object.assign(context, { fillStyle: this.colour, textAlign: align, textBaseline: "middle", globalAlpha: bold ? 1 : 0.8,
      font: `${bold ? "bold " : ""}11px system-ui, sans-serif` });
    let shown = String(text);
    while (most && shown.length > 2 && context.measureText(shown).width > most) shown = `${shown.slice(0, -2)}…`;
    if (halo) Object.assign(context, { strokeStyle: this.paper, lineWidth: 3, lineJoin: "round" }).strokeText(shown, x, y);
    context.fillText(shown, x, y);
    context.globalAlpha = 1;
  }

  at(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  }

  // Return the number of the trial whose line is nearest to a point; null if none is near.
  nearest([x, y]) {
    let found = null, least = NEAR;
    for (const [item, points] of this.paths) {
      for (let at = 0; at < points.length; at++) {
        const far = distance(x, y, points[at], points[at + 1] ?? points[at]);
        if (far < least) [found, least] = [item, far];
      }
    }
    return found;
  }
}

// Return the distance of a point from the line between two others.
function distance(x, y, [ax, ay], [bx, by]) {
  const length = (bx - ax) ** 2 + (by - ay) ** 2;
  const share = length ? Math.min(1, Math.max(0, ((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / length)) : 0;
  return Math.hypot(x - ax - share * (bx - ax), y - ay - share * (by - ay));
}
