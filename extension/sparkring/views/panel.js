// The live panel. Draws what views/live.py tells of runs; its texts are plain, its HTML is the extension's own.
// Everything that is clicked or typed works here, in the page: while a cell runs, Python hears nothing of it.

const ROW = 18; // px, as in panel.css
const CHUNK = 4096; // lines that are kept, and dropped, together
const KEPT_CHARACTERS = 24e6; // of all runs on the page: of older lines there are the log files
const FOLD_WITHIN_S = 2, FOLD_WITHIN_LINES = 100; // as in views/lines.py
const HIDDEN_MS = 250;
const SLICE_MS = 8; // of work at a time: the page stays responsive
const SILENT_S = 5, ALL_SILENT_S = 30;
const ASK_AGAIN = 2, ASK_AGAIN_MS = 1000;
const TOLD_TILES = 16, NUMBERED_TILES = 32, SIGNED_TILES = 256, MOST_TILES = 1024;
const STREAMS = { o: ["stdout", "│"], e: ["stderr", "!"], m: ["message", "»"], g: ["", "…"] };
const SIGNS = { ".": "…", r: "▶", f: "✓", x: "✗", y: "✗", s: "■", i: "·" };
const STATE_WORDS = { ".": "starting", r: "running", f: "finished", x: "failed", y: "failed, after another",
                      s: "stopped", i: "takes no part" };
const LOOKS = { starting: "", interrupted: "sr-cut", "timed out": "sr-cut" };
const RANK_COLOURS = 8; // .sr-c0 … in panel.css
const TABS = ["logs", "metrics", "shards", "checkpoints", "restarts", "timeline", "code"];

// ── Small things ────────────────────────────────────────────────────────────

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

// 0–3, 7: three or more in a row as a range.
function rankNumbers(ranks) {
  const spans = [];
  for (const rank of [...ranks].sort((a, b) => a - b)) {
    const last = spans[spans.length - 1];
    if (last && last[1] === rank - 1) last[1] = rank;
    else spans.push([rank, rank]);
  }
  return spans.map(([a, b]) => (b - a > 1 ? `${a}–${b}` : b > a ? `${a}, ${b}` : `${a}`)).join(", ");
}

// ── Lines ───────────────────────────────────────────────────────────────────

// What a run's ranks printed, as far as the page has it. Lines are numbered from 0 as they come; those of the front
// are dropped a chunk at a time. A line that several ranks print at about the same time is led by the first of them.
class Lines {
  constructor() {
    this.chunks = new Map();
    this.first = 0;
    this.end = 0;
    this.characters = 0;
    this.told = 0; // of the run's own count: what was missed shows as a gap
    this.pending = [];
    this.leaders = []; // the last ones, for folding: [line, order]
    this.orders = 0;
    this.lastOf = new Map();
  }

  add(message) {
    const { start, count, rank, stream, time, text, html, noise, pending } = message;
    if (start + count > this.told) {
      if (start > this.told && text.length) this.gap(start - this.told);
      const known = Math.max(0, this.told - start); // told already: after the page was loaded again
      const noisy = new Set(noise);
      for (let at = known; at < text.length; at++) {
        this.push(rank[at], stream[at], time[at], text[at], html[at], noisy.has(at));
      }
      this.told = start + count;
    }
    this.pending = pending.text.map((said, at) => (
      { rank: pending.rank[at], stream: pending.stream[at], text: said, html: pending.html[at] }
    ));
  }

  gap(count) {
    this.push(-1, "g", 0, `${count.toLocaleString("en")} more lines, which came too fast to be shown`, null, false);
  }

  push(rank, stream, time, text, html, noise) {
    const at = this.end % CHUNK;
    let chunk = this.chunks.get((this.end - at) / CHUNK);
    if (!chunk) {
      chunk = { text: [], stream: [], rank: new Int32Array(CHUNK), time: new Float32Array(CHUNK),
                led: new Int32Array(CHUNK), noise: new Uint8Array(CHUNK), others: new Map(), html: new Map() };
      this.chunks.set((this.end - at) / CHUNK, chunk);
    }
    chunk.text.push(text);
    chunk.stream.push(stream);
    chunk.rank[at] = rank;
    chunk.time[at] = time;
    chunk.noise[at] = noise;
    if (html != null) chunk.html.set(at, html);
    this.characters += text.length + 24;
    chunk.led[at] = this.fold(this.end, rank, stream, time, text);
    this.end++;
  }

