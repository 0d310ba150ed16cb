// The panel in the page. The page itself handles clicks and keys, because in most front ends Python receives no
// messages while a cell runs.

import { canRunAgain, runAgain } from "./again.js";
import { ChartsView, newLooks } from "./charts.js";
import { DisplaysView } from "./displays.js";
import { button, holdsSelection, make, put, refill } from "./elements.js";
import { InputRow } from "./inputrow.js";
import { ItemsView } from "./itemsview.js";
import { LOOK, LogView } from "./log.js";
import { ask, mayAsk } from "./notify.js";
import { Overview } from "./overview.js";
import { RankView } from "./ranks.js";
import { ItemCurves, SearchView } from "./searchview.js";
import { StreamView } from "./streamview.js";
import { percent, ticking } from "./words.js";

export const KERNEL_GONE = "ended with the kernel";
const TABS = ["stream", "overview", "search", "items", "logs", "metrics", "shards", "checkpoints", "restarts", "displays", "timeline", "code"];
// The tooltips of tabs without content.
const NOTHING = { metrics: "no metrics have been reported", shards: "no data set has been read with a reader that reports it",
  checkpoints: "no checkpoint has been saved", restarts: "the run has not been restarted", displays: "no rank has called display() or plt.show()", timeline: "no rank has said yet where its time goes",
  code: "the code of the run is not known" };

const BOX_PADDING = 6, OVER_ROOM = 306; // px; panel.css has the same padding and height for .sr-tab and .sr-body

// These tabs show only the selected ranks, or highlight them. If the user selects a rank in another tab, the panel shows the
// rank's lines.
const KEEPS_TAB = new Set(["stream", "overview", "metrics", "displays"]);

let panels = 0;

// One panel at one place in the page. A run can have several panels, because JupyterLab can show an output twice.
export class Panel {
  constructor(run, place) {
    this.run = run;
    this.place = place;
    this.id = `sr-panel-${panels++}`;
    this.away = null; // since when the place has been out of the page
    this.chosen = new Set();
    this.looks = newLooks();
    this.elements();
    this.overview = new Overview(this);
    this.log = new LogView(this, LOOK);
    this.items = new ItemsView(this);
    this.search = new SearchView(this);
    this.stream = new StreamView(this);
    this.charts = new ChartsView(this, () => this.chartRoom(this.bodies.metrics));
    this.displays = new DisplaysView(this);
    this.numbers = make("div");
    this.views = { stream: this.stream, overview: this.overview, search: this.search, items: this.items, logs: this.log, displays: this.displays };
    for (const [name, { element }] of Object.entries(this.views)) this.bodies[name].append(element);
    this.itemCurves = new ItemCurves(this);
    this.bodies.metrics.append(this.charts.element, this.itemCurves.element, this.numbers);
    place.append(this.root);
    this.resized = new ResizeObserver(() => this.schedule());
    const sized = [this.log.box, this.overview.element, this.overview.log.box, this.charts.element, this.bodies.metrics, this.search.element, this.items.element, this.stream.element];
    for (const each of sized) this.resized.observe(each);
    this.htmlDirty = new Set(Object.keys(run.html));
    this.ticker = setInterval(() => this.scheduleState(), 1000);
    this.select("overview");
    this.scheduleState();
  }

