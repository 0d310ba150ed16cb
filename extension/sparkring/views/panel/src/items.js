// The items of a run, as far as the page knows them. The user can sort them by any column, and search them.

import { ITEM_COLUMNS, ITEM_DETAILS } from "./constants.js";
import { writer } from "./words.js";

// A message has an array for each row, with the values in this order.
const FIELDS = [...ITEM_COLUMNS.map(({ name }) => name), ...ITEM_DETAILS];
const ERROR_TITLE = "error or last line"; // the page also knows what items have printed
// The column of a metric or a parameter has a prefix, since it may have the name of another column.
const GROUPED = /^(metrics|parameters)\.(.*)$/s;
const CONDITION = /^(.+?)\s*(<=|>=|[<>=])\s*(.+)$/;
const LINE_CHARACTERS = 200; // the most characters of an item's last line

export class Items {
  constructor() {
    this.rows = new Map(); // by the number of the item
    this.names = { metrics: [], parameters: [] }; // in the order in which they arrived
    this.noun = "item";
    this.anyFailed = this.onlyFailed = false;
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
      this.anyFailed ||= row.state === "failed";
      for (const [group, names] of Object.entries(this.names)) for (const name in row[group]) if (!names.includes(name)) names.push(name);
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

  // Return the columns of the table, each with the function that writes its cells. A metric or a parameter has a column of its own.
  columns() {
    const titles = { error: ERROR_TITLE, name: this.noun };
    const grouped = (column) => this.names[column.name]?.map((name) => {
      const cells = this.cells(`${column.name}.${name}`), kind = cells.some((cell) => typeof cell === "string" && !isOdd(cell)) ? "text" : "number";
      return { ...column, name: `${column.name}.${name}`, title: name, kind, write: writer({ kind }, cells) };
    });
    this.described ??= ITEM_COLUMNS.flatMap((column) => grouped(column) ?? [{ ...column, title: titles[column.name] ?? column.title, write: writer(column, []) }]);
    // The parameters say all that the name of a trial says.
    return this.described.filter(({ name, needs = 0 }) => (needs ? this.values.get(name).size >= needs : name !== "name" || !this.names.parameters.length));
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
    const key = (row) => value(row, this.column, now), sign = this.descending ? -1 : 1;
    const isFirst = ({ state }) => this.column === "item" && !this.descending && state === "running"; // so that they are in sight
    const found = [...this.rows.values()].filter((row) => this.fits(row)).map((row) => [key(row), row]);
    found.sort(([a, one], [b, other]) => isFirst(other) - isFirst(one) || compare(a, b, sign) || one.item - other.item);
    this.ordered = found.map(([, row]) => row);
    return this.ordered;
  }

  // Return whether a row has the text that the user searches for, or meets conditions such as lr<0.01 width=64.
  fits(row) {
    if (this.onlyFailed && row.state !== "failed") return false;
    if (!this.query) return true;
    const met = this.query.trim().split(/\s+/).map((part) => meets(row, part));
    return met.every((answer) => answer !== null) ? met.every(Boolean) : `${row.item} ${row.name} ${row.state} ${row.value} ${row.error}`.toLowerCase().includes(this.query);
  }
}

// Return the value of a row in a column; undefined if the row has none.
export function value(row, column, now) {
  if (column === "error") return row.said;
  if (column === "took") return row.took ?? Math.max(0, now - row.began);
  const [, group, name] = GROUPED.exec(column) ?? [];
  return group ? row[group][name] : row[column];
}

// Metrics that are not finite are texts.
function isOdd(cell) {
  return /^(nan|-?inf)$/.test(cell);
}

// Return whether a row meets a condition on a parameter or a metric; null if the text is not such a condition.
function meets(row, text) {
  const [, name, sign, wanted] = CONDITION.exec(text) ?? [], cells = { ...row.metrics, ...row.parameters };
  const key = Object.keys(cells).find((known) => known.toLowerCase() === name);
  return key === undefined ? null : holds(cells[key], sign, wanted);
}

// Return whether the row at an index of a list of runs passes a filter: a condition on a column, such as "loss < 0.1", or words.
export function fits(columns, at, filter) {
  const [, title, sign, wanted] = CONDITION.exec(filter.trim()) ?? [];
  const keys = columns.find((column) => column.title === title)?.keys;
  if (keys) return holds(keys[at], sign, wanted);
  return columns.map(({ texts }) => texts[at]).join(" ").toLowerCase().includes(filter.trim().toLowerCase());
}

// Texts are in alphabetical order, but none is less or greater than a number.
function holds(cell, sign, wanted) {
  if (cell == null) return false;
  const limit = Number(wanted), isNumber = typeof cell === "number";
  if (Number.isNaN(limit) ? isNumber : !isNumber && sign !== "=") return false;
  const [one, other] = isNumber ? [cell, limit] : [String(cell).toLowerCase(), wanted.toLowerCase()];
  return (sign.includes("=") && one === other) || (sign.includes("<") && one < other) || (sign.includes(">") && one > other);
}

// Compare two cells for sorting. Missing cells come last.
export function compare(a, b, sign) {
  const missing = (each) => each == null || each === "" || Number.isNaN(each) || isOdd(each);
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  return a < b ? -sign : a > b ? sign : 0;
}