  // The line that leads this one, or -1. Ranks speak in turn and in bursts (A B, then A B again), so a line joins the
  // first equal one that came after its own rank's last: each rank's own order stays as it was.
  fold(line, rank, stream, time, text) {
    if (stream !== "g" && text) {
      const after = this.lastOf.has(rank) ? this.lastOf.get(rank) : -1;
      for (const [other, order] of this.leaders) {
        if (order <= after || other < this.first) continue;
        const one = this.at(other);
        if (one.text === text && one.stream === stream && time - one.time < FOLD_WITHIN_S) {
          const others = one.chunk.others.get(other % CHUNK) || [];
          others.push(rank);
          one.chunk.others.set(other % CHUNK, others);
          this.lastOf.set(rank, order);
          return other;
        }
      }
    }
    const order = this.orders++;
    this.lastOf.set(rank, order);
    this.leaders.push([line, order]);
    if (this.leaders.length > FOLD_WITHIN_LINES) this.leaders.shift();
    return -1;
  }

  at(line) {
    const at = line % CHUNK;
    const chunk = this.chunks.get((line - at) / CHUNK);
    return { chunk, rank: chunk.rank[at], stream: chunk.stream[at], time: chunk.time[at], text: chunk.text[at],
             html: chunk.html.get(at), led: chunk.led[at], others: chunk.others.get(at) };
  }

  // The ranks that printed a line, as far as it is known: all of those that are folded into one.
  ranksOf(line) {
    const { led } = this.at(line);
    const { rank, others } = this.at(led < this.first ? line : led);
    return others ? [rank, ...others] : [rank];
  }

  drop() {
    const chunk = this.chunks.get(this.first / CHUNK);
    if (!chunk || this.end - this.first <= CHUNK) return false;
    for (const text of chunk.text) this.characters -= text.length + 24;
    this.chunks.delete(this.first / CHUNK);
    this.first += CHUNK;
    return true;
  }
}

// Which lines are shown: a growing list of their numbers. After a change of what is wanted it is made anew, a slice
// at a time.
class Filter {
  constructor(lines) {
    this.lines = lines;
    this.ranks = new Set(); // all, if none
    this.streams = new Set(["o", "e", "m"]);
    this.query = "";
    this.fold = true;
    this.noise = false;
    this.restart();
  }

  restart() {
    this.found = [];
    this.skipped = 0; // of `found`, those at its beginning that have been dropped
    this.next = this.lines.first;
    this.noisy = 0;
  }

  get length() { return this.found.length - this.skipped; }
  get done() { return this.next >= this.lines.end; }
  line(at) { return this.found[this.skipped + at]; }

  // Look at more lines, for a slice of time; returns how many of the shown ones have been dropped at the front.
  work() {
    const { lines } = this;
    const until = performance.now() + SLICE_MS;
    this.next = Math.max(this.next, lines.first);
    const wanted = this.query.toLowerCase();
    while (this.next < lines.end) {
      const at = this.next % CHUNK, chunk = lines.chunks.get((this.next - at) / CHUNK);
      if (this.fits(chunk, at, wanted)) this.found.push(this.next);
      this.next++;
      if (this.next % 512 === 0 && performance.now() > until) break;
    }
    const before = this.skipped;
    while (this.skipped < this.found.length && this.found[this.skipped] < lines.first) this.skipped++;
    const dropped = this.skipped - before;
    if (this.skipped > 65536) {
      this.found.splice(0, this.skipped);
      this.skipped = 0;
    }
    return dropped;
  }

