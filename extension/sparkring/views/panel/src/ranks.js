// The ranks above the tabs: a lane for each rank, or a square for each rank if there are many.

import { choice, drawing, make, put, toggle } from "./elements.js";
import { MOST_LANES, RANK_COLOURS, RANK_FACTS, RANK_STATES, SILENT_S as FACT_S } from "./constants.js";
import { FIGURES, HEIGHT, WIDTH, counted } from "./usage.js";
import { count as written, fact, number, percent, rankList, size, ticking } from "./words.js";

const SILENT_S = 5, ALL_SILENT_S = 30;
const MOST_NAMED = 8;
const SIGNED_SQUARES = 256, MOST_SQUARES = 1024;
// The values that the colour of the squares can show, with the functions that write them as text.
const HEATS = { state: null, progress: percent, "steps/s": (value) => `${number(value)} steps/s`,
                silence: ticking, CPU: (value) => `${value} %`, memory: size, "waits for data": (value) => `${value} %` };

// Say which ranks are silent, as in "rank 77 is silent"; "" if there are none, or too many to be named.
export function mute(quiet) {
  const ranks = quiet.flatMap((is, rank) => (is ? [rank] : []));
  if (!ranks.length || ranks.length > MOST_NAMED) return "";
  return `${rankList(ranks)} ${ranks.length > 1 ? "are" : "is"} silent`;
}

// A lane shows the rank's state as a colour and a sign, its epoch and step, the completed part of the run, its speed, and
// the resources that it uses. A square shows the state, or another value as a shade. The labels of lanes and squares have
// all values.
export class RankView {
  constructor(panel) {
    this.panel = panel;
    this.tiles = [];
    this.heat = "state";
    this.note = make("span", { role: "status" });
    this.sort = toggle("slowest first", "show the ranks with the least progress first", false, (on) => {
      this.sorted = on;
      this.panel.scheduleState();
    });
    this.colour = choice("Value shown by the colours", Object.keys(HEATS), (heat) => {
      this.heat = heat;
      this.panel.scheduleState();
    });
    this.colours = make("label", {}, "colour: ", this.colour);
    this.top = make("div", { class: "sr-note" }, this.note, make("span", { class: "sr-spring" }), this.colours, this.sort);
    this.strip = make("div", { class: "sr-ranks sr-tiles", role: "toolbar", "aria-label": "Ranks: select the ranks whose lines are shown" });
    this.strip.addEventListener("click", (event) => {
      const tile = event.target.closest("button");
      if (tile) this.toggle(Number(tile.dataset.rank), event);
    });
    this.stack = make("pre", { class: "sr-stack", hidden: true, tabindex: "0" });
    this.strip.addEventListener("keydown", (event) => this.walk(event));
    this.element = make("div", { class: "sr-rankview" }, this.top, this.strip, this.stack);
  }

  draw(state, usage, now) {
    const { ranks } = state, many = ranks.state.length > MOST_LANES;
    const count = Math.min(ranks.state.length, MOST_SQUARES);
    this.strip.classList.toggle("sr-many", many);
    this.strip.classList.toggle("sr-lanes", !many);
    this.strip.classList.toggle("sr-crowd", count > SIGNED_SQUARES);
    while (this.tiles.length > count) this.tiles.pop().remove();
    while (this.tiles.length < count) this.tiles.push(this.strip.appendChild(this.tile(this.tiles.length)));
    const at = state.ended ? null : now;
    const heats = many ? this.heats(ranks, usage, at) : null;
    const quiet = this.quiet(ranks, at);
    for (let rank = 0; rank < count; rank++) this.fill(rank, ranks, usage, at, quiet[rank], many, heats?.[rank]);
    if (!many) this.measure(usage, count);
    this.drawStack(ranks, usage);
    this.arrange(ranks, count, many);
    const told = [many && this.counts(ranks, usage, quiet, count), state.lag, many && mute(quiet), !many && !state.lag && usage.starving]
      .filter(Boolean).join(" · ");
    this.sort.hidden = many || count < 5;
    this.colours.hidden = !many;
    // A rank may fall behind and catch up again and again. The row then stays until the end of the run, so that the tabs do not move.
    this.noted = !state.ended && (this.noted || Boolean(told));
    put(this.note, told || (this.noted ? "\u00a0" : ""));
    this.top.hidden = this.sort.hidden && this.colours.hidden && !told && !this.noted;
  }

