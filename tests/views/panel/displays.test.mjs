import assert from "node:assert/strict";
import { test } from "node:test";
import { known, shownAt, stepsOf } from "../../../extension/sparkring/views/panel/src/displays.js";

const STEPS = stepsOf([["a", [0], 1], ["b", [1], 1.2], ["c", [0], 5], ["d", [0, 1], 9], ["e", [0], 9.1], ["f", [1], 9.4]]);
const keys = (at, ...ranks) => shownAt(STEPS, at, new Set(ranks)).map(([key]) => key);

test("displays that follow one another at once are one step of the slider", () => {
  const lengths = (...times) => stepsOf(times.map((time) => [String(time), [0], time])).map(({ length }) => length);
  assert.deepEqual(STEPS.map((step) => step.map(([key]) => key).join("")), ["ab", "c", "def"]);
  assert.deepEqual(lengths(1, 1.4, 1.8, 2.2, 2.6), [3, 2], "a step does not span more than a second");
  assert.deepEqual(lengths(), []);
});

test("all displays of a step are shown, with those of ranks that have shown nothing since", () => {
  assert.deepEqual(keys(-1), []);
  assert.deepEqual(keys(0), ["a", "b"]);
  assert.deepEqual(keys(1), ["c", "b"]);
  assert.deepEqual(keys(2), ["d", "e", "f"]);
});

test("only displays in the last order are kept", () => {
  const first = known(null, { order: [["a", [0], 1], ["b", [1], 2]], html: { a: "<b>a</b>", b: "<b>b</b>" } });
  const second = known(first, { order: [["b", [1], 2], ["c", [0], 3]], html: { c: "<b>c</b>" } });
  assert.deepEqual(second, { order: [["b", [1], 2], ["c", [0], 3]], html: { b: "<b>b</b>", c: "<b>c</b>" } });
});

test("if ranks are selected, only their displays are shown", () => {
  assert.deepEqual(keys(1, 1), ["b"]);
  assert.deepEqual(keys(2, 1), ["d", "f"]);
});