  fits(chunk, at, wanted) {
    const stream = chunk.stream[at];
    if (stream === "g") return !wanted;
    if (chunk.noise[at] && !this.noise) {
      this.noisy++;
      return false;
    }
    if (!this.streams.has(stream)) return false;
    if (this.ranks.size && !this.ranks.has(chunk.rank[at])) return false;
    if (this.fold && chunk.led[at] >= this.lines.first) {
      // The first of the ranks that are shown stands for the others.
      if (!this.ranks.size) return false;
      if (this.lines.ranksOf(chunk.led[at]).find((rank) => this.ranks.has(rank)) !== chunk.rank[at]) return false;
    }
    return !wanted || chunk.text[at].toLowerCase().includes(wanted);
  }
}

// The lines of a run in a box of fixed height, of which only those in sight are elements.
class LogView {
  constructor(panel) {
    this.panel = panel;
    this.lines = panel.run.lines;
    this.filter = new Filter(this.lines);
    this.follow = true;
    this.rows = new Map(); // line number → element
    this.elements();
  }

  elements() {
    const toggle = (text, title, get, set) => {
      const button = make("button", { type: "button", class: "sr-toggle", title, "aria-pressed": String(get()) }, text);
      button.addEventListener("click", () => {
        set(!get());
        button.setAttribute("aria-pressed", String(get()));
        this.restart();
      });
      return button;
    };
    const stream = (name) => toggle(STREAMS[name][0], `show what ranks write to ${STREAMS[name][0]}`,
      () => this.filter.streams.has(name),
      (on) => (on ? this.filter.streams.add(name) : this.filter.streams.delete(name)));
    this.search = make("input", { type: "search", placeholder: "Search", "aria-label": "Search the lines", spellcheck: "false" });
    this.search.addEventListener("input", () => {
      this.filter.query = this.search.value;
      this.restart();
    });
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.clearSearch();
    });
    this.count = make("span", { class: "sr-count", role: "status" });
    this.chip = make("button", { type: "button", class: "sr-chip", hidden: true, title: "show all ranks again",
      onclick: () => this.panel.chooseRanks(new Set()) });
    this.followButton = make("button", { type: "button", class: "sr-toggle", "aria-pressed": "true",
      title: "stay at the end as lines come" }, "follow");
    this.followButton.addEventListener("click", () => this.setFollow(!this.follow));
    this.noiseButton = toggle("start-up", "show what TensorFlow greets everybody with",
      () => this.filter.noise, (on) => { this.filter.noise = on; });
    this.noiseButton.hidden = true;
    const bar = make("div", { class: "sr-logbar", role: "toolbar", "aria-label": "Lines" },
      this.search, this.count, this.chip, make("span", { class: "sr-spring" }),
      stream("o"), stream("e"),
      toggle("fold equal", "show a line that several ranks print once", () => this.filter.fold,
        (on) => { this.filter.fold = on; }),
      this.noiseButton, this.followButton,
      make("button", { type: "button", class: "sr-tool", title: "copy these lines", onclick: () => this.copy() }, "copy"),
      make("button", { type: "button", class: "sr-tool", title: "save these lines as a file",
        onclick: () => this.download() }, "download"));
    this.spacer = make("div", { class: "sr-spacer" });
    this.box = make("div", { class: "sr-lines", tabindex: "0", role: "log", "aria-live": "off",
      "aria-label": "What the ranks print" }, this.spacer);
    this.box.addEventListener("scroll", () => {
      if (this.box.scrollTop === this.placed) return; // by ourselves
      this.placed = null;
      const atEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - ROW / 2;
      if (atEnd !== this.follow) this.setFollow(atEnd);
      this.panel.schedule();
    });
    this.box.addEventListener("keydown", (event) => {
      if (event.key === "/") {
        this.search.focus();
        event.preventDefault();
      } else if (event.key === "Escape") this.clearSearch();
      else if (event.key === "End") this.setFollow(true);
    });
    // A line that was searched for, among its neighbours.
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
    put(this.chip, ranks.size ? `${ranks.size === 1 ? "rank" : "ranks"} ${rankNumbers(ranks)} ×` : "");
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
    if (!this.box.clientHeight) { // out of sight, if only while a theme changes: of that no observer tells
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
    for (const row of this.pendingRows || []) row.remove();
    this.pendingRows = pending.map((each, at) => {
      const row = this.row(each, -1);
      this.tag(row, [each.rank]);
      row.style.transform = `translateY(${(length + at) * ROW}px)`;
      this.box.append(row);
      return row;
    });
    this.noiseButton.hidden = !this.filter.noisy && !this.filter.noise;
    const many = length.toLocaleString("en");
    put(this.count, this.filter.query ? `${many} ${length === 1 ? "match" : "matches"}${this.filter.done ? "" : " …"}`
      : this.lines.first ? `${many} lines; those before are in the log files` : "");
    return this.filter.done;
  }

  place(top) {
    this.box.scrollTop = top;
    this.placed = this.box.scrollTop; // as far as there is something to scroll
  }

  fits(line) {
    return this.filter.streams.has(line.stream) && (!this.filter.ranks.size || this.filter.ranks.has(line.rank));
  }

  // The ranks that a row stands for.
  ranksOf(line) {
    const { rank } = this.lines.at(line);
    if (rank < 0) return [];
    if (!this.filter.fold) return [rank];
    const every = this.lines.ranksOf(line);
    return this.filter.ranks.size ? every.filter((each) => this.filter.ranks.has(each)) : every;
  }

  // More ranks may print the same a moment later.
  tag(row, ranks) {
    if (row.tagged === ranks.length) return;
    row.tagged = ranks.length;
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
    const tag = make("span", { class: `sr-tag sr-c${Math.max(line.rank, 0) % RANK_COLOURS}` });
    return make("div", { class: `sr-row sr-${line.stream}`, "data-line": number }, tag,
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

  // The lines that are shown, as text.
  texts() {
    const found = [];
    for (let at = 0; at < this.filter.length; at++) {
      const line = this.filter.line(at), ranks = this.ranksOf(line), { text } = this.lines.at(line);
      found.push(ranks.length ? `[${rankNumbers(ranks)}] ${text}` : `… ${text}`);
    }
    return found.join("\n") + "\n";
  }

  async copy() {
    try {
      await navigator.clipboard.writeText(this.texts());
      this.panel.say("copied");
    } catch (error) {
      this.panel.say("this page may not copy: use download");
    }
  }

  download() {
    const address = URL.createObjectURL(new Blob([this.texts()], { type: "text/plain" }));
    make("a", { href: address, download: `${this.panel.run.id}.log` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }
}

// ── Ranks ───────────────────────────────────────────────────────────────────

// A tile for each rank: its state as a colour and a sign, and its step; of a few ranks also the host where there are
// several, the GPU, and how long ago it was heard of.
class RankView {
  constructor(panel) {
    this.panel = panel;
    this.tiles = [];
    this.note = make("div", { class: "sr-note" });
    this.strip = make("div", { class: "sr-ranks sr-tiles", role: "toolbar", "aria-label": "Ranks: choose whose lines to show" });
    this.strip.addEventListener("click", (event) => this.choose(event.target.closest("button"), event));
    this.strip.addEventListener("keydown", (event) => this.walk(event));
    this.element = make("div", {}, this.note, this.strip);
  }

  draw(state, now) {
    const { ranks } = state;
    const many = ranks.state.length > NUMBERED_TILES;
    const count = Math.min(ranks.state.length, MOST_TILES);
    this.strip.classList.toggle("sr-many", many);
    this.strip.classList.toggle("sr-crowd", count > SIGNED_TILES);
    while (this.tiles.length > count) this.tiles.pop().remove();
    while (this.tiles.length < count) {
      const tile = make("button", { type: "button", "aria-pressed": "false", tabindex: this.tiles.length ? "-1" : "0",
        "data-rank": this.tiles.length });
      this.tiles.push(tile);
      this.strip.append(tile);
    }
    const last = Math.max(...ranks.heard);
    const slowest = this.slow(ranks);
    const over = state.state !== "running" && state.state !== "starting";
    for (let rank = 0; rank < count; rank++) this.tile(rank, ranks, over ? null : now, last, slowest.has(rank), many);
    put(this.note, many ? this.counts(ranks, count) : "");
    this.note.hidden = !many;
  }

  tile(rank, ranks, now, last, slow, many) {
    const tile = this.tiles[rank], letter = ranks.state[rank];
    const silence = now !== null && letter === "r" ? now - ranks.heard[rank] : 0;
    const silent = silence > ALL_SILENT_S || (silence > SILENT_S && now - last < SILENT_S / 2);
    const step = ranks.step[rank];
    const mark = silent ? ` ⏸ ${duration(silence)}` : slow ? " ▼" : "";
    const looks = `${letter === "." ? "" : letter}${silent ? " sr-silent" : ""}${slow && !silent ? " sr-slow" : ""}`;
    const chosen = this.panel.chosen.has(rank);
    const words = [`rank ${rank} ${STATE_WORDS[letter]}`];
    if (ranks.hosts[ranks.host[rank]]) words.push(ranks.hosts[ranks.host[rank]]);
    if (ranks.pid[rank]) words.push(`process ${ranks.pid[rank]}`);
    if (ranks.gpu[rank]) words.push(ranks.gpu[rank]);
    if (step != null) words.push(`${ranks.epoch[rank] != null ? `epoch ${ranks.epoch[rank]}, ` : ""}step ${step}`);
    words.push(`${ranks.lines[rank].toLocaleString("en")} lines`);
    if (now !== null && letter === "r") words.push(`heard of ${duration(now - ranks.heard[rank])} ago`);
    if (slow) words.push("behind the others");
    if (ranks.failure[rank]) words.push(ranks.failure[rank]);
    const facts = [];
    if (ranks.state.length <= TOLD_TILES) {
      if (ranks.hosts.length > 1) facts.push(ranks.hosts[ranks.host[rank]]);
      if (ranks.gpu[rank]) facts.push(ranks.gpu[rank].split(",")[0]);
      if (now !== null && letter === "r" && !silent) facts.push(duration(now - ranks.heard[rank]));
    }
    tile.dataset.facts = facts.join(" · ");
    put(tile, many ? SIGNS[letter] : `${rank} ${SIGNS[letter]}${step != null ? ` ${step}` : ""}${mark}`);
    const title = words.join(", ");
    if (tile.title !== title) {
      tile.title = title;
      tile.setAttribute("aria-label", title);
    }
    if (tile.className !== looks) tile.className = looks;
    tile.setAttribute("aria-pressed", String(chosen));
  }

  // Ranks that are clearly behind in their epoch; between steps some are always one ahead.
  slow(ranks) {
    const found = new Set(), at = [];
    for (let rank = 0; rank < ranks.state.length; rank++) {
      if (ranks.state[rank] === "r" && ranks.step[rank] != null) at.push([(ranks.epoch[rank] || 0) * 1e9 + ranks.step[rank], rank]);
    }
    if (at.length < 2) return found;
    at.sort((a, b) => a[0] - b[0]);
    const middle = at[at.length >> 1][0];
    for (const [step, rank] of at) if (middle - step > Math.max(3, 0.05 * (middle % 1e9))) found.add(rank);
    return found;
  }

  counts(ranks, count) {
    const found = new Map();
    for (const letter of ranks.state) found.set(letter, (found.get(letter) || 0) + 1);
    const words = [...found].map(([letter, many]) => `${many.toLocaleString("en")} ${STATE_WORDS[letter]}`);
    return words.join(" · ") + (count < ranks.state.length ? ` · the first ${count.toLocaleString("en")} of them:` : "");
  }

  // A click shows one rank, a second click all; with Ctrl, Cmd or Shift more than one.
  choose(tile, event) {
    if (!tile) return;
    const rank = Number(tile.dataset.rank), chosen = this.panel.chosen;
    const several = event.ctrlKey || event.metaKey || event.shiftKey;
    const next = new Set(several ? chosen : []);
    if (chosen.has(rank) && (several || chosen.size === 1)) next.delete(rank);
    else next.add(rank);
    this.panel.chooseRanks(next);
  }

  walk(event) {
    const at = this.tiles.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0,
                 End: this.tiles.length - 1 }[event.key];
    if (at < 0 || to === undefined || !this.tiles[to]) return;
    this.tiles[at].tabIndex = -1;
    this.tiles[to].tabIndex = 0;
    this.tiles[to].focus();
    event.preventDefault();
  }
}

// ── The panel ───────────────────────────────────────────────────────────────

let panels = 0;

// One panel in one place of the page. A run can have several: JupyterLab shows an output twice if asked to.
class Panel {
  constructor(run, place) {
    this.run = run;
    this.place = place;
    this.id = `sr-panel-${panels++}`;
    this.chosen = new Set();
    this.tab = "logs";
    this.elements();
    this.log = new LogView(this);
    this.bodies.logs.append(this.log.element);
    place.append(this.root);
    this.resized = new ResizeObserver(() => this.schedule());
    this.resized.observe(this.log.box);
    this.stateDirty = true;
    this.htmlDirty = new Set(Object.keys(run.html));
    this.ticker = setInterval(() => { this.stateDirty = true; this.schedule(); }, 1000);
    this.select("logs");
    this.schedule();
  }

  elements() {
    this.state = make("b", { class: "sr-state" });
    this.title = make("span", { class: "sr-title" });
    this.facts = make("small");
    this.stop = make("button", { type: "button", class: "sr-stop", hidden: true, onclick: () => this.run.stop() }, "■ Stop");
    this.said = make("small", { class: "sr-words", role: "status", "aria-live": "polite" });
    this.bar = make("div", { role: "progressbar", "aria-label": "Progress", "aria-valuemin": "0", "aria-valuemax": "100" });
    this.words = make("small");
    this.why = make("div", { class: "sr-why", role: "alert", hidden: true });
    this.notices = make("div", { class: "sr-notices" });
    this.ranks = new RankView(this);
    this.bodies = {};
    this.buttons = {};
    const list = make("div", { class: "sr-tabs", role: "tablist", "aria-label": "What to show" });
    const body = make("div", { class: "sr-body" });
    for (const name of TABS) {
      const title = name[0].toUpperCase() + name.slice(1);
      this.buttons[name] = make("button", { type: "button", role: "tab", id: `${this.id}-${name}`, hidden: name !== "logs",
        "aria-controls": `${this.id}-${name}-body`, onclick: () => this.select(name) }, title);
      this.bodies[name] = make("div", { role: "tabpanel", class: `sr-tab sr-tab-${name}`, id: `${this.id}-${name}-body`,
        "aria-labelledby": `${this.id}-${name}`, tabindex: name === "logs" ? false : "0" });
      list.append(this.buttons[name]);
      body.append(this.bodies[name]);
    }
    list.addEventListener("keydown", (event) => this.walk(event));
    this.root = make("div", { class: "sr-run sr-panel", role: "region", "aria-label": "Distributed run" },
      make("div", { class: "sr-head" }, this.state, this.title, this.facts, make("span", { class: "sr-spring" }), this.said, this.stop),
      make("div", { class: "sr-bar sr-progress" }, this.bar), make("div", { class: "sr-words" }, this.words),
      this.why, this.ranks.element, this.notices, list, body);
  }

  select(name) {
    this.tab = name;
    for (const each of TABS) {
      const on = each === name;
      this.buttons[each].setAttribute("aria-selected", String(on));
      this.buttons[each].tabIndex = on ? 0 : -1;
      this.bodies[each].hidden = !on;
    }
    this.schedule();
  }

  walk(event) {
    const there = TABS.filter((name) => !this.buttons[name].hidden);
    const at = there.indexOf(this.tab);
    const to = { ArrowRight: (at + 1) % there.length, ArrowLeft: (at + there.length - 1) % there.length, Home: 0,
                 End: there.length - 1 }[event.key];
    if (to === undefined) return;
    this.select(there[to]);
    this.buttons[there[to]].focus();
    event.preventDefault();
  }

  chooseRanks(ranks) {
    this.chosen = ranks;
    this.log.setRanks(ranks);
    this.select("logs");
    this.stateDirty = true;
    this.schedule();
  }

  say(text) {
    put(this.said, text);
    clearTimeout(this.saying);
    this.saying = setTimeout(() => put(this.said, ""), 4000);
  }

  // One drawing per frame, however much has come.
  schedule() {
    if (this.frame || this.gone) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (!this.root.isConnected) return;
      if (this.stateDirty) this.drawState();
      for (const name of this.htmlDirty) this.drawHtml(name);
      if (this.tab === "logs" && !this.log.draw()) this.schedule();
    });
  }

  drawState() {
    const { state, offset, stops, stopping } = this.run;
    this.stateDirty = false;
    if (!state) return;
    const over = state.ended > 0, now = Date.now() / 1000 - offset;
    if (over) clearInterval(this.ticker);
    put(this.state, state.state);
    this.state.className = `sr-state ${LOOKS[state.state] ?? `sr-${state.state}`}`;
    put(this.title, state.title);
    put(this.facts, [...state.facts, duration((over ? state.ended : now) - state.started)].join(" · "));
    this.stop.hidden = over || !stops;
    this.stop.disabled = stopping;
    put(this.stop, stopping ? "stopping …" : "■ Stop");
    const share = state.state === "finished" ? 1 : state.fraction;
    this.bar.style.width = `${100 * (share ?? 0)}%`;
    this.bar.setAttribute("aria-valuenow", String(Math.round(100 * (share ?? 0))));
    put(this.words, [state.waiting, state.progress, ...state.last].filter(Boolean).join(" · ") || "\u00a0");
    this.why.hidden = !state.outcome;
    put(this.why, state.outcome + (state.line ? ` (cell line ${state.line})` : ""));
    const told = state.notices.map((text) => `⚑ ${text}`).join("\n");
    put(this.notices, told);
    this.notices.hidden = !told;
    this.ranks.draw(state, now);
  }

  // A section's own HTML, from views/sections; what was folded open stays open.
  drawHtml(name) {
    const body = this.bodies[name], html = this.run.html[name] || "";
    this.htmlDirty.delete(name);
    if (!body) return;
    const open = new Set([...body.querySelectorAll("details[open] > summary")].map((each) => each.textContent));
    const top = body.scrollTop;
    body.innerHTML = html; // made and escaped by views/sections
    for (const summary of body.querySelectorAll("details > summary")) {
      if (open.has(summary.textContent)) summary.parentElement.open = true;
    }
    body.scrollTop = top;
    this.buttons[name].hidden = !html;
    if (!html && this.tab === name) this.select("logs");
  }

  remove() {
    this.gone = true;
    clearInterval(this.ticker);
    this.resized.disconnect();
    this.root.remove();
  }
}

