// Tests what is drawn for curves, and which values are shown at the cursor.

import assert from "node:assert/strict";
import { test } from "node:test";
import { isPositive, itemCharts, plotted, RANK_COLOURS, readings } from "../../../extension/sparkring/views/panel/src/series.js";

const FEW = {
  x: [1, 2, 3],
  curves: [
    { name: "loss", colour: "#111111", dashed: false, mean: [3, 2, 1], ranks: { 0: [3, null, 1], 9: [3, 2, 1.5] }, undone: [[null, 5, 6]] },
    { name: "val_loss", colour: "#222222", dashed: true, mean: [null, 2.5, null], ranks: {}, undone: [] },
  ],
};
const MANY = {
  x: [1, 2],
  curves: [{ name: "loss", colour: "#111111", dashed: false, mean: [2, 0.00001], low: [1, -1], high: [3, 4], lowest: [7, 8],
             highest: [9, 63], ranks: {}, undone: [] }],
};

test("with few ranks, each rank has a line in its colour, below the means", () => {
  const { data, series, bands } = plotted(FEW);
  assert.deepEqual(data, [[1, 2, 3], [3, null, 1], [3, 2, 1.5], [null, 5, 6], [3, 2, 1], [null, 2.5, null]]);
  assert.deepEqual(series.slice(1).map(({ stroke }) => stroke), [RANK_COLOURS[0], RANK_COLOURS[1], "#111111", "#111111", "#222222"]);
  assert.deepEqual(series.map(({ dash }) => Boolean(dash)), [false, false, false, true, false, true]);
  assert.deepEqual(bands, []);
});

test("many ranks are drawn as a band", () => {
  const { data, bands } = plotted(MANY);
  assert.deepEqual(data, [[1, 2], [3, 4], [1, -1], [2, 0.00001]]);
  assert.deepEqual(bands.map(({ series }) => series), [[1, 2]]);
});

test("the cursor shows the value of every rank; a rank without a report at this step has its previous value", () => {
  assert.deepEqual(readings(FEW, 1), [["mean", -1, ["2", "2.5"]], ["rank 0", 0, ["3", ""]], ["rank 9", 9, ["2", ""]]]);
  assert.deepEqual(readings(FEW, 0)[0], ["mean", -1, ["3", ""]]);
});

test("with many ranks, the cursor shows the lowest and the highest value, and the ranks that have them", () => {
  assert.deepEqual(readings(MANY, 1), [["mean", -1, ["1e-05"]], ["lowest", -1, ["-1 (rank 8)"]], ["highest", -1, ["4 (rank 63)"]]]);
});

test("a logarithmic axis can show only positive values", () => {
  assert.ok(isPositive(FEW));
  assert.ok(!isPositive(MANY));
});

test("an item's curves are drawn like those of ranks, with a metric and its validation in one chart", () => {
  const curves = { val_loss: [[2, 2.5]], loss: [[1, 3], [2, 2]], mape: [[1, 1]], val_acc: [[1, 0.1], [2, 0.2]], acc: [[1, 0.5], [3, 0.7]] };
  const { axis, charts } = itemCharts({ by: "epoch", curves });
  assert.deepEqual([axis, charts.map(({ curves }) => curves.map(({ name }) => name))], ["epoch", [["loss"], ["acc", "val_acc"]]]);
  const [, both] = charts;
  assert.equal(both.words, "acc by epoch: from 0.5 to 0.7; val_acc by epoch: from 0.1 to 0.2");
  assert.deepEqual(plotted(both).data, [[1, 2, 3], [0.5, null, 0.7], [0.1, 0.2, null]]);
  assert.deepEqual(readings(both, 2), [["value", -1, ["0.7", "0.2"]]]);
});