  tile(rank) {
    return make("button", { type: "button", "aria-pressed": "false", tabindex: rank ? "-1" : "0", "data-rank": rank },
      make("span", { class: "sr-who" }), make("span", { class: "sr-lanebar" }, make("span")),
      make("span", { class: "sr-at" }), make("span", { class: "sr-lanefacts" }),
      make("span", { class: "sr-figures" }));
  }

  fill(rank, ranks, usage, now, silent, many, heat) {
    const tile = this.tiles[rank], [who, bar, line, told] = tile.children, letter = ranks.state[rank];
    const silence = this.silence(rank, ranks, now), starves = usage.starves.includes(rank), { noun } = this.panel.run.state;
    const [epoch, step, rate] = [ranks.epoch[rank], ranks.step[rank], ranks.rate[rank]], [sign, state] = RANK_STATES[letter];
    const done = letter === "f" ? 1 : ranks.done[rank], host = ranks.hosts[ranks.host[rank]], waits = usage.waiting[rank];
    const cells = { host, pid: ranks.pid[rank] || null, lines: ranks.pid[rank] ? ranks.lines[rank] : null, silence: silence >= FACT_S ? silence : null,
                    usage: usage.words(rank), gpu: ranks.gpu[rank], epoch, step, done, rate, waits, behind: ranks.behind[rank], failure: ranks.failure[rank],
                    at: letter === "r" ? usage.lines[rank]?.[0] : "" };
    const words = Object.fromEntries(RANK_FACTS.map((column) => [column.name, fact(column, cells[column.name], noun)]));
    const looks = `${letter === "." ? "" : letter}${silent ? " sr-silent" : ""}${(words.behind || starves) && !silent ? " sr-slow" : ""}`;
    const title = [`rank ${rank} ${state}`, ...Object.values(words)].filter(Boolean).join(", ");
    const place = [epoch != null && `e${epoch}`, step != null && step].filter((each) => each !== false).join(" · ");
    put(who, many ? sign : `${rank} ${sign}${place && ` ${place}`}`);
    if (!many) {
      const facts = [silent && `⏸ ${words.silence}`, words.behind && `▼ ${words.behind}`, starves && words.waits,
        !silent && letter === "r" && words.rate, letter === "r" && !usage.used[rank] && words.gpu, ranks.hosts.length > 1 && host].filter(Boolean).map((words) => words.replaceAll(" ", "\u00a0")).join(" ·\u00a0");
      if (told.dataset.facts !== facts) told.dataset.facts = facts;
      if (line.dataset.at !== words.at) line.dataset.at = words.at;
      bar.firstChild.style.width = `${100 * (done ?? 0)}%`;
      bar.style.visibility = done == null ? "hidden" : "";
    }
    if (tile.title !== title) {
      tile.title = title;
      tile.setAttribute("aria-label", title);
    }
    const all = many ? looks : `${looks} sr-c${rank % RANK_COLOURS.length}`.trim(); // the edge of a lane has the rank's colour
    if (tile.className !== all) tile.className = all;
    tile.style.setProperty("--sr-heat", heat == null ? "" : `${Math.round(100 * heat)}%`);
    tile.toggleAttribute("data-heat", heat != null);
    tile.setAttribute("aria-pressed", String(this.panel.chosen.has(rank)));
  }

  // Show the resources that the ranks use, as numbers and curves. All lanes of a run have the same figures, so that the figures
  // are aligned.
  measure(usage, count) {
    const shown = Object.keys(FIGURES).filter((field) => usage.column(field).some((value) => value !== null));
    const curves = shown.length ? usage.curves(count) : null;
    for (let rank = 0; rank < count; rank++) {
      const place = this.tiles[rank].lastChild;
      while (place.children.length > shown.length) place.lastChild.remove();
      while (place.children.length < shown.length) place.append(make("span", { class: "sr-figure" }, drawing("sr-spark", WIDTH, HEIGHT)));
      shown.forEach((field, at) => {
        const figure = place.children[at], value = usage.of(rank, field), [name, write] = FIGURES[field];
        const words = value === null ? "" : `${name} ${write(value)}`.trim(), drawn = words && curves[rank][field];
        if (figure.dataset.words !== words) figure.dataset.words = words;
        const path = figure.firstChild.firstChild;
        if (path.getAttribute("d") !== drawn) path.setAttribute("d", drawn);
      });
    }
  }