// ── Runs ────────────────────────────────────────────────────────────────────

// What the page knows of one run, and the panels that show it.
class Run {
  constructor(id, model) {
    this.id = id;
    this.model = model;
    this.lines = new Lines();
    this.state = null;
    this.html = {};
    this.offset = 0; // of this machine's clock to the kernel's
    this.heard = this.stops = this.stopping = false;
    this.panels = new Map(); // place → panel
    // While it shows more than the static view does, that one is out of sight.
    this.hides = make("style", {}, `[data-sparkring-static="${CSS.escape(id)}"] { display: none; }`);
  }

  hear(message) {
    if (message.kind === "lines") this.lines.add(message);
    else if (message.kind === "state") {
      this.state = message;
      this.offset = Date.now() / 1000 - message.now;
    } else if (message.kind === "sections") Object.assign(this.html, message.html);
    else if (message.kind === "heard") {
      this.heard = true;
      this.stops = message.stops;
    }
    for (const panel of this.panels.values()) {
      if (message.kind === "sections") Object.keys(message.html).forEach((name) => panel.htmlDirty.add(name));
      else if (message.kind !== "lines") panel.stateDirty = true;
      panel.schedule();
    }
  }

  stop() {
    this.stopping = true;
    this.model.send({ kind: "stop", run: this.id });
    for (const panel of this.panels.values()) {
      panel.stateDirty = true;
      panel.schedule();
    }
  }

