// The items of a run, as far as the page knows them. The user can sort them by any column, and search them.

import { ITEM_COLUMNS, ITEM_DETAILS } from "./constants.js";
import { writer } from "./words.js";

// A message has an array for each row, with the values in this order.
const FIELDS = [...ITEM_COLUMNS.map(({ name }) => name), ...ITEM_DETAILS];
const ERROR_TITLE = "error or last line"; // the page also knows what items have printed
const METRIC = "metrics."; // the prefix of the metrics' columns, since a metric may have the name of another column
const LINE_CHARACTERS = 200; // the most characters of an item's last line

export class Items {
  constructor() {
    this.rows = new Map(); // by the number of the item
    this.metrics = []; // names, in the order in which they arrived
    this.changes = 0; // the number of messages that have arrived
    this.lines = new Map(); // the last line of each item, by the number of the item
    this.values = new Map(ITEM_COLUMNS.map(({ name }) => [name, new Set()])); // different values of each column, until it is shown
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
      for (const name in row.metrics) if (!this.metrics.includes(name)) this.metrics.push(name);
    }
    this.ordered = this.described = null;
  }

  // Remember the last line of each item in a message of kind "lines".
  read({ rank, text, noise }) {
    const noisy = new Set(noise);
    rank.forEach((item, at) => {
      if (text[at].trim() && !noisy.has(at)) this.lines.set(item, text[at].slice(0, LINE_CHARACTERS));
    });
    for (const item of new Set(rank)) if (this.rows.has(item)) this.tell(this.rows.get(item));
    if (this.column === "error") this.ordered = null;
  }

  tell(row) {
    row.said = row.error || (this.lines.get(row.item) ?? "");
    for (const { name, needs = 0 } of ITEM_COLUMNS) {
      const seen = this.values.get(name), cell = value(row, name, 0);
      if (seen.size < needs && cell) seen.add(cell);
    }
  }

  // Return the columns of the table, each with the function that writes its cells. A metric has a column of its own.
  columns() {
    this.described ??= ITEM_COLUMNS.flatMap((column) => (column.kind === "numbers"
      ? this.metrics.map((name) => ({ ...column, name: METRIC + name, title: name, kind: "number" })) : [column]))
      .map((column) => ({ ...column, ...(column.name === "error" && { title: ERROR_TITLE }), write: writer(column, isMetric(column.name) ? this.cells(column.name) : []) }));
    return this.described.filter(({ name, needs = 0 }) => !needs || this.values.get(name).size >= needs);
  }

  cells(column) {
    return [...this.rows.values()].map((row) => value(row, column)).filter((cell) => cell !== undefined);
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
    const key = (row) => (isMetric(this.column) ? Number : (cell) => cell)(value(row, this.column, now)), sign = this.descending ? -1 : 1;
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
  if (column === "error") return row.said;
  if (column === "took") return row.took ?? Math.max(0, now - row.began);
  return isMetric(column) ? row.metrics[column.slice(METRIC.length)] : row[column];
}

export function isMetric(column) {
  return column.startsWith(METRIC);
}

const CONDITION = /^(.+?)\s*(<=|>=|<|>|=)\s*(\S+)$/;

// Return whether the row at an index of a list of runs passes a filter: a condition on a column, such as "loss < 0.1", or words.
export function fits(columns, at, filter) {
  const [, title, sign, wanted] = CONDITION.exec(filter.trim()) ?? [];
  const keys = columns.find((column) => column.title === title)?.keys;
  if (!keys) return columns.map(({ texts }) => texts[at]).join(" ").toLowerCase().includes(filter.trim().toLowerCase());
  const order = compare(keys[at], typeof keys[at] === "number" ? Number(wanted) : wanted, 1);
  return keys[at] !== null && ((sign.includes("=") && order === 0) || (sign.includes("<") && order < 0) || (sign.includes(">") && order > 0));
}

// Compare two cells for sorting. Missing cells come last.
export function compare(a, b, sign) {
  const missing = (each) => each == null || each === "" || Number.isNaN(each);
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  return a < b ? -sign : a > b ? sign : 0;
}
