// Tests what is drawn for curves, and which values are shown at the cursor.

import assert from "node:assert/strict";
import { test } from "node:test";
import { axesOf, csv, isPositive, itemCharts, joined, laid, placed, plotted, readings, smoothed } from "../../../extension/sparkring/views/panel/src/series.js";
import { RANK_COLOURS } from "../../../extension/sparkring/views/panel/src/constants.js";

// A restart has undone step 3 of the first attempt, so step 3 was reached twice.
const TOLD = { axis: "step", axes: { epoch: [0, 0.5] }, charts: [] };
const FEW = {
  x: [1, 2, 3],
  time: [10, 20, 60],
  curves: [
    { name: "loss", colour: "#111111", dashed: false, mean: [3, 2, 1], ranks: { 0: [3, null, 1], 9: [3, 2, 1.5] },
      undone: [{ x: [2, 3], time: [20, 30], mean: [5, 6] }], best: { x: 3, value: 1 } },
    { name: "val_loss", colour: "#222222", dashed: true, mean: [null, 2.5, null], ranks: {}, undone: [] },
  ],
};
const MANY = {
  x: [1, 2],
  time: [5, 6],
  curves: [{ name: "loss", colour: "#111111", dashed: false, mean: [2, 0.00001], low: [1, -1], high: [3, 4], lowest: [7, 8],
             highest: [9, 63], ranks: {}, undone: [] }],
};
// Rank 1 has reached step 4, and rank 0 only step 2.
const APART = {
  x: [1, 2, 3, 4],
  time: [1, 2, 3, 4],
  curves: [{ name: "loss", colour: "#111111", dashed: false, mean: [4, 3, null, null], ranks: { 0: [5, 4, null, null], 1: [3, 2, 1, 0.5] },
             undone: [], until: 2 }],
};
const byStep = (chart) => laid(chart, TOLD, "step");

test("with few ranks, each rank has a line in its colour, below the means", () => {
  const { data, series, bands } = plotted(byStep(FEW));
  assert.deepEqual(data, [[1, 2, 3], [3, null, 1], [3, 2, 1.5], [null, 5, 6], [3, 2, 1], [null, 2.5, null]]);
  assert.deepEqual(series.slice(1).map(({ stroke }) => stroke), [RANK_COLOURS[0], RANK_COLOURS[1], "#111111", "#111111", "#222222"]);
  assert.deepEqual(series.map(({ dash }) => Boolean(dash)), [false, false, false, true, false, true]);
  assert.deepEqual(bands, []);
});

test("many ranks are drawn as a band", () => {
  const { data, bands } = plotted(byStep(MANY));
  assert.deepEqual(data, [[1, 2], [3, 4], [1, -1], [2, 0.00001]]);
  assert.deepEqual(bands.map(({ series }) => series), [[1, 2]]);
});

test("the cursor shows the value of every rank; a rank without a report at this step has its previous value", () => {
  assert.deepEqual(readings(byStep(FEW), 1), [["mean", -1, ["2", "2.5"]], ["rank 0", 0, ["3", ""]], ["rank 9", 9, ["2", ""]]]);
  assert.deepEqual(readings(byStep(FEW), 0)[0], ["mean", -1, ["3", ""]]);
});

test("with many ranks, the cursor shows the lowest and the highest value, and the ranks that have them", () => {
  assert.deepEqual(readings(byStep(MANY), 1), [["mean", -1, ["1e-05"]], ["lowest", -1, ["-1 (rank 8)"]], ["highest", -1, ["4 (rank 63)"]]]);
});

test("a line has a gap where values are not finite, and spans positions without a report", () => {
  const chart = { x: [1, 2, 3, 4], time: [1, 2, 3, 4], curves: [{ name: "loss", colour: "#111111", dashed: false, mean: [2, 3, "nan", 1],
    ranks: { 0: [2, null, "inf", 1] }, undone: [] }] };
  const odd = byStep(chart), { data, series } = plotted(odd, { smoothing: 0.6 });
  assert.deepEqual(data[1].map((value) => value && Number(value.toFixed(6))), [2, undefined, null, 1.375]);
  assert.ok(series.slice(1).every(({ spanGaps }) => !spanGaps) && plotted(byStep(FEW)).series[1].spanGaps);
  assert.deepEqual(readings(odd, 2), [["mean", -1, ["nan"]], ["rank 0", 0, ["inf"]]]);
  assert.ok(isPositive(odd));
});

test("a logarithmic axis takes positive values only", () => {
  assert.ok(isPositive(byStep(FEW)));
  assert.ok(!isPositive(byStep(MANY)));
});

test("an item's curves are drawn like those of ranks, with a metric and its validation in one chart", () => {
  const curves = { val_loss: [[2, 2.5]], loss: [[1, 3], [2, 2]], mape: [[1, 1]], val_acc: [[1, 0.1], [2, 0.2]], acc: [[1, 0.5], [3, 0.7]] };
  const told = itemCharts({ by: "epoch", curves }), { axis, charts } = told;
  assert.deepEqual(axesOf(told), ["epoch"]);
  assert.equal(told.legend, "dashed: validation");
  assert.equal(itemCharts({ by: "epoch", curves: { loss: curves.loss } }).legend, "");
  assert.deepEqual([axis, charts.map(({ curves }) => curves.map(({ name }) => name))], ["epoch", [["loss"], ["acc", "val_acc"]]]);
  const [, both] = charts;
  assert.equal(both.words, "acc by epoch: from 0.5 to 0.7; val_acc by epoch: from 0.1 to 0.2");
  assert.deepEqual(plotted(laid(both, told, "epoch")).data, [[1, 2, 3], [0.5, null, 0.7], [0.1, 0.2, null]]);
  assert.deepEqual(readings(laid(both, told, "epoch"), 2), [["value", -1, ["0.7", "0.2"]]]);
});

