// Tests what the page and Python do by the same rules. test_lines.py and test_summary.py in tests/views test Python.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { Filter, Lines } from "../../../extension/sparkring/views/panel/src/lines.js";
import { Usage } from "../../../extension/sparkring/views/panel/src/usage.js";
import { top } from "../../../extension/sparkring/views/panel/src/stream.js";
import * as words from "../../../extension/sparkring/views/panel/src/words.js";

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
  return filter.found.map((line) => [words.rankNumbers(found.ranksOf(line)), found.at(line).text]);
}

for (const { what, lines, folded: wanted } of read("folding.json")) {
  test(`folding: ${what}`, () => assert.deepEqual(folded(lines), wanted));
}

const known = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const revived = (value) => (Array.isArray(value) ? value.map(revived) : known[value] ?? value);
const WRITE = { ...words, rank_numbers: words.rankNumbers, counted: (given) => words.counted(...given),
  rank_list: words.rankList, bars_top: top, facts: (title, kind, cell) => words.fact({ title, kind, noun: "step" }, cell, "batch"),
  usage_words: (used) => new Usage().words.call({ used: [used] }, 0),
  cells: (kind, cell) => words.writer({ kind, signs: { failed: "✗" } }, [cell])(cell), numbers: (values) => values.map(words.numbers(values)) };

for (const [name, cases] of Object.entries(read("words.json"))) {
  test(`words: ${name}`, () => {
    for (const given of cases) {
      const values = ["cells", "facts"].includes(name) ? given : revived(given.slice(0, -1)), text = given.at(-1);
      assert.deepEqual(WRITE[name](...values), text, JSON.stringify(given));
    }
  });
}
