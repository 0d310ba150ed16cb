// Stores the last batches of a stream, from the messages of kind "stream", and stacks their times for a chart.

// The parts of a batch's time, in the order of describe.PARTS, and their colours as in views/sections/stream.py.
export const PARTS = ["moving", "reading", "training", "saving", "waiting"];
export const PART_COLOURS = ["#2f80d0", "#9262d6", "#23935a", "#b97a10", "#9aa0a6"];
const FIELDS = ["batch", "rows", "how", "times", "saved", "time"];
const FEWEST_SLOTS = 30; // a chart has room for at least this many batches, so that the bars of a few batches are narrow

export class Stream {
  constructor() {
    this.told = null; // the last message
    this.numbered = new Map(); // maps the number of a batch, counted from 0 in the order in which they ended, to the batch
  }

  // A message has the batches that are new. The page may know some of them, because each page that is loaded is sent all.
  add(message) {
    const first = message.end - message.rows.length;
    message.rows.forEach((row, at) => this.numbered.set(first + at, Object.fromEntries(FIELDS.map((name, column) => [name, row[column]]))));
    for (const number of this.numbered.keys()) if (number < message.end - message.kept) this.numbered.delete(number);
    this.told = message;
  }

  get batches() {
    return [...this.numbered].sort(([a], [b]) => a - b).map(([, batch]) => batch);
  }
}

// Return a column of positions, and a column for each of the PARTS that is shown, with the top of the part in each bar. The
// part that is on top comes first, since its bar is drawn from the bottom, and the others cover it.
export function stacked(batches, shown) {
  const parts = PARTS.filter((name) => shown.has(name)), sums = batches.map(() => 0);
  const columns = parts.map((name) => batches.map(({ times }, at) => (sums[at] += times[PARTS.indexOf(name)])));
  return { parts: parts.reverse(), data: [batches.map((_, at) => at), ...columns.reverse()] };
}

// Return the lowest and the highest position that a chart of these batches shows.
export function span(batches) {
  return [-0.7, Math.max(batches.length, FEWEST_SLOTS) - 0.3];
}

// Return what one batch shows at the cursor: pairs of a name and a text.
export function told(batch, write) {
  const how = batch.how === "trained" ? "" : ` ${batch.how}`, total = batch.times.reduce((sum, time) => sum + time, 0);
  return [[`batch ${batch.batch.toLocaleString("en")}${how}`, batch.rows.toLocaleString("en") + (batch.rows === 1 ? " row" : " rows")],
    ...PARTS.map((name, at) => [name, write(batch.times[at])]), ["together", write(total)], ...(batch.saved ? [["saved", "✓"]] : [])];
}