  elements() {
    this.state = make("b", { class: "sr-state" });
    this.title = make("span", { class: "sr-title" });
    this.facts = make("small");
    this.stop = button("sr-stop", "■ Stop", null, () => this.stopRun(), { hidden: true });
    this.allow = button("sr-tool", "allow notifications", "let the browser notify you when the run ends", () => this.allowNotifications(), { hidden: true });
    this.said = make("small", { class: "sr-words", role: "status", "aria-live": "polite" });
    this.bar = make("div", { role: "progressbar", "aria-label": "Progress", "aria-valuemin": "0", "aria-valuemax": "100" });
    this.words = make("small");
    this.failure = make("div", { role: "alert", hidden: true });
    this.advice = make("div", { class: "sr-actions", hidden: true },
      this.again = button("sr-again", "▶ Run again", "run only this cell again", () => this.runAgain(), { hidden: true }),
      button("sr-tool", "copy error", "copy the whole error", () => this.copy(this.run.state.error)),
      this.itsLog = button("sr-tool", "", "show only the lines of the rank that failed", () => this.chooseRanks(new Set([this.run.state.failed_rank]), "logs")));
    this.notices = make("div", { class: "sr-notices" });
    this.input = new InputRow((rank, number, text) => this.run.answer(rank, number, text));
    this.ranks = new RankView(this);
    this.bodies = {};
    this.buttons = {};
    const list = make("div", { class: "sr-tabs", role: "tablist", "aria-label": "Details of the run" });
    const body = make("div", { class: "sr-body" });
    for (const name of TABS) {
      const title = name[0].toUpperCase() + name.slice(1);
      this.buttons[name] = make("button", { type: "button", role: "tab", id: `${this.id}-${name}`, "aria-disabled": String(name in NOTHING),
        title: NOTHING[name], "aria-controls": `${this.id}-${name}-body`, onclick: () => this.isThere(name) && this.select(name) }, title);
      this.bodies[name] = make("div", { role: "tabpanel", class: `sr-tab sr-tab-${name}`, id: `${this.id}-${name}-body`,
        "aria-labelledby": `${this.id}-${name}`, tabindex: name === "logs" || name === "overview" ? false : "0" });
      list.append(this.buttons[name]);
      body.append(this.bodies[name]);
    }
    list.addEventListener("keydown", (event) => this.walk(event));
    // Because of this tabindex, a click anywhere in the panel gives the focus to the panel, so that the panel gets the keys.
    this.root = make("div", { class: "sr-run sr-panel", role: "region", "aria-label": "Distributed run", tabindex: "-1" },
      make("div", { class: "sr-head" }, this.state, this.title, this.facts, make("span", { class: "sr-spring" }), this.said, this.allow, this.stop),
      make("div", { class: "sr-bar sr-progress" }, this.bar), make("div", { class: "sr-words" }, this.words),
      this.failure, this.advice, this.ranks.element, this.notices, this.input.element, list, body);
  }

  // Return whether a tab has content. A run of items has no overview of ranks, only a search has trials, and only a stream has batches.
  isThere(name) {
    return !this.buttons[name].hidden && this.buttons[name].getAttribute("aria-disabled") === "false";
  }

  setThere(name, there) {
    this.buttons[name].setAttribute("aria-disabled", String(!there));
    this.buttons[name].title = there ? "" : NOTHING[name];
    if (!there && this.tab === name) this.select("logs");
  }

  select(name) {
    this.tab = name;
    for (const each of TABS) {
      const on = each === name;
      this.buttons[each].setAttribute("aria-selected", String(on));
      this.buttons[each].tabIndex = on ? 0 : -1;
      this.bodies[each].hidden = !on;
    }
    this.scheduleState();
  }

  walk(event) {
    const there = TABS.filter((name) => this.isThere(name));
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
    if (this.run.stopping) this.buttons[this.tab].focus(); // Stop will be disabled; without this line, the page would get the focus
  }

  async runAgain() {
    if (!await runAgain(this.root, this.run.state.magic)) this.say("select the cell and run it");
  }

  async allowNotifications() {
    const answer = await ask();
    this.say(answer === "granted" ? "the browser will notify you" : "the browser does not allow notifications");
    this.buttons[this.tab].focus(); // the button is hidden now; without this line, the page would get the focus
    this.scheduleState();
  }

  // Draw in the browser's next frame, including the state.
  scheduleState() {
    this.stateDirty = true;
    this.schedule();
  }

  // Return the height that is available for charts in `box`. After the run, the box is as high as its content. Therefore,
  // return the height that the box had during the run, if the user did not change it.
  chartRoom(box) {
    return this.root.classList.contains("sr-over") ? OVER_ROOM : box.clientHeight - BOX_PADDING;
  }

  // Show only the lines of these ranks in the tab `where`; if the set is empty, show the lines of all ranks. The charts
  // highlight the ranks.
  chooseRanks(ranks, where = KEEPS_TAB.has(this.tab) ? this.tab : "logs") {
    this.chosen = ranks;
    this.log.setRanks(ranks);
    this.overview.log.setRanks(ranks);
    this.select(where);
    this.scheduleState();
  }