test("the horizontal axis counts steps, epochs or time", () => {
  assert.deepEqual(axesOf({ ...TOLD, charts: [FEW, MANY] }), ["step", "epoch", "time"]);
  assert.deepEqual(axesOf({ ...TOLD, axes: {}, charts: [{ ...FEW, time: [1, 1, 1] }] }), ["step"], "a time of nothing is no axis");
  assert.deepEqual(["step", "epoch", "steps in total", "time"].map((axis) => placed(axis, 61)), ["step 61", "epoch 61", "61 steps in total", "1 min 01 s"]);
  const byEpoch = laid(FEW, TOLD, "epoch");
  assert.deepEqual([byEpoch.x, byEpoch.curves[0].mean, byEpoch.curves[0].best.x], [[0.5, 1, 1.5], [3, 2, 1], 1.5]);
});

test("by time, the steps that a restart has undone are where they were made", () => {
  const { x, curves, moved } = laid(FEW, TOLD, "time");
  assert.deepEqual(x, [10, 20, 30, 60]);
  assert.deepEqual(curves[0].undone, [[null, 5, 6, null]]);
  assert.deepEqual([curves[0].mean, curves[0].ranks[9], curves[1].mean], [[3, 2, null, 1], [3, 2, null, 1.5], [null, 2.5, null, null]]);
  assert.deepEqual([0, 1, 1.5, 2.25, 3, 9].map(moved), [10, 10, 15, 30, 60, 60], "marks between two steps are between their times");
  assert.equal(curves[0].best.x, 60);
});

test("what only faster ranks have reported is faint, and there is no mean of it", () => {
  const chart = byStep(APART), { data, series } = plotted(chart);
  const rank = (which, faint) => data[series.findIndex(({ rank, alpha }) => rank === which && (alpha < 1) === faint)];
  assert.deepEqual([rank(1, false), rank(1, true)], [[3, 2, null, null], [null, 2, 1, 0.5]]);
  assert.equal(rank(0, true), undefined);
  assert.deepEqual(readings(chart, 3), [["mean", -1, [""]], ["rank 0", 0, [""]], ["rank 1", 1, ["0.5"]]]);
  const band = laid({ ...MANY, curves: [{ ...MANY.curves[0], until: 1 }] }, TOLD, "step");
  assert.deepEqual(plotted(band).bands.map(({ series }) => series), [[1, 2], [3, 4]]);
});

test("selected ranks are thicker, and the others fainter, unless none of them has a line", () => {
  const looks = (chosen) => plotted(byStep(FEW), { chosen }).series.filter(({ rank }) => rank !== undefined).map(({ rank, width, alpha }) => [rank, width, alpha]);
  assert.deepEqual(looks(new Set([0])), [[9, 1, 0.2], [0, 2.5, 1]]);
  assert.deepEqual(looks(new Set([5])), [[0, 1, 1], [9, 1, 1]]);
});

test("smoothing skips gaps and begins with the first value; the raw mean stays faintly behind", () => {
  assert.deepEqual(smoothed([4, null, 4, 4], 0.9).map((value) => value && Number(value.toFixed(9))), [4, null, 4, 4]);
  const [first, second] = smoothed([1, 2], 0.5);
  assert.deepEqual([first, Number(second.toFixed(6))], [1, 1.666667]);
  const raw = [3, 2, 1];
  assert.equal(smoothed(raw, 0), raw);
  const { data, series } = plotted(byStep(FEW), { smoothing: 0.6 });
  const at = data.findIndex((column, at) => at && column[2] === 1 && series[at].stroke === "#111111");
  assert.deepEqual([data[at], series[at].alpha < 1], [raw, true]);
});

test("messages without the points that the page has already", () => {
  const told = { charts: [{ x: { from: 2, then: [3, 4] }, curves: [{ name: "loss", ranks: { 0: { from: 2, then: [null, 7] } }, undone: [] }] }], restarts: [] };
  const old = { charts: [{ x: [1, 2, 9], curves: [{ name: "loss", ranks: { 0: [5, 6, 9] } }] }] };
  assert.deepEqual(joined(old, told), { charts: [{ x: [1, 2, 3, 4], curves: [{ name: "loss", ranks: { 0: [5, 6, null, 7] }, undone: [] }] }], restarts: [] });
  assert.equal(joined(null, told), null, "a page without the beginning waits for a message with all points");
  assert.deepEqual(joined(null, { charts: [FEW] }), { charts: [FEW] });
});

test("CSV has a column for each axis, the mean and each rank", () => {
  const quoted = { ...FEW, curves: [{ ...FEW.curves[0], name: 'a,"b"' }] };
  assert.equal(csv(quoted, { ...TOLD, charts: [quoted] }),
    'step,epoch,seconds,"a,""b""","a,""b"" rank 0","a,""b"" rank 9"\n1,0.5,10,3,3,3\n2,1,20,2,,2\n3,1.5,60,1,1,1.5\n');
  assert.match(csv(MANY, { ...TOLD, charts: [MANY] }), /^step,epoch,seconds,loss,loss lowest,loss highest\n1,0.5,5,2,1,3\n/);
});
