// What `%runs` shows: a list of runs, which can be sorted and filtered and whose rows open, and runs over one another.

import { ChartsView, newLooks } from "./charts.js";
import { button, choice, make, put, refill, refillChoice } from "./elements.js";
import { compare, fits } from "./items.js";

const LEAST = 2, MOST = 8; // runs to compare; views/compare.py has the same number
const WAITING = "waiting for the kernel …", ROOM = 306; // px, for all charts

export class RunsView {
  constructor(run, place) {
    Object.assign(this, { run, column: null, descending: false, selected: new Set(), scheduleState: () => this.schedule() });
    Object.assign(this, { id: run.id, looks: newLooks(), chosen: new Set(), say: (text) => put(this.said, text) }); // what ChartsView uses of a panel
    this.search = make("input", { type: "search", placeholder: "Filter", title: "words, or a condition such as loss < 0.1",
      "aria-label": "Filter the runs", spellcheck: "false", oninput: () => this.schedule() });
    this.count = make("span", { class: "sr-count" });
    this.button = button("sr-tool", "", "show the selected runs over one another", () => this.compare());
    [this.head, this.body, this.facts] = [make("tr"), make("tbody"), make("div")];
    this.list = make("div", { hidden: !run.listing.table },
      make("div", { class: "sr-logbar", role: "toolbar", "aria-label": "Runs" }, this.search, this.count, this.button, this.said = make("small", { role: "status" })),
      make("div", { class: "sr-runsbox" }, make("table", { class: "sr-table" }, make("thead", {}, this.head), this.body)));
    this.by = make("label", {}, "compared by: ", this.axis = choice("Horizontal axis of the comparison", [], () => this.schedule()));
    this.charts = new ChartsView(this, () => ROOM);
    this.compared = make("div", { class: "sr-compared", role: "region", "aria-label": "Comparison", hidden: true },
      make("div", {}, this.by, this.charts.element), this.facts);
    this.root = make("div", { class: "sr-run sr-panel sr-runs", role: "region", "aria-label": "Runs", tabindex: "-1" }, this.list, this.compared);
    place.append(this.root);
    this.resized = new ResizeObserver(() => this.schedule());
    this.resized.observe(this.root);
  }

  // Make two rows for each run: one with its facts, and one in which the run opens.
  fill({ runs, places, columns }) {
    this.table = this.run.listing.table;
    this.rows = runs.map((run, at) => {
      const name = columns[0].texts[at], inside = make("td", { colspan: columns.length + 1 }), whole = make("tr", { class: "sr-runwhole", hidden: true }, inside);
      const box = make("input", { type: "checkbox", "aria-label": `select run ${name}`,
        onchange: () => { this.selected[box.checked ? "add" : "delete"](run); this.schedule(); } });
      const open = button("sr-tool", name, "open the run", () => {
        whole.hidden = !whole.hidden;
        open.setAttribute("aria-expanded", String(!whole.hidden));
        inside.replaceChildren(make("div", { class: "sr-place", "data-page": this.run.model.get("page"), "data-sparkring": !whole.hidden && places[at] }, make("small", {}, WAITING)));
        this.run.look();
      }, { "aria-expanded": "false" });
      const cells = columns.slice(1).map(({ texts, right }) => make("td", { class: right ? "sr-n" : false, title: texts[at] }, texts[at]));
      const row = make("tr", { onclick: ({ target }) => target.closest("button, input") || open.click() }, make("td", {}, box), make("td", {}, open), ...cells);
      return { at, row, whole };
    });
  }

  compare() {
    const runs = this.table.runs.filter((run) => this.selected.has(run)).reverse(); // the oldest run is A
    this.run.model.send({ kind: "compare", run: this.run.id, runs });
    this.say(WAITING);
  }

  schedule() {
    this.frame ||= requestAnimationFrame(() => {
      const { table, compared } = this.run.listing;
      this.frame = 0;
      if (table) this.drawTable(table);
      if (compared) this.drawCompared(compared);
    });
  }

  drawTable(table) {
    if (this.table !== table) this.fill(table);
    const { columns } = table, keys = columns.find(({ title }) => title === this.column)?.keys, sign = this.descending ? -1 : 1;
    const shown = this.rows.filter(({ at }) => fits(columns, at, this.search.value)), { size } = this.selected;
    if (keys) shown.sort((a, b) => compare(keys[a.at], keys[b.at], sign) || a.at - b.at);
    put(this.count, shown.length < this.rows.length ? `${shown.length} of ${this.rows.length}` : "");
    put(this.button, size < LEAST ? "select runs to compare them" : size > MOST ? `select at most ${MOST} runs` : `compare ${size} runs`);
    this.button.disabled = size < LEAST || size > MOST;
    const order = JSON.stringify([this.column, sign, shown.map(({ at }) => at)]);
    if (this.order === order) return; // rows that move would lose the focus
    this.order = order;
    this.body.replaceChildren(...shown.flatMap(({ row, whole }) => [row, whole]));
    this.head.replaceChildren(make("td"), ...columns.map(({ title, right }) => make(title ? "th" : "td", { class: right ? "sr-n" : false,
      "aria-sort": title === this.column ? (sign < 0 ? "descending" : "ascending") : false },
      title && button("sr-tool", title + (title === this.column ? (sign < 0 ? " ▾" : " ▴") : ""), `sort by ${title}`, () => this.sort(title)))));
  }

  // Sort by a column. If the rows are already sorted by this column, reverse their order.
  sort(title) {
    Object.assign(this, { column: title, descending: this.column === title && !this.descending });
    this.drawTable(this.table);
    this.head.querySelector("[aria-sort] button").focus(); // the button that was clicked has been replaced
  }

  drawCompared(compared) {
    this.compared.hidden = false;
    if (this.drawn !== compared) this.say("");
    if (this.drawn !== compared) refill(this.facts, compared.html); // made and escaped by views/compare.py
    this.drawn = compared;
    refillChoice(this.axis, Object.keys(compared.charts));
    this.by.hidden = this.axis.options.length < 2;
    this.charts.draw(compared.charts[this.axis.value] ?? { charts: [], axes: {} });
  }

  remove() {
    this.resized.disconnect();
    for (const part of [this.charts, this.root]) part.remove();
  }
}
