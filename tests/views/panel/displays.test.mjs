import assert from "node:assert/strict";
import { test } from "node:test";
import { known, moments, shownAt } from "../../../extension/sparkring/views/panel/src/displays.js";

const ORDER = [["a", [0], 1], ["b", [1], 1.2], ["c", [0], 5], ["d", [0, 1], 9]];
const keys = (time, ...ranks) => shownAt(ORDER, time, new Set(ranks)).map(([key]) => key);

test("displays that follow one another at once are one step", () => {
  assert.deepEqual(moments(ORDER), [1.2, 5, 9]);
  assert.deepEqual(moments([]), []);
});

test("each rank's last display up to a moment is shown, and a shared one only once", () => {
  assert.deepEqual(keys(0.5), []);
  assert.deepEqual(keys(1.2), ["a", "b"]);
  assert.deepEqual(keys(5), ["c", "b"]);
  assert.deepEqual(keys(9), ["d"]);
});

test("only displays in the last order are kept", () => {
  const first = known(null, { order: [["a", [0], 1], ["b", [1], 2]], html: { a: "<b>a</b>", b: "<b>b</b>" } });
  const second = known(first, { order: [["b", [1], 2], ["c", [0], 3]], html: { c: "<b>c</b>" } });
  assert.deepEqual(second, { order: [["b", [1], 2], ["c", [0], 3]], html: { b: "<b>b</b>", c: "<b>c</b>" } });
});

test("if ranks are selected, only their displays are shown", () => {
  assert.deepEqual(keys(5, 1), ["b"]);
  assert.deepEqual(keys(9, 1), ["d"]);
});
