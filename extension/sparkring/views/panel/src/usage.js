// The resources that ranks use, as numbers and small curves.

import { RANK_STATES } from "./constants.js";
import { count, counted as things, size } from "./words.js";

// What live.py sends for each rank, and for each sample. The times of samples are in seconds since the run began.
const FIELDS = ["cpu", "memory", "cores", "total", "gpus", "gpu", "gpuMemory", "gpuTotal"];
const SAMPLE = ["time", "cpu", "memory", "gpu", "gpuMemory"];
export const WIDTH = 40, HEIGHT = 12; // the size of a curve, in pixels
const percent = (value) => `${Math.round(value)} %`;
// The names of the figures in a lane, in their order, and the functions that write them as text.
export const FIGURES = { cpu: ["CPU", percent], memory: ["", size], gpu: ["GPU", percent], gpuMemory: ["", size] };

// The last message of kind "usage", with the samples of all messages.
export class Usage {
  constructor() {
    this.used = this.waiting = this.starves = [];
    this.starving = "";
    this.lines = {};
    this.samples = {};
  }

  hear({ used, waiting, starves, starving, lines, samples }) {
    Object.assign(this, { used, waiting, starves, starving, lines, samples: { ...this.samples, ...samples } });
  }

  // Return a value of a rank; null if it is not known.
  of(rank, field) {
    return this.used[rank]?.[FIELDS.indexOf(field)] ?? null;
  }

  // Return a value of each rank.
  column(field) {
    return this.used.map((_, rank) => this.of(rank, field));
  }

  // Describe the resources that a rank uses, as describe.usage_words() does.
  words(rank) {
    if (!this.used[rank]) return "";
    const [cpu, memory, cores, total] = this.used[rank];
    return `CPU ${count(cpu)} % (${things(cores, "core")}), ${size(memory)} of ${size(total)}`;
  }

  // Return the curves of the ranks: for each rank and figure, the data of an SVG path. All curves of a figure have the
  // same scale, so that the ranks can be compared. The scale of percentages extends to at least 100.
  curves(count) {
    const ranks = [...Array(count).keys()], rows = ranks.flatMap((rank) => this.samples[rank] ?? []);
    const times = rows.map((row) => row[0]), from = Math.min(...times), to = Math.max(...times);
    const most = Object.fromEntries(Object.keys(FIGURES).map((field) => {
      const least = field === "cpu" || field === "gpu" ? 100 : 1;
      return [field, Math.max(least, ...rows.map((row) => row[SAMPLE.indexOf(field)] ?? 0))];
    }));
    return ranks.map((rank) => Object.fromEntries(Object.keys(FIGURES).map((field) =>
      [field, curve((this.samples[rank] ?? []).map((row) => [row[0], row[SAMPLE.indexOf(field)]]), from, to, most[field])])));
  }
}

// Return the data of an SVG path around the area below the points, which are pairs of a time and a value; "" if there
// are fewer than two points.
export function curve(points, from, to, most) {
  const known = points.filter(([, value]) => value != null);
  if (known.length < 2) return "";
  const x = (time) => ((time - from) / (to - from)) * WIDTH, y = (value) => HEIGHT - 1 - (value / most) * (HEIGHT - 1);
  const line = known.map(([time, value]) => `L${x(time).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  return `M${x(known[0][0]).toFixed(1)} ${HEIGHT}${line}V${HEIGHT}Z`;
}

// Say how many ranks are in each state, those with problems first. A running rank that is behind, silent or waiting for data
// does not count as running.
export function counted(letters, { behind, silent, starves }) {
  const [failed, followed, ...others] = Object.values(RANK_STATES).map(([, words]) => words), starving = new Set(starves);
  const found = new Map([failed, followed, "behind", "silent", "waiting for data", ...others].map((state) => [state, 0]));
  [...letters].forEach((letter, rank) => {
    const state = letter !== "r" ? RANK_STATES[letter][1] : behind[rank] ? "behind" : silent[rank] ? "silent"
      : starving.has(rank) ? "waiting for data" : RANK_STATES.r[1];
    found.set(state, found.get(state) + 1);
  });
  return [...found].filter(([, many]) => many).map(([state, many]) => `${count(many)} ${state}`).join(" · ");
}
