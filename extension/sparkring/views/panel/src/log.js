// The Logs tab.

import { button, download, make, put, toggle } from "./elements.js";
import { Filter } from "./lines.js";
import { columnsRow, lineRow, tag } from "./logrow.js";
import { Columns, SLICE_MS, Tops } from "./rows.js";
import { RANK_COLOURS } from "./constants.js";
import { count, elapsed, plural, rankNumbers } from "./words.js";

const ROW = 18; // px, the height of a line of text, as in panel.css
const PADDING = 16; // px, left and right of a row together, as in panel.css
const GAP = 12; // px, left and right of each column together; panel.css has the padding on the left
const SIGN = 3; // characters, as in panel.css
const AROUND = 4; // the number of lines of text that are drawn above and below the visible lines
const MOST_COLUMNS = 4;
const LEAST_CHARACTERS = 8; // if there is room for fewer characters, lines are cut off
const HIDDEN_MS = 250; // the wait before draw() checks again whether an invisible box has become visible
const MARKED_MS = 2000; // how long a line stays marked after the user has jumped to it
const EQUALLY_WIDE = /^[ -~]*$/; // text whose characters all have the same width

// The settings for the Logs tabs of all runs. If the browser allows it, the settings are kept for later pages.
export const LOOK = { wrap: false, time: false, columns: false };
const KEPT_AS = "sparkring-logs";
try {
  const kept = JSON.parse(localStorage.getItem(KEPT_AS)) ?? {};
  for (const name in LOOK) LOOK[name] = kept[name] === true;
} catch { /* the page may not store anything */ }

function choose(name, on) {
  LOOK[name] = on;
  try {
    localStorage.setItem(KEPT_AS, JSON.stringify(LOOK));
  } catch { /* as above */ }
}

// The lines of a run in a box of fixed height. Only the visible lines are elements of the page. `look` holds the settings.
// By default, each line is in one row, without its time.
export class LogView {
  constructor(panel, look = {}) {
    this.panel = panel;
    this.look = look;
    this.lines = panel.run.lines;
    this.filter = new Filter(this.lines);
    this.follow = this.fold = true;
    this.ranks = new Set(); // the ranks that the user has selected; empty: all ranks
    this.rows = new Map(); // maps the numbers of a row's lines, as text, to the row's element
    this.pendingRows = [];
    this.marked = -1; // the error to which the user has jumped
    this.elements();
    this.arrange();
  }

