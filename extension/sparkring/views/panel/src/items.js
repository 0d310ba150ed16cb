// The items of a run, as far as the page knows them. The user can sort them by any column, and search them.

// A message has an array for each row, with the values in the order of FIELDS. The columns of the table are COLUMNS, the
// metrics, and LAST_COLUMNS. Each column has a name and a title.
const FIELDS = ["item", "name", "state", "attempt", "began", "took", "value", "error", "why", "place", "metrics", "parameters",
                "by", "curves"];
const COLUMNS = [["item", "#"], ["name", "item"], ["state", "state"], ["attempt", "attempt"], ["place", "host"], ["took", "time"]];
const LAST_COLUMNS = [["value", "value"], ["said", "error or last line"]];
const METRIC = "metrics."; // the prefix of the metrics' columns, since a metric may have the name of another column
const LINE_CHARACTERS = 200; // the most characters of an item's last line

export class Items {
  constructor() {
    this.rows = new Map(); // by the number of the item
    this.metrics = []; // names, in the order in which they arrived
    this.changes = 0; // the number of messages that have arrived
    this.lines = new Map(); // the last line of each item, by the number of the item
    this.places = new Set();
    this.used = new Set(["item", "name", "state", "took"]); // the columns that are shown; the other columns are still empty
    this.column = "item";
    this.descending = false;
    this.query = "";
    this.ordered = null; // the rows to show, in their order; null if they must be computed again
  }

  add(message) {
    this.changes += 1;
    for (const told of message.rows) {
      const row = Object.fromEntries(FIELDS.map((name, at) => [name, told[at]]));
      this.rows.set(row.item, row);
      this.tell(row);
      if (row.place) this.places.add(row.place); // an item whose result was kept has no host
      if (row.attempt > 1) this.used.add("attempt");
      if (this.places.size > 1) this.used.add("place");
      if (row.value) this.used.add("value");
      for (const name in row.metrics) if (!this.metrics.includes(name)) this.metrics.push(name);
    }
    this.ordered = null;
  }

  // Remember the last line of each item in a message of kind "lines".
  read({ rank, text, noise }) {
    const noisy = new Set(noise);
    rank.forEach((item, at) => {
      if (text[at].trim() && !noisy.has(at)) this.lines.set(item, text[at].slice(0, LINE_CHARACTERS));
    });
    for (const item of new Set(rank)) if (this.rows.has(item)) this.tell(this.rows.get(item));
    if (this.column === "said") this.ordered = null;
  }

  tell(row) {
    row.said = row.error || (this.lines.get(row.item) ?? "");
    if (row.said) this.used.add("said");
  }

  // Return the columns of the table: pairs of a name and a title.
  columns() {
    const isUsed = ([name]) => this.used.has(name);
    return [...COLUMNS.filter(isUsed), ...this.metrics.map((name) => [METRIC + name, name]), ...LAST_COLUMNS.filter(isUsed)];
  }

  search(query) {
    this.query = query.toLowerCase();
    this.ordered = null;
  }

  // Sort by a column. If the rows are already sorted by this column, reverse their order.
  sort(column) {
    this.descending = this.column === column && !this.descending;
    this.column = column;
    this.ordered = null;
  }

  // Return the rows to show, in their order. Rows without a value in the sorted column come last. `now` is in
  // seconds since the start of the run.
  shown(now) {
    if (this.ordered && this.column !== "took") return this.ordered;
    const key = (row) => value(row, this.column, now), sign = this.descending ? -1 : 1;
    const found = [...this.rows.values()].filter((row) => this.fits(row)).map((row) => [key(row), row]);
    found.sort(([a, one], [b, other]) => compare(a, b, sign) || one.item - other.item);
    this.ordered = found.map(([, row]) => row);
    return this.ordered;
  }

  fits(row) {
    return !this.query || `${row.item} ${row.name} ${row.state} ${row.value} ${row.error}`.toLowerCase().includes(this.query);
  }
}

// Return the value of a row in a column; undefined if the row has none.
export function value(row, column, now) {
  if (column === "took") return row.took ?? Math.max(0, now - row.began);
  return isMetric(column) ? row.metrics[column.slice(METRIC.length)] : row[column];
}

export function isMetric(column) {
  return column.startsWith(METRIC);
}

function compare(a, b, sign) {
  const missing = (each) => each === undefined || each === "" || Number.isNaN(each);
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  return a < b ? -sign : a > b ? sign : 0;
}
