// The positions of the rows of the Logs tab. A row shows a line or, in columns, lines that several ranks printed at about
// the same time.

export const SLICE_MS = 8; // the longest time to work without a pause, so that the page stays responsive
const BLOCK = 512; // the number of rows between two looks at the clock
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

// The positions of rows of different heights, in lines of text. `heightOf` returns the height of the row at an index.
export class Tops {
  constructor(heightOf) {
    this.heightOf = heightOf;
    this.tops = [0]; // the tops of the rows that have been counted, and the end of the last row
  }

  get length() { return this.tops.length - 1; }
  get total() { return this.top(this.length); }

  // Count the rows up to `length`. Stop at the time `until`.
  grow(length, until) {
    while (this.length < length) {
      this.tops.push(this.tops[this.length] + this.heightOf(this.length));
      if (this.length % BLOCK === 0 && performance.now() > until) break;
    }
  }

  // Forget the first `count` rows, which must have been dropped. Return their height.
  drop(count) {
    const gone = Math.min(count, this.length), height = this.top(gone);
    this.tops.splice(0, gone);
    return height;
  }

  // Forget the heights of the row at an index and of all later rows, so that they are counted again.
  cut(at) {
    this.tops.length = Math.min(this.tops.length, Math.max(0, at) + 1);
  }

  // Add `more` to the height of a row.
  correct(at, more) {
    for (let below = at + 1; below < this.tops.length; below++) this.tops[below] += more;
  }

  // Return the height of all rows before the row at an index.
  top(at) {
    return this.tops[at] - this.tops[0];
  }

  // Return the index of the row that covers a height; `length` if the height is below all rows.
  at(height) {
    const below = lowerBound(this.tops, height + this.tops[0]); // a row covers its top, but not its end
    return this.tops[below] - this.tops[0] === height ? below : Math.max(0, below - 1);
  }
}

// The lines that a filter shows, with a column for each of the `ranks`. A line shares its row with the lines that other
// ranks printed within TOGETHER_S, and is below the lines that its rank printed before. Like a Filter, this list
// grows as lines arrive, and its first rows are dropped when their lines are dropped.
export class Columns {
  constructor(filter, ranks) {
    this.filter = filter;
    this.ranks = ranks;
    this.rows = []; // for each row, the line in each column; -1 where there is none
    this.times = []; // for each row, the time that its first line was printed, or that of the row above if it is later
    this.next = ranks.map(() => 0); // for each column, the first row below its last line
    this.placed = 0; // the number of lines of the filter that are in rows
    this.changed = Infinity; // the first row that has got another line since takeChanged() was called
  }

  get length() { return this.rows.length; }
  get done() { return this.filter.done && this.placed === this.filter.length; }

  // Place more lines for at most SLICE_MS. Return how many rows at the beginning have been dropped.
  work() {
    this.placed = Math.max(0, this.placed - this.filter.work());
    const until = performance.now() + SLICE_MS;
    while (this.placed < this.filter.length) {
      this.place(this.filter.line(this.placed++));
      if (this.placed % BLOCK === 0 && performance.now() > until) break;
    }
    return this.drop();
  }

  place(line) {
    const { rank, time } = this.filter.lines.at(line), { rows, times, next } = this, column = this.columnOf(rank);
    // A line without a rank says that lines are missing. All later lines are below this line.
    const row = rank < 0 ? rows.length : Math.max(next[column], lowerBound(times, time - TOGETHER_S));
    if (row === rows.length) {
      rows.push(this.ranks.map(() => -1));
      times.push(Math.max(time, times.at(-1) ?? 0));
    } else this.changed = Math.min(this.changed, row);
    rows[row][column] = line;
    if (rank < 0) next.fill(row + 1);
    else next[column] = row + 1;
  }

  columnOf(rank) {
    return Math.max(0, this.ranks.indexOf(rank));
  }

  drop() {
    const { first } = this.filter.lines, kept = this.rows.findIndex((cells) => cells.some((line) => line >= first));
    const count = kept < 0 ? this.rows.length : kept;
    this.rows.splice(0, count);
    this.times.splice(0, count);
    this.next = this.next.map((row) => Math.max(0, row - count));
    this.changed -= count;
    return count;
  }

  // Return the index of the first row that has got another line since the last call; Infinity if there is none.
  takeChanged() {
    const { changed } = this;
    this.changed = Infinity;
    return changed;
  }

  // Return the line in each column of a row, or -1 where there is none.
  cells(at) {
    return this.rows[at].map((line) => (line < this.filter.lines.first ? -1 : line));
  }

  // Return the index of the row with a line, or of the row at the line's time if the line is not shown.
  find(line) {
    if (line < this.filter.lines.first) return 0;
    const { rank, time } = this.filter.lines.at(line), column = this.columnOf(rank), from = lowerBound(this.times, time - TOGETHER_S);
    // The lines of a column are in order, and a line is never above the row of its time.
    for (let row = from; row < this.rows.length && this.rows[row][column] <= line; row++) if (this.rows[row][column] === line) return row;
    return Math.min(from, this.length - 1);
  }
}