  elements() {
    const filter = (text, title, on, set) => toggle(text, title, on, (now) => {
      set(now);
      this.restart();
    });
    const stream = (name, text) => filter(text, `show what ranks write to ${text}`, true,
      (on) => (on ? this.filter.streams.add(name) : this.filter.streams.delete(name)));
    const look = (name, title) => toggle(name, title, Boolean(this.look[name]), (on) => {
      choose(name, on);
      this.panel.schedule();
    });
    this.search = make("input", { type: "search", placeholder: "Search", "aria-label": "Search the lines", spellcheck: "false",
      oninput: () => {
        this.filter.query = this.search.value;
        this.restart();
      },
      onkeydown: (event) => { if (event.key === "Escape") this.clearSearch(); } });
    this.count = make("span", { class: "sr-count", role: "status" });
    this.chip = button("sr-chip", "", "show all lines again", () => {
      this.panel.chooseRanks(new Set());
      this.box.focus(); // the chip has been hidden; without this line, the page would get the focus
    }, { hidden: true });
    this.errorButton = button("sr-tool", "", "", () => this.jumpToError(), { hidden: true }); // tell() sets the text
    this.followButton = toggle("follow", "scroll to new lines", true, (on) => this.setFollow(on));
    this.foldButton = filter("fold identical", "show identical lines from several ranks only once", true, (on) => { this.fold = on; });
    this.noiseButton = filter("start-up", "show TensorFlow's start-up messages", false, (on) => { this.filter.noise = on; });
    this.noiseButton.hidden = true;
    this.lookButtons = {
      wrap: look("wrap", "wrap long lines"),
      time: look("time", "show the time since the start of the run before each line"),
      columns: look("columns", `show the lines of up to ${MOST_COLUMNS} ranks side by side`),
    };
    const bar = make("div", { class: "sr-logbar", role: "toolbar", "aria-label": "Lines" },
      this.search, this.count, this.chip, this.errorButton, make("span", { class: "sr-spring" }),
      stream("o", "stdout"), stream("e", "stderr"), this.foldButton, this.noiseButton, ...Object.values(this.lookButtons),
      this.followButton, button("sr-tool", "copy", "copy the lines shown", () => this.panel.copy(this.texts())),
      button("sr-tool", "download", "save the lines shown to a file", () => this.download()));
    this.heads = make("div", { class: "sr-inrow sr-heads", hidden: true });
    this.spacer = make("div", { class: "sr-spacer" });
    this.box = make("div", { class: "sr-lines", tabindex: "0", role: "log", "aria-live": "off",
      "aria-label": "Output of the ranks" }, this.spacer);
    this.box.addEventListener("scroll", () => {
      // Ignore scrolling by this script, and scrolling by the browser after the box's height changes.
      if (this.target || this.box.scrollTop === this.placed) return;
      this.placed = null;
      const atEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - ROW / 2;
      if (atEnd !== this.follow) this.setFollow(atEnd);
      this.panel.schedule();
    });
    this.box.addEventListener("keydown", (event) => {
      const { log, overview } = this.panel;
      if (event.key === "/" && [log, overview.log].includes(this)) { // not the lines of one item, which have no toolbar
        this.panel.select("logs");
        log.search.focus();
        event.preventDefault();
      } else if (event.key === "Escape") this.clearSearch();
      else if (event.key === "End") this.setFollow(true);
    });
    // Double-clicking a search result clears the search and shows that line in context.
    this.box.addEventListener("dblclick", (event) => {
      const found = event.target.closest("[data-line]");
      if (found && this.filter.query) this.clearSearch(Number(found.dataset.line));
    });
    this.element = make("div", { class: "sr-logview" }, bar, this.heads, this.box);
  }

  clearSearch(line = null) {
    this.search.value = this.filter.query = "";
    this.restart();
    if (line !== null) this.goTo(line);
  }

  // Show a line in the middle of the box.
  goTo(line) {
    this.setFollow(false);
    this.target = { line, share: 0.5 };
  }

  // Go to the first error, or from one error to the next error, and mark the line briefly.
  jumpToError() {
    const { errors } = this.filter, at = Math.max(0, errors.findIndex((line) => line > this.marked));
    this.marked = errors[at];
    this.panel.say(`error ${at + 1} of ${count(errors.length)}`);
    this.marking = true;
    clearTimeout(this.unmark);
    this.unmark = setTimeout(() => {
      this.marking = false;
      this.panel.schedule();
    }, MARKED_MS);
    this.goTo(this.marked);
  }

  setRanks(ranks) {
    this.ranks = ranks;
    this.chip.hidden = !ranks.size;
    put(this.chip, ranks.size ? `${this.noun(ranks.size)} ${rankNumbers(ranks)} ×` : "");
    this.restart();
  }

  setFollow(on) {
    this.follow = on;
    this.followButton.setAttribute("aria-pressed", String(on));
    this.panel.schedule();
  }

  get pooled() { return Boolean(this.panel.run.state?.pooled); }
  get size() { return this.panel.run.state?.ranks.state.length ?? 0; }
  get began() { return this.panel.run.state?.started ?? 0; }

  // Return the noun for the labels of lines.
  noun(count) {
    return (count === 1 ? String : plural)(this.panel.run.state?.pooled || "rank");
  }

  // Show the lines that match the filter, after the user has changed it.
  restart() {
    this.marked = -1;
    this.arrange();
    this.panel.schedule();
  }

