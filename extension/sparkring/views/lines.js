// What a run's ranks printed, and which of it is shown.

const CHUNK = 4096; // lines that are kept, and dropped, together
const FOLD_WITHIN_S = 2, FOLD_WITHIN_LINES = 100; // as in views/lines.py
const SLICE_MS = 8; // of work at a time: the page stays responsive

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
