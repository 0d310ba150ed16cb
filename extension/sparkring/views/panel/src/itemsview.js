// The Items tab: a table in a box of fixed height, and the chosen item beside the table, with
// its failure, curves and lines. Only visible rows are elements of the page, so the table can have 10,000 items.

import { ChartsView } from "./charts.js";
import { button, make, put, toggle } from "./elements.js";
import { ITEM_COLUMNS, RIGHT } from "./constants.js";
import { value } from "./items.js";
import { LogView } from "./log.js";
import { itemCharts } from "./series.js";
import { count, plural, writer } from "./words.js";

const ROW = 20; // px, as in panel.css
const GAP = 12; // px, as in panel.css
const stateWords = writer(ITEM_COLUMNS.find(({ name }) => name === "state"), []);

export class ItemsView {
  constructor(panel) {
    this.panel = panel;
    this.items = panel.run.items;
    this.now = 0; // seconds since the run began
    this.chosen = null; // the number of the item that is shown in full
    this.goTo = null; // the number of the item that draw() has to scroll to
    this.search = make("input", { type: "search", placeholder: "Search", "aria-label": "Search the items", spellcheck: "false",
      oninput: () => {
        this.items.search(this.search.value);
        this.panel.schedule();
      } });
    this.failed = toggle("failed only", "show only what failed", false, (on) => {
      this.items.onlyFailed = on;
      this.items.search(this.search.value);
      this.panel.schedule();
    });
    this.count = make("span", { class: "sr-count", role: "status" });
    this.head = make("div", { class: "sr-itemrow sr-itemhead", role: "row" });
    this.head.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      this.items.sort(button.dataset.column);
      this.panel.schedule();
    });
    this.visible = make("div", { class: "sr-itemrows" });
    this.box = make("div", { class: "sr-itembox", tabindex: "0", role: "grid", "aria-label": "Items" }, this.head, this.visible);
    this.box.addEventListener("scroll", () => this.panel.schedule());
    this.box.addEventListener("click", (event) => {
      const row = event.target.closest("[data-item]");
      if (row) this.choose(Number(row.dataset.item) === this.chosen ? null : Number(row.dataset.item));
    });
    this.box.addEventListener("keydown", (event) => this.walk(event));
    this.whole = null; // the element that shows the chosen item; it is made only when it is needed, because most runs have no items
    this.pane = make("div", { class: "sr-itempane" }, this.box);
    this.element = make("div", { class: "sr-logview" },
      make("div", { class: "sr-logbar", role: "toolbar", "aria-label": "Items" }, this.search, this.failed, this.count), this.pane);
  }

  // Make the elements that show the chosen item.
  elements() {
    this.title = make("b");
    this.words = make("pre");
    this.charts = new ChartsView(this.panel);
    this.log = new LogView(this.panel);
    this.log.box.classList.add("sr-itemlog");
    this.log.box.setAttribute("aria-label", `Output of the ${this.items.noun}`);
    this.whole = make("div", { class: "sr-itemwhole", role: "region", "aria-label": `The chosen ${this.items.noun}`, tabindex: "0", hidden: true },
      make("div", { class: "sr-itemtitle" }, this.title,
        button("sr-tool", "log", `show the output of the ${this.items.noun} in the Logs tab`, () => this.showLog()),
        button("sr-tool", "✕", "close", () => this.close(), { "aria-label": "close" })),
      this.words, this.charts.element, this.log.box);
    this.whole.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
    this.pane.append(this.whole);
  }

  choose(item) {
    if (item === this.chosen) return;
    this.chosen = item;
    if (!this.whole) this.elements();
    this.charts.unzoom();
    this.log.setRanks(new Set(item === null ? [] : [item]));
    this.log.setFollow(true);
    this.panel.schedule();
  }

  // Choose an item, and scroll to its row.
  show(item) {
    this.items.onlyFailed = false;
    this.failed.setAttribute("aria-pressed", "false");
    this.items.search(this.search.value = "");
    this.choose(item);
    this.goTo = item;
    this.box.focus();
  }

  close() {
    this.choose(null);
    this.box.focus(); // the item will be hidden; without this line, the page would get the focus
  }

  showLog() {
    this.panel.chooseRanks(new Set([this.chosen]));
  }

  // Move from row to row with the keyboard. Enter shows the lines of the chosen item in the Logs tab.
  walk(event) {
    if (event.target !== this.box) return;
    const rows = this.items.shown(this.now), at = rows.findIndex((row) => row.item === this.chosen), last = rows.length - 1;
    const page = Math.max(1, Math.floor(this.box.clientHeight / ROW) - 2);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: last }[event.key];
    if (event.key === "/") this.search.focus();
    else if (event.key === "Escape") this.choose(null);
    else if (event.key === "Enter" && at >= 0) this.showLog();
    else if (to === undefined || !rows.length) return;
    else {
      const found = Math.min(Math.max(to, 0), last);
      this.choose(rows[found].item);
      this.reveal(found);
    }
    event.preventDefault();
  }

  // Scroll so that a row is visible below the head, which does not scroll.
  reveal(at) {
    const above = at * ROW, below = (at + 2) * ROW - this.box.clientHeight;
    this.box.scrollTop = Math.max(below, Math.min(above, this.box.scrollTop));
  }

  // Return whether everything that should be shown has been drawn.
  draw() {
    const now = this.now = this.panel.now() - (this.panel.run.state?.started ?? 0);
    this.name(this.panel.run.state?.pooled || "item");
    this.failed.hidden = !this.items.anyFailed;
    const columns = this.items.columns(), rows = this.items.shown(now);
    this.drawHead(columns);
    const known = this.items.rows.size;
    put(this.count, rows.length < known ? `${count(rows.length)} of ${count(known)}` : "");
    this.box.setAttribute("aria-rowcount", String(rows.length + 1));
    this.visible.style.height = `${rows.length * ROW}px`;
    this.panel.root.style.setProperty("--sr-items", `${(known + 1) * ROW}px`); // used when the run is over
    if (this.goTo != null) this.reveal(rows.findIndex((row) => row.item === this.goTo));
    this.goTo = null;
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - 1);
    const last = Math.min(rows.length, first + Math.ceil((this.box.clientHeight || 300) / ROW) + 2);
    const id = (item) => `${this.panel.id}-item-${item}`;
    let active = null;
    this.visible.replaceChildren(...rows.slice(first, last).map((row, at) => {
      const isChosen = row.item === this.chosen;
      if (isChosen) active = id(row.item);
      const element = make("div", { class: `sr-itemrow sr-item-${row.state}`, role: "row", "data-item": row.item, id: id(row.item),
        "aria-rowindex": first + at + 2, "aria-selected": String(isChosen), style: `transform: translateY(${(first + at) * ROW}px)` });
      element.append(...columns.map((column) => make("span", { role: "gridcell", class: side(column) }, column.write(value(row, column.name, now)))));
      return element;
    }));
    if (active) this.box.setAttribute("aria-activedescendant", active);
    else this.box.removeAttribute("aria-activedescendant");
    return this.drawChosen();
  }

  // Call the items by this noun.
  name(noun) {
    if (this.noun === noun) return;
    this.noun = noun;
    const nouns = plural(noun), title = nouns[0].toUpperCase() + nouns.slice(1);
    Object.assign(this.items, { noun, described: null });
    put(this.panel.buttons.items, title);
    this.box.setAttribute("aria-label", title);
    this.search.setAttribute("aria-label", `Search the ${nouns}`);
    if (noun === "trial") this.search.setAttribute("placeholder", "Search, or lr<0.01 width=64");
  }

  drawChosen() {
    if (!this.whole) return true;
    const row = this.items.rows.get(this.chosen);
    this.whole.hidden = !row;
    if (!row) return true;
    put(this.title, `${row.item}  ${row.name}`);
    put(this.words, [row.error || stateWords(row.state), row.advice, row.value].filter(Boolean).join("\n"));
    if (this.told?.row !== row) this.told = { row, ...itemCharts(row) };
    this.charts.draw(this.told);
    return this.log.draw();
  }

  drawHead(columns) {
    const { column, descending } = this.items;
    const signature = JSON.stringify([columns, column, descending]);
    if (signature === this.headDrawn) return;
    this.headDrawn = signature;
    const focused = this.head.contains(document.activeElement) ? document.activeElement.dataset.column : null;
    const widths = columns.map(({ width, share }) => [width, share]); // if the box is too narrow, it scrolls
    this.box.style.setProperty("--sr-columns", widths.map(([least, share]) => (share ? `minmax(${least}px, ${share}fr)` : `${least}px`)).join(" "));
    this.box.style.setProperty("--sr-width", `${widths.reduce((sum, [least]) => sum + least + GAP, -GAP)}px`);
    this.head.replaceChildren(...columns.map(({ name, title, kind }) => make("span",
      { role: "columnheader", class: side({ kind }),
        "aria-sort": name === column ? (descending ? "descending" : "ascending") : false },
      make("button", { type: "button", "data-column": name, title: `sort by ${title}` },
        title + (name === column ? (descending ? " ▾" : " ▴") : "")))));
    if (focused) this.head.querySelector(`[data-column="${CSS.escape(focused)}"]`)?.focus();
  }

  remove() {
    this.charts?.remove();
  }
}

function side({ kind }) {
  return RIGHT.includes(kind) ? "sr-n" : "";
}
