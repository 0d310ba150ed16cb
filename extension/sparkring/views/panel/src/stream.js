// Stores the last batches of a stream, from the messages of kind "stream", and stacks their times for a chart.

import { BATCH_COLUMNS, BATCH_PARTS, BATCH_SLOTS } from "./constants.js";
import { writer } from "./words.js";

export class Stream {
  constructor() {
    this.told = null; // the last message
    this.numbered = new Map(); // maps the number of a batch, counted from 0 in the order in which they ended, to the batch
  }

  // A message has the batches that are new. The page may know some of them, because each page that is loaded is sent all.
  add(message) {
    const first = message.end - message.rows.length;
    message.rows.forEach((row, at) => this.numbered.set(first + at, Object.fromEntries(BATCH_COLUMNS.map(({ name }, column) => [name, row[column]]))));
    for (const number of this.numbered.keys()) if (number < message.end - message.kept) this.numbered.delete(number);
    this.told = message;
  }

  get batches() {
    return [...this.numbered].sort(([a], [b]) => a - b).map(([, batch]) => batch);
  }
}

// Return a column of positions, and a column for each of the parts that is shown, with the top of the part in each bar. The
// part that is on top comes first, since its bar is drawn from the bottom, and the others cover it.
export function stacked(batches, shown) {
  const parts = Object.keys(BATCH_PARTS).filter((name) => shown.has(name)), sums = batches.map(() => 0);
  const columns = parts.map((name) => batches.map((batch, at) => (sums[at] += batch[name])));
  return { parts: parts.reverse(), data: [batches.map((_, at) => at), ...columns.reverse()] };
}

// Return the lowest and the highest position that a chart of these batches shows.
export function span(batches) {
  return [-0.7, Math.max(batches.length, BATCH_SLOTS) - 0.3];
}

// Return what one batch shows at the cursor: pairs of a name and a text.
export function told(batch) {
  return BATCH_COLUMNS.map((column) => [column.title, writer(column, [])(batch[column.name])]).filter(([, text]) => text);
}
