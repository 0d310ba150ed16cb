// Stores the lines that a run's ranks printed, and decides which lines are shown. The kernel sends lines as they arrive, with
// stable numbers, because it may send them again. Their order and their folding therefore come about here.

import { SLICE_MS, lowerBound } from "./rows.js";

const CHUNK = 4096; // the number of lines that are dropped together
const LINE_CHARACTERS = 24; // for the memory that a line takes besides its text
// Identical lines are folded by the same rules as in history/lines.py: tests/views/folding.json has test cases for both.
const FOLD_WITHIN_S = 2, FOLD_WITHIN_LINES = 100;
const HELD_S = 0.5; // an unfinished traceback is held back for at most this time, so that lines stay in order
const TRACEBACK = "Traceback (most recent call last)";
const CHAINED = /^(During handling of the above exception, another|The above exception was the direct cause of the)/;
const RANKS_OWN = /(<cell)(?: \d+)?(?=>)|(\b0x)[0-9a-f]+|((?:rank|pid|process)\W{0,3})\d+|(:)\d{5}\b/gi;
// A line of stderr that matches this starts an error message without a traceback.
const ERROR = /^\s*[\w.]*(?:Error|Exception)\b|\b(?:ERROR|FATAL|CRITICAL|SIGSEGV|SIGABRT)\b|^\s*(?:Fatal|terminate called)\b|Segmentation fault/;
const BEGINS_ERROR = 1, CONTINUES = 2; // the values of a line's `part`; other lines have 0

// Return the lines in a message, whose values are in columns.
function linesOf({ rank, stream, time, text, html, noise = [] }) {
  const noisy = new Set(noise);
  return text.map((words, at) => ({ rank: rank[at], stream: stream[at], time: time[at], text: words, html: html[at], noise: noisy.has(at) }));
}

function beginsError({ stream, text }) {
  return text.startsWith(TRACEBACK) || (stream === "e" && ERROR.test(text));
}

// A traceback of one rank, built line by line. The first `whole` lines certainly belong to the traceback. The lines after
// them may turn out to be other output.
class Traceback {
  constructor(line) {
    this.lines = [line];
    this.whole = 1;
    this.inFrames = true;
    this.chained = false;
  }

  // Take the line if it may belong to the traceback, and return whether it was taken.
  take(line) {
    const { text } = line, { lines } = this;
    if (this.inFrames) {
      this.inFrames = text.startsWith(" ");
      this.whole = lines.length + 1;
    } else if (text.startsWith(TRACEBACK) && this.chained) {
      this.inFrames = true;
      this.chained = false;
    } else if (CHAINED.test(text) && !lines[lines.length - 1].text) this.chained = true;
    else if (text || !(this.chained || lines.length === this.whole)) return false;
    lines.push(line);
    return true;
  }
}

// The lines of a run that the page has. Lines are numbered from 0 in the order in which they arrive. The oldest lines are
// dropped, one chunk at a time. If several ranks print the same line at about the same time, the first of these lines is
// called the leader of the other lines, and the other lines are folded into the leader.
export class Lines {
  constructor() {
    this.cleared = 0; // counts the calls of clear(), after which lines have other numbers
    this.clear();
  }

  clear() {
    this.cleared++;
    this.kept = []; // the lines from number `first` on
    this.first = 0;
    this.characters = 0;
    this.start = Infinity; // the `start` of the first message
    this.told = 0; // the number of lines that have arrived or were missed; gap() adds one line that stands for missed lines
    this.pending = [];
    this.spoken = false; // whether a rank has printed anything except TensorFlow's start-up messages
    // The unfinished traceback of each rank. Its lines are held back until it is complete, because other ranks may
    // print lines in between.
    this.tracebacks = new Map();
    this.leaders = []; // the latest leaders: [number of the first line, order, text of a traceback or null]
    this.orders = 0;
    this.lastOf = new Map();
  }

  get end() { return this.first + this.kept.length; }

  add(message) {
    const { start, count, line, text, noise, pending } = message;
    // If a page is loaded during the run, new lines may arrive before the kernel's answer to `hello`, which has earlier lines.
    if (start < this.start) {
      this.clear();
      this.start = start;
    }
    if (start + count > this.told) {
      if (start > this.told && text.length) this.gap(start - this.told);
      // When a page asks for the run, the kernel sends all lines again. Some of them have arrived before.
      const isNew = (_, at) => start + (line ? line[at] : at) >= this.told;
      for (const each of linesOf(message).filter(isNew)) this.take(each);
      this.told = start + count;
    }
    this.spoken ||= noise.length < text.length || pending.text.length > 0;
    this.pending = linesOf({ ...pending, time: [] });
  }

  gap(count) {
    const text = `${count.toLocaleString("en")} more lines, which are in the log files`;
    this.push({ rank: -1, stream: "g", time: 0, text, html: null, noise: false }, -1);
  }

  take(line) {
    for (const [rank, { lines }] of this.tracebacks) {
      if (line.time - lines[lines.length - 1].time <= HELD_S) break;
      this.ended(rank);
    }
    const begun = this.tracebacks.get(line.rank);
    if (begun && begun.lines[0].stream === line.stream) {
      if (begun.take(line)) return;
      this.ended(line.rank);
    }
    if (line.text.startsWith(TRACEBACK) && !this.tracebacks.has(line.rank)) this.tracebacks.set(line.rank, new Traceback(line));
    else this.block([line]);
  }