  // Choose the lines and columns again.
  arrange() {
    this.arranged = this.arrangement();
    this.cleared = this.lines.cleared;
    const all = this.ranks.size ? [...this.ranks].sort((a, b) => a - b) : [...Array(this.size).keys()];
    this.columns = this.look.columns && !this.pooled && this.size > 1 ? all.slice(0, MOST_COLUMNS) : null;
    this.unshown = this.columns ? all.length - this.columns.length : 0;
    this.filter.ranks = this.columns ? new Set(this.columns) : this.ranks;
    this.filter.fold = this.fold && !this.columns;
    this.filter.restart();
    this.shown = this.columns ? new Columns(this.filter, this.columns) : this.filter;
    this.foldButton.disabled = Boolean(this.columns);
    this.heads.hidden = !this.columns;
    this.heads.replaceChildren(make("span", { class: "sr-clock" }), ...(this.columns ?? []).map((rank) => (
      make("b", { class: `sr-part sr-tag sr-c${rank % RANK_COLOURS.length}` }, `rank ${rank}`))));
    this.measured = null;
  }

  // Return the values on which the columns depend, except the filter.
  arrangement() {
    return [Boolean(this.look.columns), this.size, this.pooled].join();
  }

  // Return the values, other than the lines, on which the heights of rows depend. `tag` and `clock` are widths in characters.
  measures() {
    const wrap = Boolean(this.look.wrap), columns = this.columns?.length ?? 0;
    const most = !this.pooled && this.size < 3 ? "0, 1" : `${this.pooled ? 1000 : this.size} ${this.noun(2)}`; // the longest label
    const tag = columns ? 0 : most.length;
    const clock = this.look.time ? Math.max(6, elapsed(this.panel.now() - this.began).length) + 1 : 0;
    return { wrap, columns, tag, clock, width: wrap || columns ? this.box.clientWidth : 0 };
  }

  // Add the rows of new lines, and remove those of dropped lines. Return the height of the removed rows.
  grow() {
    const dropped = this.shown.work(), above = dropped ? this.tops.drop(dropped) : 0;
    if (this.columns) this.tops.cut(this.shown.takeChanged());
    this.tops.grow(this.shown.length, performance.now() + SLICE_MS);
    return above;
  }

  // Apply the settings of this page, the number of ranks and the width of the box. The first visible line stays at its
  // place. Return whether all rows must be added again.
  adapt() {
    const first = this.measured && !this.follow ? this.tops.at(this.box.scrollTop / ROW) : this.shown.length;
    const line = first < this.shown.length ? this.shown.cells(first).find((each) => each >= 0) : null;
    if (this.arrangement() !== this.arranged) this.arrange();
    const measures = this.measures(), measured = Object.values(measures).join();
    if (measured === this.measured) return false;
    this.measured = measured;
    this.measure(measures);
    if (line !== null) this.target ??= { line, share: 0 };
    for (const [name, each] of Object.entries(this.lookButtons)) each.setAttribute("aria-pressed", String(Boolean(this.look[name])));
    this.lookButtons.columns.hidden = this.pooled || this.size < 2;
    return true;
  }

  measure({ wrap, columns, tag, clock, width }) {
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
    this.tag = tag;
    this.characters = Infinity; // the number of characters that fit into a line of text
    if (wrap) {
      const one = this.widthOfCharacter();
      const room = (width - PADDING - clock * one) / (columns || 1) - (columns ? GAP : 0) - (tag + SIGN) * one;
      this.characters = Math.max(LEAST_CHARACTERS, Math.floor(room / one - 0.1));
    }
    this.heights = new Map(); // maps lines to their heights, if heightOf() would compute other heights
    this.tops = new Tops((at) => this.heightOf(at));
    this.box.classList.toggle("sr-wrapped", wrap);
    for (const element of [this.box, this.heads]) {
      element.style.setProperty("--sr-tag", tag);
      element.style.setProperty("--sr-clock", clock);
      element.style.setProperty("--sr-characters", wrap ? this.characters : 0);
    }
    this.heads.style.width = `${width}px`; // the box may have a scroll bar
  }