  // Return for how many seconds a running rank has been silent; null if the rank is not running or the time is not known.
  silence(rank, ranks, now) {
    return now !== null && ranks.state[rank] === "r" ? now - ranks.heard[rank] : null;
  }

  // Return for each rank whether it is silent although other ranks are not, or has been silent for a long time.
  quiet(ranks, now) {
    const last = Math.max(...ranks.heard);
    return ranks.heard.map((_, rank) => {
      const silence = this.silence(rank, ranks, now);
      return silence > ALL_SILENT_S || (silence > SILENT_S && now - last < SILENT_S / 2);
    });
  }

  // Return a number from 0 to 1 for each rank, for the shade of its square. Return null if the colours show states.
  heats(ranks, usage, now) {
    const columns = { progress: ranks.done, "steps/s": ranks.rate, silence: ranks.heard.map((_, rank) => this.silence(rank, ranks, now)),
                      CPU: usage.column("cpu"), memory: usage.column("memory"), "waits for data": usage.waiting };
    for (const option of this.colour.options) option.disabled = option.value !== "state" && !columns[option.value].some((value) => value != null);
    const values = columns[this.heat];
    const known = values?.filter((value) => value != null);
    if (!known?.length) return null;
    const least = Math.min(...known), most = Math.max(...known);
    put(this.colour.options[this.colour.selectedIndex], `${this.heat}: ${HEATS[this.heat](least)} to ${HEATS[this.heat](most)}`);
    return values.map((value) => (value == null ? null : most > least ? (value - least) / (most - least) : 1));
  }

  // Sort the lanes by rank, or by progress, with the least progress first.
  arrange(ranks, count, many) {
    const order = [...Array(count).keys()];
    // A rank that has ended an epoch has no step in it.
    const apart = ({ done, epoch, step }, a, b) => (done[a] ?? 2) - (done[b] ?? 2) || (epoch[a] ?? 0) - (epoch[b] ?? 0)
      || (step[a] ?? Infinity) - (step[b] ?? Infinity) || a - b;
    if (this.sorted && !many) order.sort((a, b) => apart(ranks, a, b));
    if (this.order?.length === count && order.every((rank, at) => rank === this.order[at])) return;
    this.order = order;
    order.forEach((rank, at) => { this.tiles[rank].style.order = at; });
  }

  counts(ranks, usage, quiet, count) {
    const words = counted(ranks.state, { behind: ranks.behind, silent: quiet, starves: usage.starves });
    return words + (count < ranks.state.length ? ` · the first ${written(count)} of them:` : "");
  }

  // A click on a rank shows only the rank's lines, and a second click shows the lines of all ranks again. A click with Ctrl,
  // Cmd or Shift adds the rank to the selected ranks, or removes the rank from them.
  toggle(rank, event, where) {
    const { chosen } = this.panel;
    const several = event.ctrlKey || event.metaKey || event.shiftKey;
    const next = new Set(several ? chosen : []);
    if (chosen.has(rank) && (several || chosen.size === 1)) next.delete(rank);
    else next.add(rank);
    this.panel.chooseRanks(next, where);
  }

  // If one rank is selected, show what its current line has called.
  drawStack(ranks, usage) {
    const [rank, more] = this.panel.chosen, [line, calls] = (more === undefined && ranks.state[rank] === "r" && usage.lines[rank]) || [];
    this.stack.hidden = !line;
    put(this.stack, line ? `rank ${rank}, ${line}\n${calls.map((call) => `  ${call}`).join("\n")}` : "");
  }

  walk(event) {
    const from = this.tiles.indexOf(document.activeElement), at = this.order.indexOf(from);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: this.order.length - 1 }[event.key];
    const next = this.tiles[this.order[to]];
    if (from < 0 || to === undefined || !next) return;
    this.tiles[from].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    event.preventDefault();
  }
}
