// The Logs tab.

import { button, download, make, put, toggle } from "./elements.js";
import { Filter } from "./lines.js";
import { RANK_COLOURS } from "./series.js";
import { rankNumbers } from "./words.js";

const ROW = 18; // px, as in panel.css
const HIDDEN_MS = 250; // the wait before draw() checks again whether an invisible box has become visible
const STREAMS = { o: ["stdout", "│"], e: ["stderr", "!"], m: ["message", "»"], g: ["", "…"] };

// The lines of a run in a box of fixed height. Only the visible lines are elements of the page.
export class LogView {
  constructor(panel) {
    this.panel = panel;
    this.lines = panel.run.lines;
    this.filter = new Filter(this.lines);
    this.follow = true;
    this.rows = new Map(); // line number → element
    this.pendingRows = [];
    this.elements();
  }

  elements() {
    const filter = (text, title, on, set) => toggle(text, title, on, (now) => {
      set(now);
      this.restart();
    });
    const stream = (name) => filter(STREAMS[name][0], `show what ranks write to ${STREAMS[name][0]}`, true,
      (on) => (on ? this.filter.streams.add(name) : this.filter.streams.delete(name)));
    this.search = make("input", { type: "search", placeholder: "Search", "aria-label": "Search the lines", spellcheck: "false",
      oninput: () => {
        this.filter.query = this.search.value;
        this.restart();
      },
      onkeydown: (event) => { if (event.key === "Escape") this.clearSearch(); } });
    this.count = make("span", { class: "sr-count", role: "status" });
    this.chip = button("sr-chip", "", "show all lines again", () => {
      this.panel.chooseRanks(new Set());
      this.box.focus(); // the chip has been hidden; without this line, its focus would go to the page
    }, { hidden: true });
    this.followButton = toggle("follow", "scroll to new lines", true, (on) => this.setFollow(on));
    this.noiseButton = filter("start-up", "show TensorFlow's start-up messages", false, (on) => { this.filter.noise = on; });
    this.noiseButton.hidden = true;
    const bar = make("div", { class: "sr-logbar", role: "toolbar", "aria-label": "Lines" },
      this.search, this.count, this.chip, make("span", { class: "sr-spring" }), stream("o"), stream("e"),
      filter("fold equal", "show identical lines from several ranks only once", true, (on) => { this.filter.fold = on; }),
      this.noiseButton, this.followButton, button("sr-tool", "copy", "copy these lines", () => this.panel.copy(this.texts())),
      button("sr-tool", "download", "save these lines as a file", () => this.download()));
    this.spacer = make("div", { class: "sr-spacer" });
    this.box = make("div", { class: "sr-lines", tabindex: "0", role: "log", "aria-live": "off",
      "aria-label": "Output of the ranks" }, this.spacer);
    this.box.addEventListener("scroll", () => {
      if (this.box.scrollTop === this.placed) return; // this script scrolled, not the user
      this.placed = null;
      const atEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - ROW / 2;
      if (atEnd !== this.follow) this.setFollow(atEnd);
      this.panel.schedule();
    });
    this.box.addEventListener("keydown", (event) => {
      if (event.key === "/" && this.search.isConnected) { // the Items tab shows the box without the toolbar
        this.search.focus();
        event.preventDefault();
      } else if (event.key === "Escape") this.clearSearch();
      else if (event.key === "End") this.setFollow(true);
    });
    // A double click on a line that was found clears the search, and shows the line among its neighbours.
    this.box.addEventListener("dblclick", (event) => {
      const row = event.target.closest(".sr-row");
      if (row && this.filter.query) this.clearSearch(Number(row.dataset.line));
    });
    this.element = make("div", { class: "sr-logview" }, bar, this.box);
  }

  clearSearch(line = null) {
    this.search.value = this.filter.query = "";
    this.restart();
    if (line !== null) {
      this.setFollow(false);
      this.goTo = line;
    }
  }

  setRanks(ranks) {
    this.filter.ranks = ranks;
    this.chip.hidden = !ranks.size;
    const what = this.panel.run.state?.pooled ? "item" : "rank"; // what the labels of lines name
    put(this.chip, ranks.size ? `${what}${ranks.size === 1 ? "" : "s"} ${rankNumbers(ranks)} ×` : "");
    this.restart();
  }

  setFollow(on) {
    this.follow = on;
    this.followButton.setAttribute("aria-pressed", String(on));
    this.panel.schedule();
  }

  restart() {
    this.filter.restart();
    this.forgetRows();
    this.panel.schedule();
  }

  forgetRows() {
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
  }

