// Makes two things from the curves of views/charts.py: the data that uPlot draws, and the values shown at the cursor.

import { number } from "./words.js";

// The same colours as markup.RANK_COLOURS, and as .sr-c0 … in panel.css.
export const RANK_COLOURS = ["#2f80d0", "#23935a", "#b97a10", "#9262d6", "#d0528f", "#16908f", "#7d8a1e", "#cf6a32"];

const ITEM_COLOURS = [RANK_COLOURS[0], RANK_COLOURS[2]]; // as charts.COLOURS
const DASHES = [4, 3], DOTS = [1, 2];
const BAND_OPACITY = "2e"; // two hexadecimal digits, which are appended to a colour

// Return what uPlot needs to draw one chart: `data`, the columns, beginning with `x`; `series`, how each column looks; and
// `bands`, the areas between the lowest and the highest values. The means are the last columns, so that they are drawn on
// top.
export function plotted({ x, curves }) {
  const data = [x], series = [{}], bands = [];
  const add = (column, looks) => {
    data.push(column);
    series.push({ spanGaps: true, points: { show: false }, ...looks });
    return data.length - 1;
  };
  for (const { colour, low, high } of curves) {
    if (!low) continue;
    const above = add(high, { width: 0 }), below = add(low, { width: 0 });
    bands.push({ series: [above, below], fill: colour + BAND_OPACITY });
  }
  for (const { dashed, ranks } of curves) {
    for (const [rank, column] of Object.entries(ranks)) {
      add(column, { stroke: RANK_COLOURS[rank % RANK_COLOURS.length], width: 1, dash: dashed ? DASHES : undefined });
    }
  }
  for (const { colour, undone } of curves) for (const column of undone) add(column, { stroke: colour, width: 1, dash: DOTS });
  for (const { colour, dashed, mean } of curves) add(mean, { stroke: colour, width: 2, dash: dashed ? DASHES : undefined });
  return { data, series, bands };
}

// Return the curves of an item as a message of kind "charts", by the rules of views/charts.py.
export function itemCharts({ by, curves }) {
  const charts = new Map(); // the names of the metrics in each chart: a metric, and the one that validates it
  const names = Object.keys(curves).filter((name) => curves[name].length > 1);
  for (const name of names.sort((a, b) => a.startsWith("val_") - b.startsWith("val_"))) {
    const key = name.replace(/^val_/, "");
    charts.set(key, [...(charts.get(key) ?? []), name]);
  }
  return { axis: by, legend: "", restarts: [], checkpoints: [], charts: [...charts.values()].map((together) => itemChart(by, together, curves)) };
}

function itemChart(by, names, curves) {
  const values = names.map((name) => new Map(curves[name]));
  const x = [...new Set(values.flatMap((each) => [...each.keys()]))].sort((a, b) => a - b);
  const ends = names.map((name) => [curves[name][0][1], curves[name][curves[name].length - 1][1]].map(number));
  return {
    words: names.map((name, at) => `${name} by ${by}: from ${ends[at][0]} to ${ends[at][1]}`).join("; "),
    x,
    curves: names.map((name, at) => ({ name, last: ends[at][1], colour: ITEM_COLOURS[at], dashed: name.startsWith("val_"),
      mean: x.map((place) => values[at].get(place) ?? null), ranks: {}, undone: [] })),
  };
}

// Return whether a logarithmic axis can show all values of a chart.
export function isPositive({ curves }) {
  return curves.every(({ mean, low, ranks, undone }) => (
    [mean, low ?? [], ...Object.values(ranks), ...undone].every((column) => column.every((value) => value === null || value > 0))
  ));
}

// Return rows with the values of a chart's curves at the index `at` of its axis: one row for the mean, and one for each
// rank. If there is only the row for the mean, it is called "value". If there are many ranks, there are rows for the
// lowest and the highest value instead of a row for each rank. A row is a list of its name, its rank (-1 if it belongs to
// no rank) and a list with a string for each curve. If a rank reported nothing at this step, its row has the last value
// that the rank reported before.
export function readings({ curves }, at) {
  const before = (column) => {
    for (let place = at; place >= 0; place--) if (column[place] != null) return column[place];
    return null;
  };
  const told = (value) => (value == null ? "" : number(value));
  const rows = [["mean", -1, curves.map(({ mean }) => told(before(mean)))]];
  const ranks = new Set(curves.flatMap(({ ranks }) => Object.keys(ranks).map(Number)));
  for (const rank of [...ranks].sort((a, b) => a - b)) {
    rows.push([`rank ${rank}`, rank, curves.map(({ ranks }) => told(ranks[rank] && before(ranks[rank])))]);
  }
  for (const [name, bound, whose] of [["lowest", "low", "lowest"], ["highest", "high", "highest"]]) {
    if (!curves.some((curve) => curve[bound])) continue;
    rows.push([name, -1, curves.map((curve) => (
      curve[bound] && before(curve[bound]) !== null ? `${told(before(curve[bound]))} (rank ${before(curve[whose])})` : ""
    ))]);
  }
  if (rows.length === 1) rows[0][0] = "value";
  return rows;
}