  mount(place) {
    if (this.panels.has(place) || !this.state) return;
    this.panels.set(place, new Panel(this, place));
    document.head.append(this.hides);
  }

  unmount(place) {
    this.panels.get(place)?.remove();
    this.panels.delete(place);
    if (!this.panels.size) this.hides.remove();
  }
}

// All runs of this kernel that the page knows of, and the places for their panels.
class Runs {
  constructor(model) {
    this.model = model;
    this.runs = new Map();
    this.asked = new Set();
    this.selector = `[data-sparkring][data-page="${CSS.escape(model.get("page"))}"]`;
    this.heard = (message) => this.hear(message);
    model.on("msg:custom", this.heard);
    // The kernel has died or starts anew: a panel would say "running" for ever; what stays below it is true.
    this.cut = () => this.close();
    model.on("comm_live_update", this.cut);
    // A notebook takes outputs out of the page and puts them back as it scrolls.
    this.watch = new MutationObserver((changes) => {
      if (changes.some((change) => !change.target.closest?.(".sr-panel"))) this.look();
    });
    this.watch.observe(document.body, { childList: true, subtree: true });
    // Plain keys are the panel's: in JupyterLab, D D would delete the cell. It looks for this attribute.
    this.keys = (event) => {
      const others = event.ctrlKey || event.metaKey || event.altKey || (event.shiftKey && event.key === "Enter");
      event.target.closest?.(".sr-panel")?.toggleAttribute("data-lm-suppress-shortcuts", !others);
    };
    window.addEventListener("keydown", this.keys, true);
    this.look();
  }

