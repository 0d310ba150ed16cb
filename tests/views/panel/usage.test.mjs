// Tests what the page shows of what ranks use.

import assert from "node:assert/strict";
import { mute } from "../../../extension/sparkring/views/panel/src/ranks.js";
import { test } from "node:test";
import { HEIGHT, Usage, WIDTH, counted, curve } from "../../../extension/sparkring/views/panel/src/usage.js";

test("a curve goes from left to right below its highest value", () => {
  assert.equal(curve([[0, 0], [5, 50], [10, 100]], 0, 10, 100), `M0.0 ${HEIGHT}L0.0 11.0L20.0 5.5L${WIDTH}.0 0.0V${HEIGHT}Z`);
  assert.equal(curve([[5, 1], [10, 1]], 0, 10, 1).split("L")[1], "20.0 0.0", "a rank that began later begins further right");
});

test("a curve needs two points", () => {
  assert.equal(curve([], 0, 10, 1), "");
  assert.equal(curve([[0, 1], [5, null], [10, undefined]], 0, 10, 1), "");
});

test("samples of all messages are kept, and an attempt drops them", () => {
  const usage = new Usage();
  usage.hear({ used: [[50, 10, 2, 100, 0, null, null, 0]], waiting: [], starves: [], samples: { 0: [[1, 50, 10, null, null], [6, 50, 20, null, null]] } });
  usage.hear({ used: [[60, 10, 2, 100, 0, null, null, 0], null], waiting: [3, 62], starves: [1], samples: {} });
  assert.deepEqual([usage.column("cpu"), usage.column("gpu"), usage.words(0), usage.words(1)], [[60, null], [null, null], "CPU 60 % (2 cores), 10 B of 100 B", ""]);
  const [first, second] = usage.curves(2);
  assert.ok(first.cpu && first.memory && !first.gpu && !second.cpu);
  usage.hear({ used: [], waiting: [], starves: [], samples: { 0: [] } });
  assert.deepEqual([usage.column("cpu"), usage.curves(1)[0].cpu], [[], ""]);
});

test("a running rank is counted once", () => {
  const known = { behind: { 1: 20 }, silent: [false, false, true, false, false, false], starves: [1, 3] };
  assert.equal(counted("rrrrrf", known), "1 behind · 1 silent · 1 waiting for data · 2 running · 1 finished");
  assert.equal(counted("ffi", { behind: {}, silent: [], starves: [] }), "2 finished · 1 not taking part");
  assert.equal(counted("fsxs", { behind: {}, silent: [], starves: [] }), "1 failed · 1 finished · 2 stopped");
});

test("silent ranks are named if they are few", () => {
  assert.equal(mute([false, false, true]), "rank 2 is silent");
  assert.equal(mute([true, true, false, true]), "ranks 0, 1, 3 are silent");
  assert.equal(mute([false]), "");
  assert.equal(mute(Array(9).fill(true)), "");
});
