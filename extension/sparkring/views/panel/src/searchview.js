// The Search tab: all curves of the metric, the best value so far, the parameters as parallel coordinates, and how much
// each parameter matters.

import { AMBER, BLUE, CURVES_SHOWN, GREEN, GREY, METRICS_SHOWN, RED, SCALE, SLICES, TRIAL_KINDS, TRIALS_LEGEND } from "./constants.js";
import { button, fillPairs, make, put, toggle } from "./elements.js";
import { beside } from "./plot.js";
import { bests, bounds, brushed, curvesExtent, extent, finalValues, marks, moved, place, roundNumbers, scale, trialsOf, valueAt } from "./search.js";
import { number, plural } from "./words.js";

const HEIGHT = 170, AXES_HEIGHT = 210, SLICE_HEIGHT = 130; // px
const LEFT = 62, RIGHT = 8, TOP = 8, BOTTOM = 30; // px around a chart, for its labels
const ENDS = 62; // px beside the first and the last of the parallel axes
const NEAR = 12; // px: the pointer points at a line or an axis if it is at most this far away

// What the pointer and the keyboard do in drawings of trials or items. `chosen` has the numbers of those that can be reached.
class Pointed {
  constructor(panel) {
    this.panel = panel;
    this.chosen = [];
    this.hovered = null; // the number of the trial under the pointer, or selected with the keyboard
    this.pointed = null; // [drawing under the pointer, point in it]; the point is null for the trial's last point. null if no trial is hovered
    this.reading = make("div", { class: "sr-reading", hidden: true });
  }

  hover(drawing, event) {
    const point = drawing.at(event);
    this.point(event.type === "pointerleave" || event.buttons ? null : drawing.nearest(point), drawing, point);
  }

  point(item, drawing, point) {
    this.pointed = item === null ? null : [drawing, point];
    if (item === this.hovered) return;
    this.hovered = item;
    this.panel.schedule();
  }

  // Move from one chosen trial to another with the keyboard. Enter shows the trial in the Items tab.
  walk(drawing, event) {
    if (event.target !== drawing.element) return;
    const there = this.chosen.filter((item) => drawing.pointOf(item)), at = there.indexOf(this.hovered);
    const to = { ArrowRight: at + 1, ArrowLeft: at < 0 ? there.length - 1 : at - 1, Home: 0, End: there.length - 1 }[event.key];
    if (event.key === "Enter" && at >= 0) this.open(this.hovered);
    else if (event.key === "Escape") this.point(null);
    else if (to === undefined || !there.length) return;
    else this.point(there[Math.min(Math.max(to, 0), there.length - 1)], drawing, null);
    event.preventDefault();
  }

  // Show the trial beside the pointer, or beside its last point.
  read(trials, metric) {
    const trial = trials.find(({ item }) => item === this.hovered);
    const [drawing, pointed] = this.pointed ?? [], point = pointed ?? drawing?.pointOf(this.hovered);
    this.reading.hidden = !trial || !point;
    if (this.reading.hidden) return;
    const [left, top] = point;
    const values = [[metric, trial.value], ...Object.entries(trial.parameters)];
    fillPairs(this.reading, [[this.panel.run.state.pooled, `${trial.item} ${trial.state}`], ...values.map(([name, value]) => [name, written(value)])]);
    const whole = this.element.getBoundingClientRect(), canvas = drawing.canvas.getBoundingClientRect();
    beside(this.reading, canvas.left - whole.left + left, whole.width, 12);
    this.reading.style.top = `${canvas.top - whole.top + Math.max(0, top - 20)}px`;
  }

  open(item) {
    if (item === null) return;
    this.panel.select("items");
    this.panel.items.show(item);
  }
}