  draw() {
    if (!this.box.clientHeight) {
      // The box is not visible, perhaps only while the theme changes. No observer reports when it is visible again, so
      // draw() must be called again later.
      clearTimeout(this.hidden);
      this.hidden = setTimeout(() => this.panel.schedule(), HIDDEN_MS);
      return true;
    }
    const dropped = this.filter.work();
    const pending = this.filter.query ? [] : this.lines.pending.filter((each) => this.fits(each));
    const length = this.filter.length, height = (length + pending.length) * ROW;
    if (this.height !== height) {
      this.height = height;
      this.spacer.style.height = `${height}px`;
      this.box.style.setProperty("--sr-lines", `${Math.max(ROW, height)}px`); // used when the run is over
    }
    if (this.goTo != null && this.filter.done) {
      let at = 0;
      while (at < length && this.filter.line(at) < this.goTo) at++;
      this.place((at + 0.5) * ROW - this.box.clientHeight / 2);
      this.goTo = null;
    } else if (this.follow) this.place(height);
    else if (dropped) this.place(this.box.scrollTop - dropped * ROW);
    const from = Math.max(0, Math.floor(this.box.scrollTop / ROW) - 4);
    const to = Math.min(length, from + Math.ceil(this.box.clientHeight / ROW) + 8);
    const shown = new Set();
    for (let at = from; at < to; at++) {
      const line = this.filter.line(at);
      shown.add(line);
      let row = this.rows.get(line);
      if (!row) {
        row = this.row(this.lines.at(line), line);
        this.rows.set(line, row);
        this.box.append(row);
      }
      this.tag(row, this.ranksOf(line));
      row.style.transform = `translateY(${at * ROW}px)`;
    }
    for (const [line, row] of this.rows) {
      if (!shown.has(line)) {
        row.remove();
        this.rows.delete(line);
      }
    }
    for (const row of this.pendingRows) row.remove();
    this.pendingRows = pending.map((each, at) => {
      const row = this.row(each, -1);
      this.tag(row, [each.rank]);
      row.style.transform = `translateY(${(length + at) * ROW}px)`;
      this.box.append(row);
      return row;
    });
    this.box.toggleAttribute("data-empty", this.filter.done && !length && !pending.length);
    this.noiseButton.hidden = !this.filter.noisy && !this.filter.noise;
    const many = length.toLocaleString("en");
    put(this.count, this.filter.query ? `${many} ${length === 1 ? "match" : "matches"}${this.filter.done ? "" : " …"}`
      : this.lines.first ? `${many} lines; earlier lines are in the log files` : "");
    return this.filter.done;
  }

  place(top) {
    this.box.scrollTop = top;
    this.placed = this.box.scrollTop; // may differ from `top`, since the browser limits it to the height of the lines
  }

  fits(line) {
    return this.filter.streams.has(line.stream) && (!this.filter.ranks.size || this.filter.ranks.has(line.rank));
  }

  // Return the ranks that a row shows as having printed its line.
  ranksOf(line) {
    const { rank } = this.lines.at(line);
    if (rank < 0) return [];
    if (!this.filter.fold) return [rank];
    const every = this.lines.ranksOf(line);
    return this.filter.ranks.size ? every.filter((each) => this.filter.ranks.has(each)) : every;
  }

  // Write the ranks into a row. Rows that are already shown are also updated, since more ranks may have printed the line.
  tag(row, ranks) {
    if (row.tagged === ranks.length) return;
    row.tagged = ranks.length;
    row.firstChild.className = ranks.length ? `sr-tag sr-c${Math.min(...ranks) % RANK_COLOURS.length}` : "sr-tag";
    put(row.firstChild, rankNumbers(ranks));
    row.firstChild.title = ranks.length ? `${ranks.length === 1 ? "rank" : "ranks"} ${rankNumbers(ranks)}` : "";
  }

  row(line, number) {
    const [stream, sign] = STREAMS[line.stream];
    const said = make("span", { class: "sr-said" });
    const at = this.filter.query ? line.text.toLowerCase().indexOf(this.filter.query.toLowerCase()) : -1;
    if (at >= 0) this.highlight(said, line.text, this.filter.query);
    else if (line.html != null) said.innerHTML = line.html; // made and escaped by views/markup.py
    else said.textContent = line.text;
    return make("div", { class: `sr-row sr-${line.stream}`, "data-line": number }, make("span", { class: "sr-tag" }),
      make("span", { class: "sr-sign", title: stream }, sign), said);
  }

  highlight(element, text, query) {
    const lower = text.toLowerCase(), wanted = query.toLowerCase();
    let from = 0;
    for (let at; (at = lower.indexOf(wanted, from)) >= 0; from = at + wanted.length) {
      element.append(text.slice(from, at), make("mark", {}, text.slice(at, at + wanted.length)));
    }
    element.append(text.slice(from));
  }

  // Return all lines that pass the filter as text, for copies and downloads.
  texts() {
    const found = [];
    for (let at = 0; at < this.filter.length; at++) {
      const line = this.filter.line(at), ranks = this.ranksOf(line), { text } = this.lines.at(line);
      found.push(ranks.length ? `[${rankNumbers(ranks)}] ${text}` : `… ${text}`);
    }
    return found.join("\n") + "\n";
  }

  download() {
    download(new Blob([this.texts()], { type: "text/plain" }), `${this.panel.run.id}.log`);
  }
}
