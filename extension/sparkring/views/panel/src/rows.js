// The positions of the rows of the Logs tab. A row shows a line or, in columns, lines that several ranks printed at about
// the same time.

export const SLICE_MS = 8; // the longest time to work without a pause, so that the page stays responsive
const BLOCK = 512; // the number of rows whose heights are stored as one sum
const TOGETHER_S = 0.2; // lines of different ranks share a row if they were printed within this time

// Return the first index in a sorted list whose value is not less than `wanted`.
export function lowerBound(sorted, wanted) {
  let from = 0, to = sorted.length;
  while (from < to) {
    const middle = (from + to) >> 1;
    if (sorted[middle] < wanted) from = middle + 1;
    else to = middle;
  }
  return from;
}

// The positions of rows of different heights, in lines of text. Only sums of heights are stored, so a million rows need
// little memory. `heightOf` returns the height of the row at an index, and is called repeatedly.
export class Tops {
  constructor(heightOf) {
    this.heightOf = heightOf;
    this.clear();
  }

  clear() {
    this.sums = [];
    this.length = 0; // the number of rows that have been counted
    this.dropped = 0; // the number of rows that were dropped before these rows
  }

  // Return the height of all rows that have been counted.
  get total() { return this.sums.reduce((sum, each) => sum + each, 0); }

  // Count the rows up to `length`. Stop at the time `until`.
  grow(length, until) {
    while (this.length < length) {
      const block = Math.floor((this.dropped + this.length) / BLOCK);
      this.sums[block] = (this.sums[block] ?? 0) + this.heightOf(this.length++);
      if (this.length % BLOCK === 0 && performance.now() > until) break;
    }
  }

  // Forget the first `count` rows, which must have been dropped. Return their height.
  drop(count) {
    const before = this.total;
    if (count >= this.length) {
      this.clear();
      return before;
    }
    this.dropped += count;
    this.length -= count;
    const block = Math.floor(this.dropped / BLOCK), end = Math.min(this.length, (block + 1) * BLOCK - this.dropped);
    this.sums.fill(0, 0, block);
    this.sums[block] = 0;
    for (let at = 0; at < end; at++) this.sums[block] += this.heightOf(at);
    return before - this.total;
  }

  // Forget the heights of the row at an index and of all later rows, so that they are counted again.
  cut(at) {
    if (at >= this.length) return;
    const block = Math.floor((this.dropped + Math.max(0, at)) / BLOCK);
    this.length = Math.max(0, block * BLOCK - this.dropped);
    this.sums.length = block;
  }

  // Add `more` to the height of a row. heightOf() already returns the new height.
  correct(at, more) {
    this.sums[Math.floor((this.dropped + at) / BLOCK)] += more;
  }

  // Return the height of all rows before the row at an index.
  top(at) {
    const block = Math.floor((this.dropped + at) / BLOCK);
    let top = 0;
    for (let each = 0; each < block; each++) top += this.sums[each];
    for (let each = Math.max(0, block * BLOCK - this.dropped); each < at; each++) top += this.heightOf(each);
    return top;
  }

  // Return the index of the row that covers a height; `length` if the height is below all rows.
  at(height) {
    let block = 0, top = 0;
    while (block < this.sums.length && top + this.sums[block] <= height) top += this.sums[block++];
    let at = Math.max(0, block * BLOCK - this.dropped);
    while (at < this.length && (top += this.heightOf(at)) <= height) at++;
    return Math.min(at, this.length);
  }
}

// The lines that a filter shows, with a column for each of the `ranks`. A line shares its row with the lines that other
// ranks printed within TOGETHER_S, and is below the lines that its rank printed before. Like a Filter, this list
// grows as lines arrive, and its first rows are dropped when their lines are dropped.
export class Columns {
  constructor(filter, ranks) {
    this.filter = filter;
    this.ranks = ranks;
    this.columns = ranks.map(() => ({ rows: [], lines: [], next: 0 }));
    this.times = []; // the times of the rows
    this.dropped = 0; // the number of rows that have been dropped
    this.placed = 0; // the number of lines shown by the filter that are in rows
    this.changed = Infinity; // the first row that has got another line since takeChanged() was called
  }

  get length() { return this.times.length; }
  get done() { return this.filter.done && this.placed === this.filter.length; }

  work() {
    this.placed -= Math.min(this.placed, this.filter.work());
    const until = performance.now() + SLICE_MS;
    while (this.placed < this.filter.length) {
      this.place(this.filter.line(this.placed++));
      if (this.placed % BLOCK === 0 && performance.now() > until) break;
    }
    return this.drop();
  }

  place(line) {
    const { rank, time } = this.filter.lines.at(line), { times, dropped } = this;
    const column = this.columns[Math.max(0, this.ranks.indexOf(rank))];
    // A line without a rank says that lines are missing. All later lines are below this line.
    const row = rank < 0 ? dropped + times.length : Math.max(column.next, dropped + lowerBound(times, time - TOGETHER_S));
    const last = times.length ? times[times.length - 1] : 0;
    if (row === dropped + times.length) times.push(Math.max(time, last));
    else this.changed = Math.min(this.changed, row);
    column.rows.push(row);
    column.lines.push(line);
    column.next = row + 1;
    if (rank < 0) for (const each of this.columns) each.next = row + 1;
  }

  drop() {
    const { first } = this.filter.lines;
    if (!this.columns.some(({ lines }) => lines.length && lines[0] < first)) return 0;
    let kept = this.dropped + this.times.length;
    for (const { rows, lines } of this.columns) {
      const gone = lowerBound(lines, first);
      rows.splice(0, gone);
      lines.splice(0, gone);
      if (rows.length) kept = Math.min(kept, rows[0]);
    }
    const count = kept - this.dropped;
    this.times.splice(0, count);
    this.dropped = kept;
    return count;
  }

  // Return the index of the first row that has got another line since the last call; Infinity if there is none.
  takeChanged() {
    const changed = this.changed - this.dropped;
    this.changed = Infinity;
    return changed;
  }

  // Return the line in each column of a row, or -1 where there is none.
  cells(at) {
    const row = this.dropped + at;
    return this.columns.map(({ rows, lines }) => {
      const found = lowerBound(rows, row);
      return rows[found] === row ? lines[found] : -1;
    });
  }

  // Return the index of the row with a line, or of the row at the line's time if the line is not shown.
  find(line) {
    if (line < this.filter.lines.first) return 0;
    const { rank, time } = this.filter.lines.at(line);
    const column = this.columns[Math.max(0, this.ranks.indexOf(rank))], found = lowerBound(column.lines, line);
    if (column.lines[found] === line) return column.rows[found] - this.dropped;
    return Math.min(lowerBound(this.times, time - TOGETHER_S), this.times.length - 1);
  }
}