export class SearchView extends Pointed {
  constructor(panel) {
    super(panel);
    this.brushes = new Map(); // the lower and the upper end of the range that is chosen on an axis, by the number of the axis
    this.log = false;
    this.logButton = toggle("log scale", "use a logarithmic scale for the metric", false, (on) => {
      this.log = on;
      this.panel.schedule();
    });
    this.count = make("span", { class: "sr-count", role: "status" });
    this.reset = button("sr-tool", "reset", "choose all trials again", () => this.showAll(), { hidden: true });
    this.curves = new Drawing("Curves of all trials", HEIGHT, this);
    this.history = new Drawing("Best value so far", HEIGHT, this);
    this.axes = new Drawing("Parameters of all trials", AXES_HEIGHT, this);
    this.axes.canvas.addEventListener("pointerdown", (event) => this.brush(event));
    this.thumbs = []; // the two ends of the brush on each axis; the user can move them with keys and with the pointer
    this.ends = make("div", { role: "group", "aria-label": "Ranges of the parameters" });
    this.axes.place.append(this.ends);
    this.hint = make("small", {}, "drag along an axis to choose trials");
    this.legend = make("small", {}, TRIALS_LEGEND);
    this.shares = make("div", { class: "sr-shares" });
    this.best = make("code");
    this.card = make("div", { class: "sr-best", hidden: true }, make("b", {}, "best trial"), this.best,
      button("sr-tool", "copy", "copy the parameters of the best trial as Python code", () => panel.copy(panel.run.search.best)));
    this.slices = [];
    this.sliced = make("div", { class: "sr-searchgrid" });
    this.element = make("div", { class: "sr-search" },
      make("div", { class: "sr-chartbar", role: "toolbar", "aria-label": "Search" }, this.logButton, this.hint, this.count, this.reset,
        make("span", { class: "sr-spring" }), this.legend),
      this.card, this.shares, make("div", { class: "sr-searchgrid" }, this.curves.element, this.history.element), this.axes.element, this.sliced, this.reading);
  }

  showAll() {
    this.choose(new Map());
    this.logButton.focus(); // "reset" will be hidden; without this line, the page would get the focus
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
    this.chosen = brushed(trials, this.dimensions, this.brushes).map(({ item }) => item);
    const chosen = new Set(this.chosen);
    const steps = bests(trials, search.mode), best = steps.at(-1)?.[1];
    const drawn = trials.map((trial) => ({ ...trial, look: this.look(trial, trial === best, chosen.has(trial.item)) }))
      .sort((one, other) => one.look.order - other.look.order);
    put(this.count, this.brushes.size ? `${chosen.size} of ${trials.length} trials` : "");
    this.reset.hidden = !this.brushes.size;
    this.colour = colour;
    this.drawCurves(search, drawn);
    this.drawHistory(search, drawn, steps);
    this.drawAxes(search, drawn);
    this.drawSlices(search, drawn.filter(({ whole }) => whole));
    this.drawShares(search);
    this.card.hidden = !search.best;
    put(this.best, search.best);
    this.read(trials, search.metric);
  }

  // Return the look of a trial: its colour, opacity and width, and its position in the order of drawing.
  look({ item, whole, state }, isBest, isChosen) {
    const kind = isBest ? "best" : whole ? "finished" : state === "running" ? "running" : "pruned", [, colour] = TRIAL_KINDS[kind];
    if (item === this.hovered) return { colour, alpha: 1, dots: 1, width: 3, order: Infinity };
    // Dots can be more opaque than lines, because they are small and seldom overlap.
    const order = Object.keys(TRIAL_KINDS).indexOf(kind), width = isBest ? 2.2 : 1.2;
    if (!isChosen) return { colour, alpha: 0.07, dots: 0.15, width, order };
    return { colour, alpha: isBest ? 1 : kind === "pruned" ? 0.45 : 0.6, dots: 1, width, order };
  }

  // Return the axes of the parallel coordinates: an axis for each parameter, and the metric's axis last.
  axesOf(search, trials) {
    const axes = search.parameters.map((parameter) => ({ name: parameter.name, marks: marks(parameter), range: parameter,
      at: (trial) => place(parameter, trial.parameters[parameter.name]) }));
    const [low, high] = extent(finalValues(trials), search.mode);
    const log = this.log && low > 0, metric = { low, high, log, choices: [] };
    const inside = (value) => Math.min(1, Math.max(0, place(metric, value)));
    return [...axes, { name: search.metric, marks: marks(metric), range: metric, at: ({ value }) => inside(value) }];
  }

