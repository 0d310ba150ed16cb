// Prepares the curves of views/charts.py for uPlot, and computes the values at the cursor and the CSV text.

import { CURVE_COLOURS, DASHED, RANK_COLOURS } from "./constants.js";
import { number, ticking } from "./words.js";

// The weight of the earlier values in each value. Without smoothing, the weight is 0.
export const SMOOTHING = { off: 0, light: 0.6, strong: 0.9 };

const DASHES = [4, 3], DOTS = [1, 2];
const BAND_OPACITY = "2e", FAINT_BAND_OPACITY = "12", EDGE_OPACITY = "80"; // two hexadecimal digits, which are appended to a colour
const FAINT = 0.35; // the opacity of values that only the faster ranks have reported; also in views/figure.py
const UNCHOSEN = 0.2; // the opacity of ranks that are not selected while others are

// ── Messages ──────────────────────────────────────────────────────────────────

// Return the message `told` with all points. charts.since() has left out the points that the message `old` has. A page that
// has just been loaded may lack these points. In this case, return `old`, because the kernel is about to send everything.
export function joined(old, told) {
  try {
    return whole(old, told);
  } catch (error) {
    return old;
  }
}

function whole(old, told) {
  if (told === null || typeof told !== "object") return told;
  if (Array.isArray(told)) return typeof told[0] === "object" ? told.map((each, at) => whole(old?.[at], each)) : told;
  if (!("then" in told)) return Object.fromEntries(Object.entries(told).map(([key, value]) => [key, whole(old?.[key], value)]));
  if (!(old?.length >= told.from)) throw new RangeError("the beginning is missing");
  return [...old.slice(0, told.from), ...told.then];
}

// ── The horizontal axis ───────────────────────────────────────────────────────

// Return the names of the quantities that the horizontal axis can show.
export function axesOf({ axis, axes, charts }) {
  return [...new Set([axis, ...Object.keys(axes), ...(charts.every(({ time }) => time && time[time.length - 1] > time[0]) ? ["time"] : [])])];
}

// Return a position in words, such as "step 61", "61 steps in total" or "1 min 01 s".
export function placed(axis, x) {
  return axis === "time" ? ticking(x) : ["step", "epoch", "batch"].includes(axis) ? `${axis} ${number(x)}` : `${number(x)} ${axis}`;
}

// Return a chart with its positions on `axis`. Steps that a restart has undone become positions of the same axis, and
// their curves become columns.
export function laid(chart, { axes }, axis) {
  const [offset, factor] = axes[axis] ?? [0, 1];
  const along = ({ x, time }) => (axis === "time" ? time : factor === 1 && !offset ? x : x.map((each) => offset + factor * each));
  const mine = along(chart), undone = chart.curves.flatMap(({ undone, ghost }) => (ghost ? [...undone, ghost] : undone));
  const moved = (x) => (axis === "time" ? between(chart.x, chart.time, x) : offset + factor * x);
  const x = undone.length ? [...new Set([...mine, ...undone.flatMap(along)])].sort((a, b) => a - b) : mine;
  const wide = (column, places = mine) => {
    if (!undone.length || !column) return column;
    const values = new Map(places.map((place, at) => [place, column[at]]));
    return x.map((place) => values.get(place) ?? null);
  };
  const curves = chart.curves.map((curve) => ({
    ...curve, mean: wide(curve.mean), low: wide(curve.low), high: wide(curve.high), lowest: wide(curve.lowest), highest: wide(curve.highest),
    ranks: Object.fromEntries(Object.entries(curve.ranks).map(([rank, column]) => [rank, wide(column)])),
    undone: curve.undone.map((part) => wide(part.mean, along(part))),
    ghost: curve.ghost && wide(curve.ghost.mean, along(curve.ghost)),
    until: lastUpTo(x, curve.until === undefined ? mine[mine.length - 1] : moved(curve.until)),
    best: curve.best && { ...curve.best, x: moved(curve.best.x) },
  }));
  return { x, curves, moved };
}

// Return the index of the last position that is not greater than `place`.
const lastUpTo = (x, place) => x.findLastIndex((other) => other <= place);

// Return the time of a position, interpolated between two points.
function between(x, time, place) {
  const at = lastUpTo(x, place);
  if (at < 0) return time[0];
  if (at >= x.length - 1 || x[at] === place) return time[Math.min(at, x.length - 1)];
  return time[at] + (time[at + 1] - time[at]) * (place - x[at]) / (x[at + 1] - x[at]);
}