  widthOfCharacter() {
    const probe = make("span", { class: "sr-probe" }, "0".repeat(100));
    this.box.append(probe);
    const { width } = probe.getBoundingClientRect();
    probe.remove();
    return width / 100;
  }

  // Return the height of a row in lines of text.
  heightOf(at) {
    if (this.characters === Infinity) return 1;
    let height = 1;
    for (const line of this.shown.cells(at)) {
      if (line >= 0) height = Math.max(height, this.heights.get(line) ?? Math.ceil(this.lines.at(line).text.length / this.characters));
    }
    return height;
  }

  draw() {
    if (!this.box.clientHeight) {
      // The box is not visible, perhaps only while the theme changes. No observer reports when the box becomes visible again,
      // so draw() must be called again later.
      clearTimeout(this.hidden);
      this.hidden = setTimeout(() => this.panel.schedule(), HIDDEN_MS);
      return true;
    }
    if (this.cleared !== this.lines.cleared) this.arrange();
    const above = this.measured ? this.grow() : 0; // this must come first, because adapt() looks at the rows
    if (this.adapt()) this.grow();
    const { shown, tops } = this;
    const done = shown.done && tops.length === shown.length;
    const end = tops.total + shown.length - tops.length;
    this.drawPending(end);
    const height = ROW * (end + this.pendingRows.length);
    if (this.height !== height) {
      this.height = height;
      this.spacer.style.height = `${height}px`;
      this.box.style.setProperty("--sr-lines", `${Math.max(ROW, height)}px`); // used when the run is over
    }
    if (this.target && done) {
      const { line, share } = this.target;
      this.place((tops.top(Math.max(0, shown.find(line))) + share) * ROW - share * this.box.clientHeight);
      this.target = null;
    } else if (this.follow) this.place(height);
    else if (above) this.place(this.box.scrollTop - above * ROW);
    const right = this.drawRows();
    this.tell();
    return done && right;
  }

  // Draw the visible rows. Return false if some had an unexpected height, so that rows must be drawn again.
  drawRows() {
    const { shown, tops, rows } = this, first = this.box.scrollTop / ROW, last = first + this.box.clientHeight / ROW;
    const from = tops.at(Math.max(0, first - AROUND)), kept = new Map();
    let top = tops.top(from), above = 0, right = true;
    for (let at = from; at < tops.length && top < last + AROUND; at++) {
      const cells = shown.cells(at), key = String(cells), row = rows.get(key) ?? this.row(cells.map((line) => this.numbered(line)), this.filter.query);
      kept.set(key, row);
      if (!row.isConnected) this.box.append(row);
      row.classList.toggle("sr-marked", Boolean(this.marking) && cells.includes(this.marked));
      row.style.transform = `translateY(${top * ROW}px)`;
      if (!this.columns) this.label(row, at, top > first);
      const height = this.heightOf(at);
      if (row.odd && Math.round(row.offsetHeight / ROW) !== height) {
        this.correct(row, cells);
        const more = this.heightOf(at) - height;
        tops.correct(at, more);
        if (top < first) above += more;
        right = false;
      }
      top += this.heightOf(at);
    }
    for (const [key, row] of rows) if (!kept.has(key)) row.remove();
    this.rows = kept;
    if (above && !this.follow) this.place(this.box.scrollTop + above * ROW); // this keeps the visible lines at their places
    return right;
  }

  // Return a row with lines; null stands for a column without a line.
  row(lines, query) {
    const began = this.look.time ? this.began : null;
    const row = this.columns ? columnsRow(lines, query, began) : lineRow(lines[0], query, began);
    row.odd = this.characters < Infinity && lines.some((line) => line && !EQUALLY_WIDE.test(line.text));
    return row;
  }

  // Remember the heights that the browser has given to the lines of a row.
  correct(row, cells) {
    row.querySelectorAll(".sr-said").forEach((said, at) => {
      this.heights.set(cells.filter((line) => line >= 0)[at], Math.round(said.offsetHeight / ROW));
    });
  }