  drawCurves(search, trials) {
    const points = trials.flatMap(({ curve }) => curve), chart = this.curves;
    chart.element.hidden = trials.every(({ curve }) => curve.length < 2);
    if (chart.element.hidden) return;
    const [first, last] = bounds(points.map(([x]) => x));
    const plane = chart.plane([first, Math.max(last, first + 1)], curvesExtent(trials.map(({ curve }) => curve.map(([, y]) => y))), this.log);
    chart.title(search.metric, "step or epoch");
    chart.lines(trials, ({ curve }) => curve.map(([x, y]) => plane(x, y)));
  }

  // Draw the trials that have finished. The last values of the others are no final ones.
  drawHistory(search, all, steps) {
    const chart = this.history, trials = all.filter(({ whole }) => whole);
    chart.element.hidden = !trials.length;
    if (!trials.length) return;
    const [low, high] = extent(finalValues(trials), search.mode), [, last] = bounds(all.map(({ item }) => item));
    const plane = chart.plane([0, Math.max(1, last)], [low, high], this.log);
    chart.title(`best ${search.metric}`, "trial");
    chart.dots(trials, ({ item, value }) => plane(item, Math.min(high, Math.max(low, value))));
    const stairs = [...steps, [last, steps.at(-1)?.[1]]].flatMap(([item, best], at) => [steps[at - 1]?.[1] ?? best, best].filter(Boolean)
      .map(({ value }) => plane(item, value)));
    chart.line(stairs, { colour: AMBER, alpha: 1, width: 1.6 });
  }

  // Return the trials, coloured by their values. The best one keeps its colour.
  coloured(search, trials) {
    const { at } = this.dimensions.at(-1), good = (trial) => (search.mode === "min" ? 1 - at(trial) : at(trial));
    return trials.map((trial) => (trial.look.colour === AMBER ? trial : { ...trial, look: { ...trial.look, colour: scale(good(trial)) } }));
  }

  // Draw the values over each parameter.
  drawSlices(search, trials) {
    const parameters = trials.length ? search.parameters.slice(0, SLICES) : [];
    while (this.slices.length < parameters.length) this.slices.push(new Drawing("Values by parameter", SLICE_HEIGHT, this));
    if (this.sliced.childElementCount !== parameters.length) this.sliced.replaceChildren(...parameters.map((_, at) => this.slices[at].element));
    const [low, high] = extent(finalValues(trials), search.mode), coloured = this.coloured(search, trials);
    parameters.forEach((parameter, at) => {
      const chart = this.slices[at], plane = chart.plane([-0.05, 1.05], [low, high], this.log, marks(parameter));
      chart.element.setAttribute("aria-label", `${search.metric} by ${parameter.name}`);
      chart.title(`${search.metric} by ${parameter.name}`, "");
      const placed = coloured.filter(({ parameters: values }) => place(parameter, values[parameter.name]) !== null);
      chart.dots(placed, ({ parameters: values, value }) => plane(place(parameter, values[parameter.name]), Math.min(high, Math.max(low, value))));
    });
  }