  async copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      this.say("copied");
    } catch (error) {
      this.say("this page cannot use the clipboard");
    }
  }

  say(text) {
    put(this.said, text);
    clearTimeout(this.saying);
    this.saying = setTimeout(() => put(this.said, ""), 4000);
  }

  // Draw in the browser's next frame, but only once, even if many messages arrive before the frame.
  schedule() {
    if (this.frame || this.gone) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (!this.root.isConnected) return;
      if (this.stateDirty) this.drawState();
      for (const name of this.htmlDirty) this.drawHtml(name);
      this.arrange();
      this.again.hidden = this.advice.hidden || !canRunAgain(this.root, this.run.state.magic);
      if (this.run.displays && !this.isThere("displays")) this.setThere("displays", true);
      if (this.views[this.tab]?.draw() === false) this.schedule(); // more is left to draw
      if (this.tab === "metrics") {
        this.charts.draw(this.run.curves);
        this.itemCurves.draw();
      }
    });
  }

  // Show the tabs for this kind of run.
  arrange() {
    const pooled = Boolean(this.run.state?.pooled), searched = Boolean(this.run.search), streamed = Boolean(this.run.state?.streamed);
    if (this.pooled === pooled && this.searched === searched && this.streamed === streamed) return;
    Object.assign(this, { pooled, searched, streamed });
    this.buttons.overview.hidden = pooled;
    this.buttons.items.hidden = !pooled;
    if (pooled) this.items.name(this.run.state.pooled);
    this.buttons.search.hidden = !searched;
    this.buttons.stream.hidden = !streamed;
    this.select(streamed ? "stream" : searched ? "search" : pooled ? "items" : "overview");
  }

  drawState() {
    const { state, stoppable, stopping, asked, answers } = this.run;
    this.stateDirty = false;
    if (!state) return;
    const over = state.ended > 0, now = this.now();
    if (over) clearInterval(this.ticker);
    this.root.dataset.state = state.state;
    this.root.classList.toggle("sr-over", over); // the boxes are then as high as their content
    put(this.state, state.state);
    this.state.className = `sr-state sr-${state.state === KERNEL_GONE ? "cut" : state.look}`;
    put(this.title, state.title);
    this.root.setAttribute("aria-label", `Distributed run: ${state.title} (${this.run.id})`); // unique, because screen readers list the regions of a page
    put(this.facts, [...state.facts, over ? state.took : ticking(now - state.started)].join(" · "));
    this.allow.hidden = !mayAsk(state);
    this.stop.hidden = over || !stoppable;
    this.stop.disabled = stopping;
    put(this.stop, stopping ? "stopping …" : asked ? "■ Stop again" : "■ Stop");
    const share = state.state === "finished" ? 1 : state.fraction;
    this.bar.style.width = `${100 * (share ?? 0)}%`;
    if (share == null) this.bar.removeAttribute("aria-valuenow"); // how much is left is not known
    else this.bar.setAttribute("aria-valuenow", String(parseInt(percent(share))));
    const words = [state.waiting, state.progress, state.left, ...state.last].filter(Boolean).join(" · ");
    put(this.words, words || "\u00a0");
    this.words.parentElement.hidden = over && !words;
    this.advice.hidden = !state.error;
    put(this.itsLog, `rank ${state.failed_rank}'s log`);
    const watched = this.tab === "overview" && state.watch?.[0]; // the Overview itself shows it
    const told = state.notices.filter((text) => text !== watched).map((text) => `⚑ ${text}`).join("\n");
    put(this.notices, told);
    this.notices.hidden = !told;
    this.input.draw(over ? [] : state.asks, answers);
    this.ranks.element.hidden = Boolean(state.pooled); // the ranks of a pool are replaced during the run, so they have no tiles
    this.ranks.draw(state, this.run.usage, now);
  }

  // Return the kernel's current time in seconds; after the run, return the time at which the run ended.
  now() {
    return this.run.state?.ended || Date.now() / 1000 - this.run.offset;
  }

  // Show the HTML that views/sections made for one section. If text in the section is selected during the run, wait, because
  // the user may want to copy the text; the ticker causes another try.
  drawHtml(name) {
    const html = this.run.html[name] || "";
    const body = { failure: this.failure, metrics: this.numbers }[name] ?? this.bodies[name];
    if (body && !this.run.state?.ended && holdsSelection(body)) return;
    this.htmlDirty.delete(name);
    if (!body) return;
    refill(body, html); // made and escaped by views/sections
    if (name === "failure") body.hidden = !html;
    else this.setThere(name, Boolean(html));
  }

  remove() {
    this.gone = true;
    clearInterval(this.ticker);
    this.resized.disconnect();
    this.charts.remove();
    for (const view of Object.values(this.views)) view.remove?.();
    this.root.remove();
  }
}
