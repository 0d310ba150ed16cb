// The Items tab: a table in a box of fixed height. Only the rows in sight have elements, so that 10,000 items are no problem.

import { make, put } from "./elements.js";
import { COLUMNS, LAST_COLUMNS, value } from "./items.js";
import { duration, number } from "./words.js";

const ROW = 20; // px, as in panel.css
const SIGNS = { running: "▶", finished: "✓", failed: "✗", stopped: "■", kept: "✓", pruned: "✂" };
// The least width of each column in px, and its share of the width that is left. If the box is too narrow, it scrolls.
const WIDTHS = { item: [48], name: [140, 1.5], state: [84], attempt: [56], took: [72], value: [80, 1], error: [140, 2] };
const METRIC_WIDTH = [80], GAP = 12; // px, as in panel.css
const RIGHT = new Set(["item", "attempt", "took"]);

export class ItemsView {
  constructor(panel) {
    this.panel = panel;
    this.items = panel.run.items;
    this.now = 0; // seconds since the run began
    this.chosen = null; // the number of the item that is shown in full
    this.search = make("input", { type: "search", placeholder: "Search", "aria-label": "Search the items", spellcheck: "false" });
    this.search.addEventListener("input", () => {
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
    this.visible = make("div", { class: "sr-itemrows", role: "rowgroup" });
    this.box = make("div", { class: "sr-itembox", tabindex: "0", role: "table", "aria-label": "Items" }, this.head, this.visible);
    this.box.addEventListener("scroll", () => this.panel.schedule());
    this.box.addEventListener("click", (event) => this.choose(event.target.closest("[data-item]")));
    this.box.addEventListener("keydown", (event) => this.walk(event));
    this.words = make("pre");
    this.whole = make("div", { class: "sr-itemwhole", hidden: true }, this.words, make("button", { type: "button", class: "sr-tool",
      title: "show what the item has printed", onclick: () => this.panel.chooseRanks(new Set([this.chosen])) }, "log"));
    this.element = make("div", { class: "sr-logview" },
      make("div", { class: "sr-logbar", role: "toolbar", "aria-label": "Items" }, this.search, this.count), this.box, this.whole);
  }

  choose(row) {
    const item = row ? Number(row.dataset.item) : null;
    if (item === null) return;
    this.chosen = this.chosen === item ? null : item;
    this.panel.schedule();
  }

  // By arrow keys from row to row; Enter shows the lines of the chosen one.
  walk(event) {
    if (event.target !== this.box) return;
    const rows = this.items.shown(this.now), at = rows.findIndex((row) => row.item === this.chosen);
    const to = { ArrowDown: Math.min(at + 1, rows.length - 1), ArrowUp: Math.max(at - 1, 0) }[event.key];
    if (event.key === "/") this.search.focus();
    else if (event.key === "Enter" && at >= 0) this.panel.chooseRanks(new Set([this.chosen]));
    else if (to === undefined || !rows.length) return;
    else {
      this.chosen = rows[to].item;
      const above = to * ROW, below = (to + 2) * ROW - this.box.clientHeight; // below the head, which stays
      this.box.scrollTop = Math.max(below, Math.min(above, this.box.scrollTop));
      this.panel.schedule();
    }
    event.preventDefault();
  }

  columns() {
    const first = COLUMNS.filter(([name]) => name !== "attempt" || this.items.tried);
    return [...first, ...this.items.metrics.map((name) => [name, name]), ...LAST_COLUMNS];
  }

  draw(now) {
    this.now = now;
    const columns = this.columns(), rows = this.items.shown(now);
    this.drawHead(columns);
    const known = this.items.rows.size;
    put(this.count, rows.length < known ? `${rows.length.toLocaleString("en")} of ${known.toLocaleString("en")}` : "");
    this.visible.style.height = `${rows.length * ROW}px`;
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - 1);
    const last = Math.min(rows.length, first + Math.ceil((this.box.clientHeight || 300) / ROW) + 2);
    const metrics = new Set(this.items.metrics);
    this.visible.replaceChildren(...rows.slice(first, last).map((row, at) => {
      const element = make("div", { class: `sr-itemrow sr-item-${row.state}`, role: "row", "data-item": row.item,
        "aria-selected": String(row.item === this.chosen), style: `transform: translateY(${(first + at) * ROW}px)` });
      for (const [column] of columns) element.append(cell(row, column, metrics.has(column), now));
      return element;
    }));
    const chosen = this.items.rows.get(this.chosen);
    this.whole.hidden = !chosen;
    put(this.words, chosen ? [`${chosen.item}  ${chosen.name}`, chosen.error, chosen.value].filter(Boolean).join("\n") : "");
  }

  drawHead(columns) {
    const { column, descending } = this.items;
    const signature = JSON.stringify([columns, column, descending]);
    if (signature === this.headDrawn) return;
    this.headDrawn = signature;
    const focused = this.head.contains(document.activeElement) ? document.activeElement.dataset.column : null;
    const widths = columns.map(([name]) => WIDTHS[name] ?? METRIC_WIDTH);
    this.box.style.setProperty("--sr-columns", widths.map(([least, share]) => (share ? `minmax(${least}px, ${share}fr)` : `${least}px`)).join(" "));
    this.box.style.setProperty("--sr-width", `${widths.reduce((sum, [least]) => sum + least + GAP, -GAP)}px`);
    this.head.replaceChildren(...columns.map(([name, title]) => make("span",
      { role: "columnheader", class: RIGHT.has(name) || this.items.metrics.includes(name) ? "sr-n" : "",
        "aria-sort": name === column ? (descending ? "descending" : "ascending") : false },
      make("button", { type: "button", "data-column": name, title: `sort by ${title || name}` },
        (title || name) + (name === column ? (descending ? " ▾" : " ▴") : "")))));
    if (focused) this.head.querySelector(`[data-column="${CSS.escape(focused)}"]`)?.focus();
  }
}

function cell(row, column, isMetric, now) {
  const found = value(row, column, now);
  const text = found === undefined || found === null ? "" : isMetric ? number(found) : column === "state" ? `${SIGNS[found]} ${found}`
    : column === "took" ? seconds(found) : String(found);
  return make("span", { role: "cell", class: RIGHT.has(column) || isMetric ? "sr-n" : "" }, text);
}

function seconds(found) {
  return found < 10 ? `${found.toFixed(found < 0.1 ? 3 : 1)} s` : duration(found);
}
