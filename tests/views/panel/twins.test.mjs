// Tests what the page and Python do by the same rules. test_lines.py and test_summary.py in tests/views test Python.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { Filter, Lines } from "../../../extension/sparkring/views/panel/src/lines.js";
import { duration, number, percent, rankNumbers, size } from "../../../extension/sparkring/views/panel/src/words.js";

const read = (name) => JSON.parse(readFileSync(new URL(`../${name}`, import.meta.url), "utf8"));

function folded(lines) {
  const found = new Lines(), filter = new Filter(found);
  found.add({
    start: 0, count: lines.length, noise: [], html: {}, pending: { text: [] },
    rank: lines.map(([rank]) => rank), stream: lines.map(([, stream]) => stream[3]).join(""),
    time: lines.map(() => 0), text: lines.map(([, , text]) => text),
  });
  found.settle();
  while (!filter.done) filter.work();
  return filter.found.map((line) => [rankNumbers(found.ranksOf(line)), found.at(line).text]);
}

for (const { what, lines, folded: wanted } of read("folding.json")) {
  test(`folding: ${what}`, () => assert.deepEqual(folded(lines), wanted));
}

test("durations", () => {
  for (const [seconds, words] of read("words.json").duration) assert.equal(duration(seconds), words);
});

test("values", () => {
  for (const [value, words] of read("words.json").number) assert.equal(number(value), words);
});

test("percentages", () => {
  for (const [fraction, words] of read("words.json").percent) assert.equal(percent(fraction), words);
});

test("sizes", () => {
  for (const [value, words] of read("words.json").size) assert.equal(size(value), words);
});

test("ranks", () => {
  for (const [ranks, words] of read("words.json").ranks) assert.equal(rankNumbers(ranks), words);
});
