// Tests the rows that the page makes from messages about items.

import assert from "node:assert/strict";
import test from "node:test";
import { fits, Items, value } from "../../../extension/sparkring/views/panel/src/items.js";

const row = (item, state, took, metrics = {}, error = "", place = "here", parameters = {}) => (
  [item, `shop ${item}`, parameters, state, null, place, took, metrics, "", error, item, "", "step", {}]);
const titles = (items) => items.columns().map(({ title }) => title);
const numbers = (items, now = 100) => items.shown(now).map((each) => each.item);

test("a later row replaces an earlier one", () => {
  const items = new Items();
  items.add({ rows: [row(1, "running", null), row(0, "running", null)] });
  items.add({ rows: [row(1, "finished", 2, { mape: 0.5 })] });
  assert.deepEqual(numbers(items), [0, 1], "the running item is in sight");
  assert.equal(items.rows.get(1).state, "finished");
  assert.deepEqual(items.names.metrics, ["mape"]);
});

test("items are sorted by any column, and those without a value come last", () => {
  const items = new Items();
  items.add({ rows: [row(0, "finished", 3, { mape: 0.5 }), row(1, "failed", 1, {}, "no"), row(2, "finished", 2, { mape: 0.1 }),
                     row(3, "running", null)] });
  items.sort("metrics.mape");
  assert.deepEqual(numbers(items), [2, 0, 1, 3]);
  items.sort("metrics.mape");
  assert.deepEqual(numbers(items), [0, 2, 1, 3]);
  items.sort("took");
  assert.deepEqual(numbers(items), [1, 2, 0, 3]);
  assert.deepEqual(numbers(items, 4.5), [1, 3, 2, 0], "item 3 has run for 1.5 s");
  items.sort("error");
  assert.deepEqual(numbers(items), [1, 0, 2, 3]);
});

test("a search finds items by the text of their rows", () => {
  const items = new Items();
  items.add({ rows: [row(0, "finished", 3), row(1, "failed", 1, {}, "ValueError: NO data"), row(10, "finished", 2)] });
  items.search("no data");
  assert.deepEqual(numbers(items), [1]);
  items.search("shop 1");
  assert.deepEqual(numbers(items), [1, 10]);
  items.add({ rows: [row(11, "running", null)] });
  assert.deepEqual(numbers(items), [11, 1, 10], "running items come first");
  items.onlyFailed = true;
  items.search("");
  assert.deepEqual(numbers(items), [1]);
});

test("a trial has a column for each parameter, and conditions on them choose trials", () => {
  const items = new Items(), trial = (item, lr, act, loss) => row(item, "finished", 1, { loss }, "", "here", { lr, act });
  items.add({ rows: [trial(0, 0.1, "relu", 3), trial(1, 0.01, "Tanh", 2), trial(2, 0.001, "relu", 1)] });
  assert.deepEqual(titles(items), ["#", "lr", "act", "state", "time", "loss"]);
  items.sort("parameters.lr");
  assert.deepEqual(numbers(items), [2, 1, 0]);
  items.sort("parameters.act");
  assert.deepEqual(numbers(items), [1, 0, 2]);
  for (const [query, chosen] of [["lr<0.05", [1, 2]], ["act=tanh", [1]], ["lr>=0.01 loss<3", [1]], ["width<3", []]]) {
    items.search(query);
    assert.deepEqual(numbers(items).sort(), chosen, query);
  }
});

test("a column is shown if it has something to show", () => {
  const items = new Items();
  items.add({ rows: [row(0, "finished", 3, { error: 0.5, mape: 1 })] });
  assert.deepEqual(titles(items), ["#", "item", "state", "time", "error", "mape"]);
  items.add({ rows: [row(1, "failed", 3, {}, "ValueError: no data", "there")] });
  assert.deepEqual(titles(items), ["#", "item", "state", "host", "time", "error", "mape", "error or last line"]);
  items.sort("metrics.error");
  assert.deepEqual(numbers(items), [0, 1], "sorted by the metric called error");
});

test("an item's row has the last line that it printed, or its error", () => {
  const items = new Items();
  items.read({ rank: [0, 0, 1, 0], text: ["one", "two", "oneDNN", " "], noise: [2] });
  items.add({ rows: [row(0, "running", null), row(1, "running", null)] });
  assert.deepEqual(items.shown(9).map(({ said }) => said), ["two", ""]);
  items.read({ rank: [1], text: ["three"], noise: [] });
  items.add({ rows: [row(0, "finished", 2)] });
  assert.deepEqual(items.shown(9).map(({ said }) => said), ["three", "two"]);
  items.add({ rows: [row(0, "failed", 2, {}, "no data")] });
  assert.deepEqual(items.shown(9).map(({ said }) => said), ["three", "no data"]);
});

test("cells are written as in the saved view", () => {
  const items = new Items();
  items.add({ rows: [row(1234, "failed", 59.96, { mape: 0.03125 }, "no"), row(1, "finished", 0.04, { mape: "nan" })] });
  const cells = (item) => items.columns().map(({ name, write }) => write(value(items.rows.get(item), name, 0)));
  assert.deepEqual(cells(1234), ["1,234", "shop 1234", "✗ failed", "1 min 00 s", "0.03125", "no"]);
  items.add({ rows: [row(1, "finished", 0.04, { mape: 0.5 })] });
  assert.deepEqual(cells(1), ["1", "shop 1", "✓ finished", "40 ms", "0.5000", ""]);
  items.add({ rows: [row(2, "finished", 1, { mape: "-inf" })] });
  items.sort("metrics.mape");
  assert.deepEqual(numbers(items), [1234, 1, 2], "a value that is not finite is sorted as if it was missing");
});

test("a list of runs is filtered by words, or by a condition on a column", () => {
  const columns = [{ title: "name", texts: ["small", "Large", "none"], keys: ["small", "Large", null] },
                   { title: "loss", texts: ["0.1000", "12", ""], keys: [0.1, 12, null] }];
  const passing = (filter) => [0, 1, 2].filter((at) => fits(columns, at, filter));
  assert.deepEqual(passing(""), [0, 1, 2]);
  assert.deepEqual(passing("LARGE"), [1]);
  assert.deepEqual(passing(" loss<3 "), [0]);
  assert.deepEqual(passing("loss >= 12"), [1]);
  assert.deepEqual(passing("loss = 0.1"), [0]);
  assert.deepEqual(passing("name = small"), [0]);
  assert.deepEqual(passing("loss > 1e3"), []);
  assert.deepEqual(passing("no < 1"), [], "there is no such column, so these are words");
});