  // Write the numbers of the ranks that printed a line in front of the line. In a traceback, only the first visible line
  // has these numbers.
  label(row, at, below) {
    const { shown, lines } = this, line = shown.line(at);
    const joins = (one) => one < shown.length && lines.continues(shown.line(one)) && shown.line(one - 1) === shown.line(one) - 1;
    const joined = at > 0 && joins(at);
    tag(row, this.ranksOf(line), this.tag, (count) => this.noun(count));
    row.classList.toggle("sr-block", joined || joins(at + 1));
    row.classList.toggle("sr-inblock", joined && below);
  }

  numbered(line) {
    return line < 0 ? null : { ...this.lines.at(line), number: line };
  }

  // Draw the lines whose end has not been printed yet, below all other lines. These take `end` lines of text.
  drawPending(end) {
    const { query, streams, ranks } = this.filter;
    const pending = this.lines.pending.filter(({ stream, rank }) => !query && streams.has(stream) && (!ranks.size || ranks.has(rank)));
    for (const row of this.pendingRows) row.remove();
    this.pendingRows = (this.columns ? this.inColumns(pending) : pending.map((line) => [line])).map((cells, at) => {
      const row = this.row(cells, "");
      if (!this.columns) tag(row, [cells[0].rank], this.tag, (count) => this.noun(count));
      row.classList.add("sr-pending");
      row.style.transform = `translateY(${(end + at) * ROW}px)`;
      return row;
    });
    this.box.append(...this.pendingRows);
  }

  inColumns(pending) {
    const columns = this.columns.map((rank) => pending.filter((line) => line.rank === rank));
    const longest = columns.reduce((one, other) => (other.length > one.length ? other : one));
    return longest.map((_, at) => columns.map((column) => column[at]));
  }

  // Say how many lines or ranks are shown or hidden.
  tell() {
    const { length } = this.filter, { errors, done, query, noisy, noise } = this.filter;
    this.box.toggleAttribute("data-empty", done && !length && !this.pendingRows.length);
    this.noiseButton.hidden = !noisy && !noise;
    this.errorButton.hidden = !errors.length;
    const which = this.marked < 0 ? "first" : "next";
    put(this.errorButton, `${which} error`);
    this.errorButton.title = `jump to the ${which} traceback, or to the ${which} stderr line that starts an error message`;
    const matches = `${count(length)} ${length === 1 ? "match" : "matches"}${done ? "" : " …"}`;
    const dropped = this.lines.first ? `${count(length)} lines; earlier lines are in the log files` : "";
    const unshown = this.unshown ? `${count(this.unshown)} more ${this.noun(this.unshown)} not shown` : "";
    put(this.count, [query ? matches : dropped, unshown].filter(Boolean).join(" · "));
  }

  place(top) {
    this.box.scrollTop = top;
    this.placed = this.box.scrollTop; // may differ from `top`, since the browser limits scrolling to the height of the lines
  }

  // Return the ranks that a row shows before its line.
  ranksOf(line) {
    const { rank } = this.lines.at(line);
    if (rank < 0) return [];
    if (!this.filter.fold) return [rank];
    const every = this.lines.ranksOf(line);
    return this.filter.ranks.size ? every.filter((each) => this.filter.ranks.has(each)) : every;
  }

  // Return all lines that pass the filter as text, for copies and downloads.
  texts() {
    return this.filter.found.map((line) => {
      const ranks = this.ranksOf(line), { text, time } = this.lines.at(line);
      const clock = this.look.time && ranks.length ? `${elapsed(time)} ` : "";
      return `${clock}${ranks.length ? `[${rankNumbers(ranks)}]` : "…"} ${text}\n`;
    }).join("");
  }

  download() {
    download(new Blob([this.texts()], { type: "text/plain" }), `${this.panel.run.id}.log`);
  }
}
