// Tests which of the ranks' lines the page keeps, and which of these lines it shows.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Filter, Lines } from "../../../extension/sparkring/views/panel/src/lines.js";

function told(lines, start, texts, more = {}) {
  lines.add({
    start, count: texts.length, text: texts, rank: texts.map(() => 0), stream: "o".repeat(texts.length),
    time: texts.map(() => 0), html: {}, noise: [], pending: { text: [] }, ...more,
  });
}

function shown(lines, change = {}) {
  const filter = Object.assign(new Filter(lines), change);
  filter.restart();
  while (!filter.done) filter.work();
  return filter.found.map((line) => lines.at(line).text);
}

test("each line is kept once, and missed lines are shown as a gap", () => {
  const lines = new Lines();
  told(lines, 0, ["a", "b"]);
  told(lines, 1, ["b", "c"]); // sent again after the page was reloaded
  told(lines, 5, ["f"]);
  assert.deepEqual(shown(lines), ["a", "b", "c", "2 more lines, which are in the log files", "f"]);
});

test("lines that arrive before the whole run do not hide earlier lines", () => {
  const lines = new Lines();
  told(lines, 2, ["c"]);
  told(lines, 0, ["a", "b", "c"]);
  told(lines, 3, ["d"]);
  assert.deepEqual(shown(lines), ["a", "b", "c", "d"]);
  const others = new Lines();
  told(others, 2, [], { pending: { rank: [0], stream: "o", text: ["c"], html: {} } });
  told(others, 0, ["a", "b"]);
  assert.deepEqual(shown(others), ["a", "b"]);
});

test("lines that are left out or split are still known when they are sent again", () => {
  const lines = new Lines();
  told(lines, 0, ["a", "b1", "b2"], { count: 2, line: [0, 1, 1] });
  told(lines, 1, ["b1", "b2", "c"], { count: 6, line: [0, 0, 5] });
  told(lines, 6, ["c", "d"], { count: 4, line: [0, 3] });
  assert.deepEqual(shown(lines), ["a", "b1", "b2", "c", "d"]);
});

test("lines are chosen by rank, stream, text and noise", () => {
  const lines = new Lines();
  told(lines, 0, ["Epoch one", "careful", "oneDNN is on", "two"], { rank: [0, 1, 1, 2], stream: "oeeo", noise: [2] });
  assert.deepEqual(shown(lines), ["Epoch one", "careful", "two"]);
  assert.deepEqual(shown(lines, { noise: true, ranks: new Set([1]) }), ["careful", "oneDNN is on"]);
  assert.deepEqual(shown(lines, { streams: new Set(["o"]) }), ["Epoch one", "two"]);
  assert.deepEqual(shown(lines, { query: "EPOCH" }), ["Epoch one"]);
});

test("an incomplete line is pending until it is complete", () => {
  const lines = new Lines();
  told(lines, 0, [], { pending: { rank: [3], stream: "e", text: [" 10%"], html: {} } });
  assert.deepEqual(lines.pending.map(({ rank, text }) => [rank, text]), [[3, " 10%"]]);
  told(lines, 0, [" 100%"]);
  assert.deepEqual([lines.pending, shown(lines)], [[], [" 100%"]]);
});

test("in a flood of lines, the oldest are dropped, and lines that were folded into dropped lines are shown", () => {
  const lines = new Lines(), count = 10_000;
  told(lines, 0, ["x", ...Array.from({ length: count }, (_, at) => `line ${at}`)]);
  const before = lines.characters;
  assert.ok(lines.drop());
  assert.ok(lines.characters < before);
  const found = shown(lines);
  assert.equal(found.at(-1), `line ${count - 1}`);
  assert.equal(found.length, count + 1 - 4096);
});

test("errors begin with a traceback, or with a line of stderr that looks like one", () => {
  const lines = new Lines(), traceback = ["Traceback (most recent call last):", '  File "x"', "ValueError: bad"];
  told(lines, 0, ["no Error here", ...traceback, "ERROR in the queue", "fine", "RuntimeError: worse"], { stream: "oeeeeee" });
  lines.settle();
  const filter = new Filter(lines);
  filter.work();
  assert.deepEqual(filter.errors.map((line) => lines.at(line).text), [traceback[0], "ERROR in the queue", "RuntimeError: worse"]);
  assert.deepEqual(filter.found.map((line) => lines.continues(line)), [false, false, true, true, false, false, false]);
  assert.equal(filter.find(2), 2);
});

test("a traceback without an end does not wait for long while others print", () => {
  const lines = new Lines();
  told(lines, 0, ["Traceback (most recent call last):", "soon", "late"], { rank: [0, 1, 1], time: [1, 1.2, 3] });
  assert.deepEqual(shown(lines), ["soon", "Traceback (most recent call last):", "late"]);
});