  drawAxes(search, trials) {
    const chart = this.axes, axes = this.dimensions, width = chart.begin(), { colour } = this;
    const x = (axis) => ENDS + (axis * (width - 2 * ENDS)) / Math.max(1, axes.length - 1);
    const y = (share) => TOP + 24 + (1 - share) * (AXES_HEIGHT - TOP - 44);
    const apart = axes.length > 1 ? x(1) - x(0) : width;
    this.place = { x, y };
    chart.title(`parameters, coloured by ${search.metric}: ${SCALE}`, "");
    chart.lines(this.coloured(search, trials), (trial) => axes.map(({ at }, axis) => [x(axis), at(trial)]).filter(([, share]) => share !== null)
      .map(([left, share]) => [left, y(share)]));
    axes.forEach(({ name, marks: labels }, axis) => {
      const isLast = axis === axes.length - 1, most = isLast || !axis ? ENDS - 5 : apart / 2;
      chart.line([[x(axis), y(0)], [x(axis), y(1)]], { colour, alpha: 0.6, width: 1 });
      chart.text(name, x(axis), y(1) - 17, { align: "center", bold: true, most: Math.min(apart, 2 * ENDS) - 6 });
      for (const [share, value] of labels) {
        chart.text(written(value), x(axis) + (isLast ? 5 : -5), y(share), { align: isLast ? "left" : "right", most, halo: true });
      }
      const brush = this.brushes.get(axis);
      if (brush) chart.box(x(axis) - 6, y(brush[1]), 12, y(brush[0]) - y(brush[1]));
    });
    this.drawThumbs();
  }

  // Put two sliders on each axis, for the lower and the upper end of the brush.
  drawThumbs() {
    const { x, y } = this.place, axes = this.dimensions;
    const names = JSON.stringify(axes.map(({ name }) => name));
    if (names !== this.thumbsOf) {
      this.thumbsOf = names;
      this.thumbs = axes.flatMap(({ name }, axis) => ["lowest", "highest"].map((which, end) => make("div", { class: `sr-thumb sr-${which}`,
        role: "slider", tabindex: "0", "aria-orientation": "vertical", "aria-label": `${which} ${name}`,
        onkeydown: (event) => this.press(event, axis, end), onpointerdown: (event) => this.brush(event, axis, end) })));
      this.ends.replaceChildren(...this.thumbs);
    }
    this.thumbs.forEach((thumb, at) => {
      const axis = Math.floor(at / 2), end = at % 2, { range } = axes[axis];
      const brush = this.brushOf(axis), percent = (share) => String(Math.round(100 * share));
      thumb.hidden = range.choices.length === 1 || (!range.choices.length && range.low === range.high);
      thumb.style.left = `${x(axis)}px`;
      thumb.style.top = `${y(brush[end])}px`;
      Object.assign(thumb, { ariaValueMin: percent(end ? brush[0] : 0), ariaValueMax: percent(end ? 1 : brush[1]),
        ariaValueNow: percent(brush[end]), ariaValueText: written(valueAt(range, brush[end])) });
    });
  }

  brushOf(axis) {
    return this.brushes.get(axis) ?? [0, 1];
  }

  // Choose the trials between two positions on an axis. If these are the ends of the axis, choose all trials.
  setBrush(axis, [from, to]) {
    const brushes = new Map(this.brushes);
    if (from <= 0 && to >= 1) brushes.delete(axis);
    else brushes.set(axis, [from, to]);
    this.choose(brushes);
  }

  // The Escape key removes the brush from an axis.
  press(event, axis, end) {
    const brush = this.brushOf(axis), limits = end ? [brush[0], 1] : [0, brush[1]];
    const to = moved(this.dimensions[axis].range, brush[end], event.key, limits);
    if (event.key === "Escape") this.setBrush(axis, [0, 1]);
    else if (to === null) return;
    else this.setBrush(axis, end ? [brush[0], to] : [to, brush[1]]);
    event.preventDefault();
  }

  drawShares(search) {
    this.shares.hidden = !search.importance.length;
    if (search === this.sharesDrawn) return;
    this.sharesDrawn = search;
    this.shares.replaceChildren(make("b", {}, `Importance of the parameters ${search.basis}`), ...search.importance.flatMap(([name, share, words]) => [
      make("span", {}, name), make("div", { class: "sr-bar" }, make("div", { style: `width: ${100 * share}%` })),
      make("span", { class: "sr-n" }, words)]));
  }