// ── What is drawn ─────────────────────────────────────────────────────────────

// Return the exponential moving average of a column. `weight` is the weight of the earlier values. Nulls and texts stay as they are. The
// first averages are corrected for the missing earlier values, so that the average does not start at zero.
export function smoothed(column, weight) {
  if (!weight) return column;
  let sum = 0, share = 1;
  return column.map((value) => {
    if (typeof value !== "number") return value;
    share *= weight;
    sum = weight * sum + (1 - weight) * value;
    return sum / (1 - share);
  });
}

// Return a column that has values only at the indices from `from` to `to`.
function part(column, from, to) {
  return from === 0 && to >= column.length ? column : column.map((value, at) => (at < from || at > to ? null : value));
}

// Return what uPlot needs to draw a chart that is laid(). `data` holds the columns; the first column is `x`. `series` holds the
// looks of each column. `bands` holds the areas between the lowest and the highest values. The means are the last columns, so
// that they are drawn on top. Values that only the faster ranks have reported are faint. If ranks are `chosen`, the other
// ranks are faint, too.
export function plotted({ x, curves }, { smoothing = 0, chosen = new Set() } = {}) {
  const data = [x], series = [{}], bands = [];
  // A line spans positions without a report, and has gaps where values are not finite. uPlot wants undefined and null for these.
  const add = (column, looks) => {
    const spanGaps = !column.some((value) => typeof value === "string");
    data.push(spanGaps ? column : column.map((value) => (value === null ? undefined : typeof value === "string" ? null : value)));
    series.push({ spanGaps, points: { show: false }, alpha: 1, ...looks });
    return data.length - 1;
  };
  const addBoth = (column, until, looks) => {
    if (until >= x.length - 1) return add(column, looks);
    const beyond = part(column, until, x.length);
    if (beyond.findLastIndex((value) => value !== null) <= until) return add(column, looks);
    add(beyond, { ...looks, alpha: FAINT * (looks.alpha ?? 1) });
    return add(part(column, 0, until), looks);
  };
  for (const { colour, low, high, until, mean } of curves) {
    if (!low) continue;
    const edge = { stroke: colour + EDGE_OPACITY, width: mean.some((value) => typeof value === "string") ? 1 : 0 };
    const area = (from, to, opacity) => {
      bands.push({ series: [high, low].map((column) => add(part(column, from, to), edge)), fill: colour + opacity });
    };
    area(0, until, BAND_OPACITY);
    if (until < x.length - 1) area(until, x.length, FAINT_BAND_OPACITY);
  }
  const lines = curves.flatMap(({ dashed, ranks, until }) => Object.entries(ranks).map(([rank, column]) => ({ rank: Number(rank), column, dashed, until })));
  const some = lines.some(({ rank }) => chosen.has(rank));
  lines.sort((a, b) => chosen.has(a.rank) - chosen.has(b.rank)); // the selected ranks are drawn above the others
  for (const { rank, column, dashed, until } of lines) {
    addBoth(smoothed(column, smoothing), until, { stroke: RANK_COLOURS[rank % RANK_COLOURS.length], rank, dash: dashed ? DASHES : undefined,
      width: some && chosen.has(rank) ? 2.5 : 1, alpha: some && !chosen.has(rank) ? UNCHOSEN : 1 });
  }
  for (const { colour, dashed, ghost } of curves) {
    if (ghost) add(ghost, { stroke: colour, width: 1.5, alpha: FAINT, dash: dashed ? DASHES : undefined });
  }
  for (const { colour, undone } of curves) for (const column of undone) add(column, { stroke: colour, width: 1, dash: DOTS });
  if (smoothing) for (const { colour, mean } of curves) add(mean, { stroke: colour, width: 1, alpha: FAINT });
  for (const { colour, dashed, mean, until } of curves) {
    addBoth(smoothed(mean, smoothing), until, { stroke: colour, width: some ? 1.5 : 2, dash: dashed ? DASHES : undefined });
  }
  return { data, series, bands };
}

