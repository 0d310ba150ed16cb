// Tests what the Search tab computes from the rows of the items.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";
import { bests, bounds, brushed, curvesExtent, extent, finalValues, marks, moved, place, roundNumbers, trialsOf, valueAt } from "../../../extension/sparkring/views/panel/src/search.js";

const cases = JSON.parse(readFileSync(new URL("../search.json", import.meta.url), "utf8"));
const LR = { name: "lr", low: 1e-5, high: 1e-1, log: true, choices: [] };
const row = (item, state, loss, lr = 1e-3) => (
  { item, state, metrics: loss === undefined ? {} : { loss }, parameters: { lr }, curves: { loss: [[1, loss]] } });
const trials = trialsOf([row(3, "kept", 1), row(0, "finished", 3, 1e-5), row(1, "pruned", 0.5), row(2, "finished", 2), row(4, "failed", 0),
                         row(5, "running", undefined)], "loss");

test("items that have a value and have not failed are trials, in the order of their numbers", () => {
  assert.deepEqual(trials.map(({ item }) => item), [0, 1, 2, 3]);
  assert.deepEqual(trials.map(({ whole }) => whole), [true, false, true, true]);
});

test("the best value so far is that of a trial that has finished", () => {
  const values = (mode) => bests(trials, mode).map(([item, best]) => [item, best.value]);
  assert.deepEqual(values("min"), [[0, 3], [2, 2], [3, 1]]);
  assert.deepEqual(values("max"), [[0, 3], [2, 3], [3, 3]]);
  assert.deepEqual(bests([], "min"), []);
});

test("final values are those of trials that have finished, if there are any", () => {
  assert.deepEqual(finalValues(trials), [3, 2, 1]);
  assert.deepEqual(finalValues(trials.filter(({ whole }) => !whole)), [0.5]);
});

test("ranges and places are the same as in views/sections/search.py", () => {
  for (const [values, mode, expected] of cases.extent) assert.deepEqual(extent(values, mode), expected);
  for (const [curves, expected] of cases.curves_extent) curvesExtent(curves).forEach((end, at) => assert.ok(Math.abs(end - expected[at]) < 1e-9, `${curves}`));
  for (const [parameter, value, expected] of cases.place) {
    const found = place({ low: 0, high: 0, log: false, choices: [], ...parameter }, value);
    assert.ok(Math.abs(found - expected) < 1e-9, `${JSON.stringify(parameter)}: ${found}`);
  }
  assert.equal(place({ choices: ["relu"] }, "tanh"), null);
});

test("even the curves of a large search have bounds", () => {
  assert.deepEqual(bounds(Array.from({ length: 640_000 }, (_, at) => at)), [0, 639_999]);
});

test("an axis has a value at each place", () => {
  for (const [parameter, value, at] of cases.place.filter(([{ choices }]) => choices?.length !== 1)) {
    const found = valueAt({ low: 0, high: 0, log: false, choices: [], ...parameter }, at);
    assert.ok(parameter.choices ? String(found) === String(value) || Number(found) === value : Math.abs(found / value - 1) < 1e-9, `${found}`);
  }
  assert.equal(valueAt({ choices: ["a", "b", "c"] }, 0.6), "b");
});

test("keys move one end of a brush along the axis, or to the next choice, but not past the other end", () => {
  const places = (axis, from, limits, ...keys) => keys.map((key) => moved(axis, from, key, limits)?.toFixed(2) ?? null);
  assert.deepEqual(places(LR, 0.5, [0, 0.6], "ArrowUp", "ArrowLeft", "PageUp", "PageDown", "Home", "End", "x"),
    ["0.55", "0.45", "0.60", "0.30", "0.00", "0.60", null]);
  assert.deepEqual(places({ choices: ["a", "b", "c"] }, 0, [0, 1], "ArrowUp", "ArrowDown", "PageUp"), ["0.50", "0.00", "1.00"]);
});

test("brushes on several axes choose the trials that are within all of them", () => {
  const axes = [{ at: ({ parameters }) => place(LR, parameters.lr) }, { at: ({ value }) => value / 3 }];
  const numbers = (...brushes) => brushed(trials, axes, new Map(brushes)).map(({ item }) => item);
  assert.deepEqual(numbers(), [0, 1, 2, 3]);
  assert.deepEqual(numbers([0, [0.4, 0.6]]), [1, 2, 3]);
  assert.deepEqual(numbers([0, [0.4, 0.6]], [1, [0.3, 1]]), [2, 3]);
});

test("an axis is labelled with round numbers", () => {
  assert.deepEqual(roundNumbers(0, 10, 4), [0, 5, 10]);
  assert.deepEqual(roundNumbers(0.13, 0.5, 4), [0.2, 0.3, 0.4, 0.5]);
  assert.ok(roundNumbers(0.8999999999999999, 0.9, 4).length <= 5, "even if the step is too small to be added");
  assert.deepEqual(marks(LR).map(([, value]) => Math.round(Math.log10(value))), [-5, -4, -3, -2, -1]);
  assert.deepEqual(marks({ choices: ["relu", "tanh"] }), [[0, "relu"], [1, "tanh"]]);
});
