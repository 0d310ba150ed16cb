// The panel in the page. The page itself handles clicks and keys, because in most front ends Python receives no
// messages while a cell runs.

import { ChartsView } from "./charts.js";
import { button, make, put } from "./elements.js";
import { ItemsView } from "./itemsview.js";
import { LogView } from "./log.js";
import { SearchView } from "./searchview.js";
import { RankView } from "./tiles.js";
import { duration } from "./words.js";

export const KERNEL_GONE = "ended with the kernel";
const LOOKS = { starting: "", interrupted: "sr-cut", "timed out": "sr-cut", [KERNEL_GONE]: "sr-cut" };
const TABS = ["logs", "items", "search", "metrics", "shards", "checkpoints", "restarts", "timeline", "code"];

let panels = 0;

// One panel in one place of the page. A run can have several panels, since JupyterLab can show an output twice.
export class Panel {
  constructor(run, place) {
    this.run = run;
    this.place = place;
    this.id = `sr-panel-${panels++}`;
    this.chosen = new Set();
    this.tab = "logs";
    this.elements();
    this.log = new LogView(this);
    this.items = new ItemsView(this);
    this.search = new SearchView(this);
    this.charts = new ChartsView(this);
    this.numbers = make("div");
    this.bodies.logs.append(this.log.element);
    this.bodies.items.append(this.items.element);
    this.bodies.search.append(this.search.element);
    this.bodies.metrics.append(this.charts.element, this.numbers);
    place.append(this.root);
    this.resized = new ResizeObserver(() => this.schedule());
    for (const each of [this.log.box, this.charts.element, this.search.element, this.items.element]) this.resized.observe(each);
    // When the theme changes, front ends change attributes of these two elements. The charts must then be drawn again,
    // because they use the theme's text colour.
    this.themed = new MutationObserver(() => this.schedule());
    for (const each of [document.documentElement, document.body]) this.themed.observe(each, { attributes: true });
    this.htmlDirty = new Set(Object.keys(run.html));
    this.ticker = setInterval(() => this.scheduleState(), 1000);
    this.select("logs");
    this.scheduleState();
  }

  elements() {
    this.state = make("b", { class: "sr-state" });
    this.title = make("span", { class: "sr-title" });
    this.facts = make("small");
    this.stop = button("sr-stop", "■ Stop", null, () => this.stopRun(), { hidden: true });
    this.said = make("small", { class: "sr-words", role: "status", "aria-live": "polite" });
    this.bar = make("div", { role: "progressbar", "aria-label": "Progress", "aria-valuemin": "0", "aria-valuemax": "100" });
    this.words = make("small");
    this.why = make("div", { class: "sr-why", role: "alert", hidden: true });
    this.notices = make("div", { class: "sr-notices" });
    this.ranks = new RankView(this);
    this.bodies = {};
    this.buttons = {};
    const list = make("div", { class: "sr-tabs", role: "tablist", "aria-label": "Details of the run" });
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
    // With this tabindex, a click anywhere in the panel gives it the focus, so that keys are typed in the panel.
    this.root = make("div", { class: "sr-run sr-panel", role: "region", "aria-label": "Distributed run", tabindex: "-1" },
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

  stopRun() {
    this.run.stop();
    this.buttons[this.tab].focus(); // Stop will be disabled; without this line, its focus would go to the page
  }

  // Draw at the browser's next frame, including the state.
  scheduleState() {
    this.stateDirty = true;
    this.schedule();
  }

  chooseRanks(ranks) {
    this.chosen = ranks;
    this.log.setRanks(ranks);
    this.select("logs");
    this.scheduleState();
  }

  say(text) {
    put(this.said, text);
    clearTimeout(this.saying);
    this.saying = setTimeout(() => put(this.said, ""), 4000);
  }

  // Draw at the browser's next frame: only once, even if many messages arrive before it.
  schedule() {
    if (this.frame || this.gone) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (!this.root.isConnected) return;
      if (this.stateDirty) this.drawState();
      for (const name of this.htmlDirty) this.drawHtml(name);
      if (this.run.items.rows.size && this.buttons.items.hidden) {
        this.buttons.items.hidden = false;
        this.select(this.run.search ? "search" : "items"); // when the first items arrive: these tabs tell more than the log
      }
      this.buttons.search.hidden = !this.run.search;
      if (this.tab === "items" && !this.items.draw(this.now() - (this.run.state?.started ?? 0))) this.schedule();
      if (this.tab === "search") this.search.draw();
      if (this.tab === "logs" && !this.log.draw()) this.schedule();
      if (this.tab === "metrics") this.charts.draw(this.run.curves);
    });
  }

  drawState() {
    const { state, stops, stopping } = this.run;
    this.stateDirty = false;
    if (!state) return;
    const over = state.ended > 0, now = this.now();
    if (over) clearInterval(this.ticker);
    put(this.state, state.state);
    this.state.className = `sr-state ${LOOKS[state.state] ?? `sr-${state.state}`}`;
    put(this.title, state.title);
    put(this.facts, [...state.facts, over ? state.took : duration(now - state.started)].join(" · "));
    this.stop.hidden = over || !stops;
    this.stop.disabled = stopping;
    put(this.stop, stopping ? "stopping …" : "■ Stop");
    const share = state.state === "finished" ? 1 : state.fraction;
    this.bar.style.width = `${100 * (share ?? 0)}%`;
    this.bar.setAttribute("aria-valuenow", String(Math.round(100 * (share ?? 0))));
    const words = [state.waiting, state.progress, state.left, ...state.last].filter(Boolean).join(" · ");
    put(this.words, words || "\u00a0");
    this.words.parentElement.hidden = over && !words;
    this.why.hidden = !state.outcome;
    put(this.why, state.outcome + (state.line ? ` (cell line ${state.line})` : ""));
    const told = state.notices.map((text) => `⚑ ${text}`).join("\n");
    put(this.notices, told);
    this.notices.hidden = !told;
    this.ranks.element.hidden = state.pooled; // the ranks of a pool are replaced during the run, so they have no tiles
    this.ranks.draw(state, now);
  }

  // Return the kernel's current time in seconds; after the run, return the time at which the run ended.
  now() {
    return this.run.state?.ended || Date.now() / 1000 - this.run.offset;
  }

  // Show the HTML that views/sections made for one section. Its `details` elements stay open if they were open before.
  drawHtml(name) {
    const html = this.run.html[name] || "";
    this.htmlDirty.delete(name);
    if (!this.bodies[name]) return;
    const body = name === "metrics" ? this.numbers : this.bodies[name];
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
    this.themed.disconnect();
    this.charts.remove();
    this.items.remove();
    this.root.remove();
  }
}
