// Tests what the Stream tab computes from the messages of kind "stream".

import assert from "node:assert/strict";
import test from "node:test";
import { span, stacked, Stream, ticks, told } from "../../../extension/sparkring/views/panel/src/stream.js";

const row = (batch, how = "trained") => [batch, 64, how, 0.5, 0, 2, 1, 0, 4, 7.5, batch % 2 === 0, null, batch];
const message = (end, ...rows) => ({ end, kept: 3, rows });

test("a batch that is sent twice is kept once, and only the last batches are kept", () => {
  const stream = new Stream();
  stream.add(message(2, row(10), row(11)));
  stream.add(message(3, row(11), row(12, "empty")));
  assert.deepEqual(stream.batches.map(({ batch }) => batch), [10, 11, 12]);
  stream.add(message(5, row(11, "replayed"), row(13)));
  assert.deepEqual(stream.batches.map(({ batch, how }) => [batch, how]), [[12, "empty"], [11, "replayed"], [13, "trained"]]);
});

test("a page that is loaded late orders the batches correctly", () => {
  const stream = new Stream();
  stream.add(message(3, row(12)));
  stream.add(message(3, row(10), row(11), row(12)));
  assert.deepEqual(stream.batches.map(({ batch }) => batch), [10, 11, 12]);
});

test("the parts are stacked, and the topmost is drawn first", () => {
  const stream = new Stream();
  stream.add(message(2, row(7), row(8)));
  const all = stacked(stream.batches, new Set(["waiting", "training", "moving", "saving"]));
  assert.deepEqual(all.parts, ["waiting", "saving", "training", "moving"]);
  assert.deepEqual(all.data, [[0, 1], [7.5, 7.5], [3.5, 3.5], [2.5, 2.5], [0.5, 0.5]]);
  assert.deepEqual(stacked(stream.batches, new Set(["saving"])).data, [[0, 1], [1, 1]]);
});

test("a few batches do not fill the chart", () => {
  assert.deepEqual(span([row(1)]), [-0.7, 29.7]);
  assert.deepEqual(span(Array(100).fill(row(1))), [-0.7, 99.7]);
});

test("when the last batches move on, so does the axis, whose labels are at round numbers", () => {
  const stream = new Stream();
  stream.add(message(4, row(9), row(10), row(11), row(12)));
  const { batches, first } = stream;
  assert.equal(first, 1);
  assert.deepEqual(stacked(batches, new Set(["saving"]), first).data[0], [1, 2, 3]);
  assert.deepEqual(ticks(batches, 5, first), [1]);
  assert.deepEqual(ticks(batches, 4, first), [3]);
  assert.deepEqual(span(batches, first).map((place) => Number(place.toFixed(6))), [0.3, 30.7]);
});

test("the times of a batch in words", () => {
  const stream = new Stream();
  stream.add(message(1, row(1234, "replayed")));
  assert.deepEqual(told(stream.batches[0]), [["batch", "1,234"], ["rows", "64"], ["result", "replayed"], ["moving", "0.5 s"], ["reading", "0 s"],
    ["training", "2.0 s"], ["saving", "1.0 s"], ["other cells", "0 s"], ["waiting", "4.0 s"], ["together", "7.5 s"], ["saved", "✓"],
    ["after", "20 min 34 s"]]);
});
