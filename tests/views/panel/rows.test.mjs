// Where the rows of the Logs tab are, and how lines of several ranks share rows.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Filter, Lines } from "../../../extension/sparkring/views/panel/src/lines.js";
import { Columns, Tops } from "../../../extension/sparkring/views/panel/src/rows.js";
import { elapsed, ranksWithin } from "../../../extension/sparkring/views/panel/src/words.js";

const FOREVER = Infinity;

function told(lines, start, rows) {
  lines.add({
    start, count: rows.length, text: rows.map(([, , text]) => text), rank: rows.map(([rank]) => rank), stream: "o".repeat(rows.length),
    time: rows.map(([, time]) => time), html: {}, noise: [], pending: { text: [] },
  });
}

// Return the texts of all rows, with "" where a column is empty.
function shown(columns) {
  while (!columns.done) columns.work();
  const { lines } = columns.filter;
  return Array.from({ length: columns.length }, (_, at) => columns.cells(at).map((line) => (line < 0 ? "" : lines.at(line).text)));
}

function sideBySide(lines, ...ranks) {
  return new Columns(Object.assign(new Filter(lines), { ranks: new Set(ranks), fold: false }), ranks);
}

test("the tops of rows of different heights", () => {
  const heights = Array.from({ length: 2000 }, (_, at) => 1 + (at % 3)), tops = new Tops((at) => heights[at]);
  const top = (at) => heights.slice(0, at).reduce((sum, each) => sum + each, 0);
  tops.grow(2000, FOREVER);
  for (const at of [0, 1, 511, 512, 1500, 2000]) assert.equal(tops.top(at), top(at));
  for (const at of [0, 1, 511, 512, 1999]) assert.deepEqual([tops.at(top(at)), tops.at(top(at + 1) - 0.5)], [at, at]);
  assert.equal(tops.at(top(2000)), 2000);
  const gone = top(700);
  heights.splice(0, 700);
  assert.equal(tops.drop(700), gone);
  for (const at of [0, 10, 900, 1300]) assert.equal(tops.top(at), top(at));
  heights[600] += 4;
  tops.correct(600, 4);
  assert.deepEqual([tops.top(1300), tops.at(top(600) + 3)], [top(1300), 600]);
  heights[1299] = 9;
  tops.cut(1299);
  tops.grow(1300, FOREVER);
  assert.equal(tops.top(1300), top(1300));
  assert.deepEqual([tops.drop(5000), tops.length, tops.top(0)], [top(1300), 0, 0]);
});

test("ranks that print at the same time share rows", () => {
  const lines = new Lines();
  told(lines, 0, [[0, 1, "a"], [0, 1, "b"], [1, 1.1, "c"], [1, 1.1, "d"], [2, 1.1, "other"], [1, 5, "e"], [0, 5.1, "f"], [0, 9, "g"]]);
  const columns = sideBySide(lines, 0, 1);
  assert.deepEqual(shown(columns), [["a", "c"], ["b", "d"], ["f", "e"], ["g", ""]]);
  const numbers = [0, 3, 5, 7].map((line) => columns.find(line));
  assert.deepEqual(numbers, [0, 1, 2, 3]);
  assert.equal(columns.find(4), 0, "a line that is not shown is looked for by its time");
});

test("a line that comes later may share a row that is drawn already", () => {
  const lines = new Lines(), columns = sideBySide(lines, 0, 1);
  told(lines, 0, [[0, 1, "a"], [0, 3, "b"]]);
  shown(columns);
  assert.equal(columns.takeChanged(), Infinity);
  told(lines, 2, [[1, 3.1, "c"]]);
  assert.deepEqual(shown(columns), [["a", ""], ["b", "c"]]);
  assert.deepEqual([columns.takeChanged(), columns.takeChanged()], [1, Infinity]);
});

test("all lines after a gap are below it", () => {
  const lines = new Lines();
  told(lines, 0, [[0, 1, "a"]]);
  told(lines, 7, [[1, 1, "b"]]);
  assert.deepEqual(shown(sideBySide(lines, 0, 1)), [["a", ""], ["6 more lines, which are in the log files", ""], ["", "b"]]);
});

test("rows go when their lines are dropped", () => {
  const lines = new Lines(), columns = sideBySide(lines, 0, 1);
  told(lines, 0, Array.from({ length: 10_000 }, (_, at) => [at % 2, at, `line ${at}`]));
  assert.equal(shown(columns).length, 10_000);
  lines.drop();
  assert.equal(columns.work(), 4096);
  assert.deepEqual(shown(columns)[0], ["line 4096", ""]);
  told(lines, 10_000, [[1, 10_000, "last"]]);
  assert.deepEqual(shown(columns).at(-1), ["", "last"]);
  assert.deepEqual([columns.find(10_000), columns.find(5)], [columns.length - 1, 0]);
});

test("times and ranks are short", () => {
  assert.deepEqual([0, 9.96, 62.44, 3723.4].map(elapsed), ["0:00.0", "0:10.0", "1:02.4", "1:02:03.4"]);
  assert.equal(ranksWithin([0, 1, 2, 7], 8, "ranks"), "0–2, 7");
  assert.equal(ranksWithin([0, 2, 4, 6], 8, "ranks"), "4 ranks");
});