  // Add the lines that were held back, even if their tracebacks are not complete.
  settle() {
    for (const rank of [...this.tracebacks.keys()]) this.ended(rank);
  }

  ended(rank) {
    const { lines, whole } = this.tracebacks.get(rank);
    this.tracebacks.delete(rank);
    this.block(lines.slice(0, whole));
    for (const line of lines.slice(whole)) this.block([line]);
  }

  block(lines) {
    const leader = this.fold(lines);
    lines.forEach((line, at) => this.push(line, leader < 0 ? -1 : leader + at, at ? CONTINUES : Number(beginsError(line))));
  }

  // Add a line, which `led` leads, or no line if it is -1.
  push(line, led, part = 0) {
    this.characters += line.text.length + LINE_CHARACTERS;
    if (led >= 0) (this.at(led).others ??= []).push(line.rank);
    this.kept.push(Object.assign(line, { led, part }));
  }

  // Return the number of the leader into which a block (a line or a whole traceback) is folded, or -1 if the block
  // becomes a leader itself. A rank may print the same line several times (A B, then A B again), and the second A must
  // not join the leader of the first A. Therefore, a block joins the first identical leader after the leader of the
  // rank's previous block. This keeps the lines of each rank in order.
  fold(lines) {
    const { rank, stream, time, text } = lines[0];
    const whole = lines.length > 1 ? lines.map((line) => line.text).join("\n").replace(RANKS_OWN, "$1$2$3$4") : null;
    if (text) {
      const after = this.lastOf.has(rank) ? this.lastOf.get(rank) : -1;
      for (const [other, order, compared] of this.leaders) {
        if (order <= after || other < this.first) continue;
        const one = this.at(other);
        const same = compared === null && whole === null ? one.text === text : compared === whole;
        if (same && one.stream === stream && time - one.time < FOLD_WITHIN_S) {
          this.lastOf.set(rank, order);
          return other;
        }
      }
    }
    const order = this.orders++;
    this.lastOf.set(rank, order);
    this.leaders.push([this.end, order, whole]);
    if (this.leaders.length > FOLD_WITHIN_LINES) this.leaders.shift();
    return -1;
  }

  at(line) {
    return this.kept[line - this.first];
  }

  // Return whether a line and the line before it belong to the same traceback.
  continues(line) {
    return this.at(line).part === CONTINUES;
  }

  // Return the ranks that printed a line or an identical line that is folded with this line. If the leader of these lines
  // has been dropped, return only the rank of the line itself.
  ranksOf(line) {
    const { led } = this.at(line);
    const { rank, others } = this.at(led < this.first ? line : led);
    return others ? [rank, ...others] : [rank];
  }

  drop() {
    if (this.kept.length <= CHUNK) return false;
    for (const { text } of this.kept.splice(0, CHUNK)) this.characters -= text.length + LINE_CHARACTERS;
    this.first += CHUNK;
    return true;
  }
}

// Decides which lines are shown, and keeps a list of their numbers. The list grows as lines arrive. When the user changes
// the filter, work() builds the list again, one part in each call.
export class Filter {
  constructor(lines) {
    this.lines = lines;
    this.ranks = new Set(); // empty: all ranks
    this.streams = new Set(["o", "e", "m"]);
    this.query = "";
    this.fold = true;
    this.noise = false;
    this.restart();
  }

  restart() {
    this.found = [];
    this.errors = []; // the lines in `found` that start an error message
    this.next = this.lines.first;
    this.noisy = 0;
  }

  get length() { return this.found.length; }
  get done() { return this.next >= this.lines.end; }
  line(at) { return this.found[at]; }
  cells(at) { return [this.line(at)]; }

  // Return the index of a line; if the line is not shown, return the index of the next line.
  find(line) { return lowerBound(this.found, line); }

  // Look at more lines for at most SLICE_MS. Return how many of the lines shown have been dropped since the last call.
  work() {
    const { lines } = this;
    const until = performance.now() + SLICE_MS;
    this.next = Math.max(this.next, lines.first);
    const wanted = this.query.toLowerCase();
    while (this.next < lines.end) {
      const line = lines.at(this.next);
      if (this.fits(line, wanted)) {
        this.found.push(this.next);
        if (line.part === BEGINS_ERROR) this.errors.push(this.next);
      }
      this.next++;
      if (this.next % 512 === 0 && performance.now() > until) break;
    }
    this.errors.splice(0, lowerBound(this.errors, lines.first));
    return this.found.splice(0, lowerBound(this.found, lines.first)).length;
  }

  fits({ stream, rank, text, noise, led }, wanted) {
    if (stream === "g") return !wanted;
    if (noise && !this.noise) {
      this.noisy++;
      return false;
    }
    if (!this.streams.has(stream)) return false;
    if (this.ranks.size && !this.ranks.has(rank)) return false;
    if (this.fold && led >= this.lines.first) {
      // The line is folded into its leader, and the leader is shown. But if the user has selected ranks, the leader's rank may
      // not be selected. Then the line of the first selected rank that printed it is shown.
      if (!this.ranks.size) return false;
      if (this.lines.ranksOf(led).find((other) => this.ranks.has(other)) !== rank) return false;
    }
    return !wanted || text.toLowerCase().includes(wanted);
  }
}