  // Choose trials by dragging along an axis, or by dragging one end of its brush. A click on an axis removes the brush.
  brush(event, axis = this.axisAt(event), end = null) {
    if (axis < 0) return;
    const { y } = this.place, canvas = this.axes.canvas;
    const share = (moved) => Math.min(1, Math.max(0, (this.axes.at(moved)[1] - y(0)) / (y(1) - y(0))));
    const from = end === null ? share(event) : this.brushOf(axis)[1 - end];
    canvas.setPointerCapture(event.pointerId);
    const move = (moved) => {
      const to = share(moved);
      const isClick = end === null && Math.abs(to - from) < 0.02;
      this.setBrush(axis, isClick ? [0, 1] : [Math.min(from, to), Math.max(from, to)]);
    };
    const last = (moved) => {
      if (end === null) move(moved);
      canvas.removeEventListener("pointermove", move);
    };
    canvas.addEventListener("pointermove", move);
    canvas.addEventListener("pointerup", last, { once: true });
    event.preventDefault();
  }

  // Return the number of the axis under the pointer; -1 if there is none.
  axisAt(event) {
    const [left] = this.axes.at(event);
    return this.dimensions?.findIndex((_, at) => Math.abs(this.place.x(at) - left) < NEAR) ?? -1;
  }
}

// The curves of the items, a drawing for each metric. It is part of the Metrics tab.
export class ItemCurves extends Pointed {
  constructor(panel) {
    super(panel);
    this.drawings = [];
    this.grid = make("div", { class: "sr-searchgrid" });
    this.legend = make("small");
    this.element = make("div", { class: "sr-search", hidden: true }, this.legend, this.grid, this.reading);
  }

  draw() {
    const { items } = this.panel.run, rows = [...items.rows.values()].slice(-CURVES_SHOWN);
    const metrics = items.names.metrics.filter((name) => rows.some(({ curves }) => curves[name]?.length > 1)).slice(0, METRICS_SHOWN);
    this.element.hidden = !metrics.length;
    const signature = String([items.changes, this.element.clientWidth, getComputedStyle(this.element).color, this.hovered, this.pointed]);
    if (this.element.hidden || signature === this.drawn) return;
    this.drawn = signature;
    this.colour = getComputedStyle(this.element).color;
    this.chosen = rows.map(({ item }) => item);
    put(this.legend, `${items.noun === "trial" ? "grey: pruned · " : ""}blue: finished · green: running · red: failed`);
    while (this.drawings.length < metrics.length) this.drawings.push(new Drawing("", HEIGHT, this));
    if (this.grid.childElementCount !== metrics.length) this.grid.replaceChildren(...metrics.map((_, at) => this.drawings[at].element));
    metrics.forEach((metric, at) => {
      const chart = this.drawings[at], curved = rows.filter(({ curves }) => curves[metric]?.length);
      const [first, last] = bounds(curved.flatMap(({ curves }) => curves[metric].map(([x]) => x)));
      const plane = chart.plane([first, Math.max(last, first + 1)], curvesExtent(curved.map(({ curves }) => curves[metric].map(([, y]) => y))), false);
      chart.element.setAttribute("aria-label", `${metric} of the ${plural(items.noun)}`);
      chart.title(metric, curved[0].by);
      const looks = curved.map((row) => ({ ...row, look: { colour: { failed: RED, running: GREEN, pruned: GREY }[row.state] ?? BLUE, alpha: row.item === this.hovered ? 1 : 0.6, width: row.item === this.hovered ? 3 : 1.2 } }));
      chart.lines(looks, ({ curves }) => curves[metric].map(([x, y]) => plane(x, y)));
    });
    this.read(rows.map((row) => ({ ...row, value: row.name, parameters: row.metrics })), "");
  }
}

function written(value) {
  return typeof value === "number" ? number(value) : value;
}

