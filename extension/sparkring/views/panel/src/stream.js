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

  // The number of the first batch that is kept.
  get first() {
    return Math.min(...this.numbered.keys());
  }

  get batches() {
    return [...this.numbered].sort(([a], [b]) => a - b).map(([, batch]) => batch);
  }
}

// Return a column of positions from `first` on, and a column for each of the parts that is shown, with the top of the part in each
// bar. The part that is on top comes first, since its bar is drawn from the bottom, and the others cover it.
export function stacked(batches, shown, first = 0) {
  const parts = Object.keys(BATCH_PARTS).filter((name) => shown.has(name)), sums = batches.map(() => 0);
  const columns = parts.map((name) => batches.map((batch, at) => (sums[at] += batch[name])));
  return { parts: parts.reverse(), data: [batches.map((_, at) => first + at), ...columns.reverse()] };
}

// Return the lowest and the highest position that a chart of these batches shows.
export function span(batches, first = 0) {
  return [first - 0.7, first + Math.max(batches.length, BATCH_SLOTS) - 0.3];
}

// Return the height of a chart of these bars, as description.bars_top() does. If a few bars are far higher than the others, they
// are cut, and their heights are written on them.
export function top(heights) {
  const ordered = [...heights].sort((a, b) => a - b), highest = ordered[ordered.length - 1];
  const usual = ordered[Math.floor(0.95 * (ordered.length - 1))];
  return 3 * usual > 0 && 3 * usual < highest ? 1.5 * usual : highest;
}

// Return the positions of the batches with round numbers: multiples of `unit`.
export function ticks(batches, unit, first = 0) {
  return batches.flatMap(({ batch }, at) => (batch % unit ? [] : [first + at]));
}

// Return what one batch shows at the cursor: pairs of a name and a text.
export function told(batch) {
  return BATCH_COLUMNS.map((column) => [column.title, writer(column, [])(batch[column.name])]).filter(([, text]) => text);
}
