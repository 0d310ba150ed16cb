// The strip of tiles above the tabs.

import { make, put } from "./elements.js";
import { duration } from "./words.js";

const SILENT_S = 5, ALL_SILENT_S = 30;
const TOLD_TILES = 16, NUMBERED_TILES = 32, SIGNED_TILES = 256, MOST_TILES = 1024;
const SIGNS = { ".": "…", r: "▶", f: "✓", x: "✗", y: "✗", s: "■", i: "·" };
const STATE_WORDS = { ".": "starting", r: "running", f: "finished", x: "failed", y: "failed after another rank",
                      s: "stopped", i: "not taking part" };

// A tile for each rank. It shows the rank's state as a colour and a sign, and its step. If there are few ranks, it also
// shows the epoch, the host (if there are several), the GPU, and the time since the rank's last message.
export class RankView {
  constructor(panel) {
    this.panel = panel;
    this.tiles = [];
    this.note = make("div", { class: "sr-note" });
    this.strip = make("div", { class: "sr-ranks sr-tiles", role: "toolbar", "aria-label": "Ranks: select the ranks whose lines are shown" });
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
    const silence = now !== null && letter === "r" ? now - ranks.heard[rank] : null;
    const silent = silence > ALL_SILENT_S || (silence > SILENT_S && now - last < SILENT_S / 2);
    const quiet = silence === null ? "" : duration(silence);
    const step = ranks.step[rank], host = ranks.hosts[ranks.host[rank]], gpu = ranks.gpu[rank] ?? "";
    const epoch = ranks.epoch[rank] == null ? "" : `epoch ${ranks.epoch[rank]}`;
    const mark = silent ? ` ⏸ ${quiet}` : slow ? " ▼" : "";
    const looks = `${letter === "." ? "" : letter}${silent ? " sr-silent" : ""}${slow && !silent ? " sr-slow" : ""}`;
    const title = [`rank ${rank} ${STATE_WORDS[letter]}`, host, ranks.pid[rank] && `process ${ranks.pid[rank]}`, gpu, epoch,
      step != null && `step ${step}`, `${ranks.lines[rank].toLocaleString("en")} lines`, quiet && `last message ${quiet} ago`,
      slow && "behind the others", ranks.failure[rank]].filter(Boolean).join(", ");
    const facts = [epoch, ranks.hosts.length > 1 && host, gpu.split(",")[0], !silent && quiet].filter(Boolean);
    tile.dataset.facts = ranks.state.length > TOLD_TILES ? "" : facts.join(" · ");
    put(tile, many ? SIGNS[letter] : `${rank} ${SIGNS[letter]}${step != null ? ` ${step}` : ""}${mark}`);
    if (tile.title !== title) {
      tile.title = title;
      tile.setAttribute("aria-label", title);
    }
    if (tile.className !== looks) tile.className = looks;
    tile.setAttribute("aria-pressed", String(this.panel.chosen.has(rank)));
  }

  // Return the ranks that are clearly behind the others. Some ranks are always a step ahead, so small differences do
  // not count.
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

  // A click on a tile shows only the lines of its rank, and a second click shows the lines of all ranks again. A click
  // with Ctrl, Cmd or Shift adds the rank to the selected ranks, or removes it from them.
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