// A canvas with a line or a dot for each trial.
class Drawing {
  constructor(words, height, view) {
    this.height = height;
    this.view = view;
    this.caption = make("figcaption");
    this.canvas = make("canvas", { role: "img", "aria-label": words, style: `height: ${height}px` });
    this.place = make("div", { class: "sr-canvas" }, this.canvas);
    this.element = make("figure", { role: "figure", "aria-label": words, tabindex: "0" }, this.caption, this.place);
    this.element.addEventListener("keydown", (event) => view.walk(this, event));
    this.element.addEventListener("blur", () => view.point(null));
    this.paths = []; // pairs of the number of a trial and its points
    for (const type of ["pointermove", "pointerleave"]) this.canvas.addEventListener(type, (event) => view.hover(this, event));
    this.canvas.addEventListener("dblclick", (event) => view.open(this.nearest(this.at(event))));
  }

  title(text, below) {
    put(this.caption, text);
    if (below) this.text(below, (LEFT + this.width - RIGHT) / 2, this.height - 6, { align: "center" });
  }

  // Clear the canvas, and return its width.
  begin() {
    const ratio = devicePixelRatio, width = this.canvas.clientWidth;
    this.canvas.width = width * ratio;
    this.canvas.height = this.height * ratio;
    this.context = this.canvas.getContext("2d");
    this.context.scale(ratio, ratio);
    const paper = getComputedStyle(this.canvas).getPropertyValue("--jp-layout-color0").trim() || "Canvas";
    Object.assign(this, { width, paper, paths: [], clip: null });
    return width;
  }

  // Clear the canvas, draw axes for these ranges, with `labels` instead of round numbers on the horizontal axis, and return a function that computes the position of a point on the canvas.
  plane([left, right], [low, high], log, labels) {
    const width = this.begin(), scaled = log && low > 0 ? Math.log10 : (value) => value;
    const across = (x) => LEFT + ((x - left) / (right - left)) * (width - LEFT - RIGHT);
    const up = (y) => this.height - BOTTOM - ((scaled(y) - scaled(low)) / (scaled(high) - scaled(low))) * (this.height - TOP - BOTTOM);
    for (const at of roundNumbers(scaled(low), scaled(high), 4)) {
      const value = scaled === Math.log10 ? 10 ** at : at;
      this.line([[LEFT, up(value)], [width - RIGHT, up(value)]], { colour: "#888888", alpha: 0.2, width: 1 });
      this.text(number(value), LEFT - 6, up(value), { align: "right" });
    }
    const round = () => roundNumbers(left, right, Math.max(2, width / 70)).filter(Number.isInteger).map((at) => [at, at]);
    for (const [at, value] of labels ?? round()) {
      this.text(written(value), across(at), this.height - BOTTOM + 10, { align: "center" });
    }
    this.clip = [LEFT - 4, TOP - 4, width - LEFT - RIGHT + 8, this.height - TOP - BOTTOM + 8];
    return (x, y) => [across(x), up(scaled === Math.log10 && y <= 0 ? low : y)];
  }

  lines(trials, points) {
    for (const trial of trials) {
      const path = points(trial);
      this.paths.push([trial.item, path]);
      this.line(path, trial.look);
      if (path.length === 1) this.dot(path[0], trial.look);
    }
  }

  dots(trials, point) {
    for (const trial of trials) {
      const at = point(trial);
      this.paths.push([trial.item, [at]]);
      this.dot(at, { ...trial.look, alpha: trial.look.dots });
    }
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
    Object.assign(context, { fillStyle: this.view.colour, textAlign: align, textBaseline: "middle", globalAlpha: bold ? 1 : 0.8,
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

  // Return the last point of a trial; undefined if this drawing has no point of the trial.
  pointOf(item) {
    return this.paths.find(([each]) => each === item)?.[1].at(-1);
  }

  // Return the number of the trial whose line is nearest to a point; null if no line is near.
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

// Return the distance of a point from the line segment between two other points.
function distance(x, y, [ax, ay], [bx, by]) {
  const length = (bx - ax) ** 2 + (by - ay) ** 2;
  const share = length ? Math.min(1, Math.max(0, ((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / length)) : 0;
  return Math.hypot(x - ax - share * (bx - ax), y - ay - share * (by - ay));
}