// Return the curves of an item as a message of kind "charts", by the rules of views/charts.py.
export function itemCharts({ by, curves }) {
  const charts = new Map(); // the names of the metrics in each chart: a metric, and its validation metric
  const names = Object.keys(curves).filter((name) => curves[name].length > 1);
  for (const name of names.sort((a, b) => a.startsWith("val_") - b.startsWith("val_"))) {
    const key = name.replace(/^val_/, "");
    charts.set(key, [...(charts.get(key) ?? []), name]);
  }
  return { axis: by, axes: {}, legend: names.some((name) => name.startsWith("val_")) ? DASHED : "", restarts: [], checkpoints: [], charts: [...charts.values()].map((together) => itemChart(by, together, curves)) };
}

function itemChart(by, names, curves) {
  const values = names.map((name) => new Map(curves[name]));
  const x = [...new Set(values.flatMap((each) => [...each.keys()]))].sort((a, b) => a - b);
  const ends = names.map((name) => [curves[name][0][1], curves[name][curves[name].length - 1][1]].map(number));
  return {
    words: names.map((name, at) => `${name} by ${by}: from ${ends[at][0]} to ${ends[at][1]}`).join("; "),
    x,
    curves: names.map((name, at) => ({ name, last: ends[at][1], colour: CURVE_COLOURS[at], dashed: name.startsWith("val_"),
      mean: x.map((place) => values[at].get(place) ?? null), ranks: {}, undone: [] })),
  };
}

// Return whether a logarithmic axis can show all values of a chart that is laid().
export function isPositive({ curves }) {
  return curves.every(({ mean, low, ranks, undone, ghost }) => (
    [mean, low ?? [], ghost ?? [], ...Object.values(ranks), ...undone].every((column) => column.every((value) => typeof value !== "number" || value > 0))
  ));
}

// ── Values ────────────────────────────────────────────────────────────────────

// Return rows with the values of a laid() chart's curves at the index `at` of its axis: one row for the mean, and one
// for each rank. If there is only the mean, the row is called "value". If there are many ranks, there are rows for the
// lowest and the highest value instead of a row for each rank. A row is a list of its name, its rank (-1 if it belongs to
// no rank) and a list with a string for each curve. If a rank reported nothing at this step, its row has the last value
// that the rank reported before, unless only the faster ranks have reached the step.
export function readings({ curves }, at) {
  const before = (column, until = Infinity) => {
    for (let place = at; place >= 0 && (at <= until || place > until); place--) if (column[place] != null) return column[place];
    return null;
  };
  const told = (value) => (typeof value === "number" ? number(value) : value ?? "");
  const rows = [["mean", -1, curves.map(({ mean, until }) => told(before(mean, until)))]];
  const ranks = new Set(curves.flatMap(({ ranks }) => Object.keys(ranks).map(Number)));
  for (const rank of [...ranks].sort((a, b) => a - b)) {
    rows.push([`rank ${rank}`, rank, curves.map(({ ranks, until }) => told(ranks[rank] && before(ranks[rank], until)))]);
  }
  for (const [name, bound, whose] of [["lowest", "low", "lowest"], ["highest", "high", "highest"]]) {
    if (!curves.some((curve) => curve[bound])) continue;
    rows.push([name, -1, curves.map((curve) => {
      const value = curve[bound] && before(curve[bound], curve.until);
      return value == null ? "" : `${told(value)} (rank ${before(curve[whose], curve.until)})`;
    })]);
  }
  if (rows.length === 1) rows[0][0] = "value";
  if (curves.some(({ ghost }) => ghost)) rows.push(["last run", -1, curves.map(({ ghost }) => told(ghost && before(ghost)))]);
  return rows;
}

// Return the values of a chart as CSV. There is a column for the position on each axis, and then, for every curve, columns
// for the mean and each rank. Steps that a restart has undone are left out.
export function csv(chart, told) {
  const columns = axesOf(told).map((axis) => [axis === "time" ? "seconds" : axis, axis === "time" ? chart.time : laid({ ...chart, curves: [] }, told, axis).x]);
  for (const { name, mean, ranks, low, high } of chart.curves) {
    columns.push([name, mean], ...Object.entries(ranks).map(([rank, column]) => [`${name} rank ${rank}`, column]));
    if (low) columns.push([`${name} lowest`, low], [`${name} highest`, high]);
  }
  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const rows = chart.x.map((_, at) => columns.map(([, column]) => column[at] ?? "").join(","));
  return [columns.map(([name]) => quoted(name)).join(","), ...rows].join("\n") + "\n";
}