  hear(message) {
    if (!message.run) return;
    if (message.kind === "gone") {
      this.forget(message.run);
      return;
    }
    if (!this.runs.has(message.run)) this.runs.set(message.run, new Run(message.run, this.model));
    this.runs.get(message.run).hear(message);
    if (message.kind === "state") this.look();
    this.makeRoom();
  }

  look() {
    for (const place of document.querySelectorAll(this.selector)) {
      const id = place.dataset.sparkring;
      this.runs.get(id)?.mount(place);
      if (!this.asked.has(id)) {
        this.asked.add(id);
        this.ask(id, ASK_AGAIN);
      }
    }
  }

  // The first question may be asked before the front end has opened its way past the running cell, and would have its
  // answer when that has ended.
  ask(id, again) {
    this.model.send({ kind: "hello", run: id });
    if (!again) return;
    setTimeout(() => {
      if (!this.closed && !this.runs.get(id)?.heard) this.ask(id, again - 1);
    }, ASK_AGAIN_MS);
  }

  // Of all lines the oldest go, first those of runs that came before.
  makeRoom() {
    let characters = 0;
    for (const run of this.runs.values()) characters += run.lines.characters;
    for (const run of this.runs.values()) {
      while (characters > KEPT_CHARACTERS) {
        const before = run.lines.characters;
        if (!run.lines.drop()) break;
        characters -= before - run.lines.characters;
      }
    }
  }

  forget(id) {
    const run = this.runs.get(id);
    if (!run) return;
    for (const place of [...run.panels.keys()]) run.unmount(place);
    this.runs.delete(id);
  }

  close() {
    if (this.closed) return;
    this.closed = true;
    this.watch.disconnect();
    window.removeEventListener("keydown", this.keys, true);
    this.model.off("msg:custom", this.heard);
    this.model.off("comm_live_update", this.cut);
    for (const id of [...this.runs.keys()]) this.forget(id);
  }
}

export default {
  initialize({ model }) {
    const runs = new Runs(model);
    return () => runs.close();
  },
  render() {}, // some front ends load a widget's script only where a view of it stands; there is nothing to see in it
};
