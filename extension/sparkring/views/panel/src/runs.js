// Stores what the page knows about runs from the messages of views/live.py. Strings in these messages contain no control
// codes. HTML in the messages was made and escaped by the extension, so it can be put into the page.

import { known } from "./displays.js";
import { make } from "./elements.js";
import { Items } from "./items.js";
import { guardKeys } from "./keys.js";
import { Lines } from "./lines.js";
import { tellEnd } from "./notify.js";
import { KERNEL_GONE, Panel } from "./panel.js";
import { RunsView } from "./runsview.js";
import { joined } from "./series.js";
import { Stream } from "./stream.js";
import { Usage } from "./usage.js";
import { ticking } from "./words.js";

const KEPT_CHARACTERS = 48e6; // the page keeps at most this many characters of all runs; dropped lines are in the log files
const ASK_AGAIN = 2, ASK_AGAIN_MS = 1000; // ask() says why
const OLD_MS = 5000; // a kernel that is alive sends a message within this time
const SAVED_S = 60; // messages that a widget has stored for longer than this are those of a saved notebook
const AWAY_MS = 60_000; // a panel is removed if its place has been out of the page for this long
const KEPT_RUNS = 20; // the page keeps at most this many ended runs without panels; panel/__init__.py has the same number
const SETTLE_MS = 500; // an unfinished traceback is shown after this time

// Stores what the page knows about one run, and the panels that show the run.
class Run {
  constructor(id, model, look) {
    this.id = id;
    this.model = model;
    this.look = look; // finds new places for panels
    this.listing = null; // what `%runs` shows: the last messages of the kinds "table" and "compared"
    this.lines = new Lines();
    this.items = new Items();
    this.stream = new Stream();
    this.usage = new Usage();
    this.state = null;
    this.html = {};
    this.search = null; // the last message of kind "search"
    this.curves = null; // the last message of kind "charts", with all points
    this.metrics = null; // the same without what ranks use of their machines
    this.displays = null; // the displays in the last message of kind "displays", with their HTML
    this.offset = 0; // this machine's clock minus the kernel's, in seconds
    this.heard = this.stops = this.answers = this.interrupts = false;
    this.asked = 0; // how often this page has asked the run to stop
    this.panels = new Map(); // maps the places in the page to the panels there
    // This style hides the static view of the run. It is in the page while at least one panel shows the run.
    this.hides = make("style", {}, `[data-sparkring-static="${CSS.escape(id)}"] { display: none; }`);
  }

  hear(message, at = Date.now() / 1000) {
    this.last = at;
    if (message.kind === "lines") {
      this.lines.add(message);
      this.items.read(message);
      this.settle(SETTLE_MS);
    } else if (message.kind === "state") {
      const ends = this.state && !this.state.ended && message.ended;
      this.state = message;
      this.offset = this.last - message.now;
      if (message.ended) this.settle(0);
      if (ends && this.panels.size) tellEnd(message);
    } else if (message.kind === "usage") this.usage.hear(message);
    else if (message.kind === "items") this.items.add(message);
    else if (message.kind === "stream") this.stream.add(message);
    else if (["table", "compared"].includes(message.kind)) this.listing = { ...this.listing, [message.kind]: message };
    else if (message.kind === "search") this.search = message;
    else if (message.kind === "sections") Object.assign(this.html, message.html);
    else if (message.kind === "charts") {
      this.curves = joined(this.curves, message);
      this.metrics = this.curves && { ...this.curves, charts: this.curves.charts.filter(({ used }) => !used) };
    } else if (message.kind === "displays") this.displays = known(this.displays, message);
    else if (message.kind === "foreground") this.interrupts = Boolean(this.kernel?.interrupt);
    else if (message.kind === "heard") Object.assign(this, { heard: true, stops: message.stops, answers: message.answers });
    for (const panel of this.panels.values()) {
      if (message.kind === "sections") Object.keys(message.html).forEach((name) => panel.htmlDirty.add(name));
      if (["state", "usage", "heard", "foreground"].includes(message.kind)) panel.scheduleState();
      else panel.schedule();
    }
  }

  // Show unfinished tracebacks after `after` ms, unless more lines arrive before then.
  settle(after) {
    clearTimeout(this.settling);
    if (!this.lines.tracebacks.size) return;
    this.settling = setTimeout(() => {
      this.lines.settle();
      for (const panel of this.panels.values()) panel.schedule();
    }, after);
  }

  // Show the last known state, because the kernel and its ranks have ended.
  cut() {
    const { state } = this;
    if (!state || state.ended) return;
    const ended = this.last - this.offset, clock = new Date(1000 * this.last).toTimeString().slice(0, 8);
    this.state = { ...state, state: KERNEL_GONE, ended, took: `${ticking(ended - state.started)} · as of ${clock}`,
                   left: "", waiting: "", ranks: { ...state.ranks, state: state.ranks.state.replace(/[.r]/g, "s") } };
    this.settle(0);
    for (const panel of this.panels.values()) panel.scheduleState();
  }

  get kernel() { return this.model.widget_manager?.kernel; }

  // Whether the user can stop the run. The second request to a stream also ends its current batch.
  get stoppable() { return this.stops || this.interrupts; }
  get stopping() { return this.asked > (this.state?.streamed ? 1 : 0); }

  // Stop the run. If the kernel gets no messages from this page because a cell is running, and the run is that cell, interrupt
  // the cell, as the application's own button does.
  stop() {
    this.asked += 1;
    if (this.stops) this.model.send({ kind: "stop", run: this.id });
    else this.kernel.interrupt();
    for (const panel of this.panels.values()) panel.scheduleState();
  }

  // Send the user's answer to request `number` of a rank to the kernel.
  answer(rank, number, text) {
    this.model.send({ kind: "answer", run: this.id, rank, number, text });
    for (const panel of this.panels.values()) panel.scheduleState();
  }

  mount(place) {
    if (this.panels.has(place) || !(this.state || this.listing)) return;
    this.panels.set(place, this.listing ? new RunsView(this, place) : new Panel(this, place));
    document.head.append(this.hides);
  }

  unmount(place) {
    this.panels.get(place)?.remove();
    this.panels.delete(place);
    if (!this.panels.size) this.hides.remove();
  }
}

// All runs of one kernel, as far as the page knows them. Finds the empty elements for their panels, and puts panels into them.
export class Runs {
  constructor(model) {
    this.runs = new Map();
    this.asked = new Set();
    this.views = new Map(); // maps views' elements, which the page's selector may not find, to runs
    this.closed = false;
    this.selector = `[data-sparkring][data-page="${CSS.escape(model.get("page"))}"]`;
    this.heard = (message) => this.hear(message); // widgets pass more arguments than the message
    // Called when the kernel has died or restarts.
    this.cut = () => {
      this.deaf = true;
      for (const run of this.runs.values()) run.listing ? this.forget(run.id) : run.cut(); // the static list stays
    };
    this.listen(model);
    // While the user scrolls, the notebook takes outputs out of the page and puts them back. Then look() finds the
    // elements for panels again.
    this.watch = new MutationObserver((changes) => {
      if (changes.some((change) => !change.target.closest?.(".sr-panel"))) this.look();
    });
    this.watch.observe(document.body, { childList: true, subtree: true });
    // When the theme changes, front ends change attributes of these two elements. The charts must then be drawn again,
    // because they use the theme's text colour.
    this.themed = new MutationObserver(() => this.runs.forEach(({ panels }) => panels.forEach((panel) => panel.schedule())));
    for (const each of [document.documentElement, document.body]) this.themed.observe(each, { attributes: true });
    this.leaveKeys = guardKeys();
    this.begin(model.get("snapshot") ?? []);
    this.look();
  }

  // Begin with the messages that a widget has stored. They may be old, for example in a saved notebook. If no kernel sends
  // a newer message, the panel shows the run as of the time of these messages.
  begin(messages) {
    const at = messages.find((message) => message.kind === "state")?.now;
    if (at == null) return;
    for (const message of messages) this.hear(message, at);
    const cut = () => {
      for (const run of this.runs.values()) if (run.last === at) run.cut();
    };
    if (Date.now() / 1000 - at > SAVED_S) cut();
    else setTimeout(cut, OLD_MS);
  }

  // Show the panel of a run in the element of a widget's view, as soon as the run is known.
  show(id, place) {
    this.views.set(place, id);
    const root = place.getRootNode();
    if (root !== document) root.append(make("style", {}, this.model.get("_css"))); // a shadow root has its own styles
    this.look();
  }

  hide(id, place) {
    this.views.delete(place);
    this.runs.get(id)?.unmount(place);
  }

  // Listen to `model` instead of the previous model. If a page is loaded while a cell is running, the kernel announces
  // its model again, and all pages replace their model. A model whose script was not ready within two seconds, as in a
  // busy page, never gets messages from anywidget. Its layout, a model of ipywidgets, does.
  listen(model) {
    this.leave(this.model);
    this.model = model;
    for (const run of this.runs.values()) {
      run.model = model;
      run.heard = false;
      if (!run.state?.ended) this.ask(run.id, ASK_AGAIN);
    }
    model.on("msg:custom", this.heard);
    model.get("layout")?.on("msg:custom", this.heard);
    model.on("comm_live_update", this.cut);
    // When the kernel restarts, VS Code disposes of its connection to the kernel without telling the widgets' models.
    this.kernel = model.widget_manager?.kernel;
    this.kernel?.disposed?.connect(this.cut);
  }

  leave(model) {
    model?.off("msg:custom", this.heard);
    model?.get("layout")?.off("msg:custom", this.heard);
    model?.off("comm_live_update", this.cut);
    this.kernel?.disposed?.disconnect(this.cut);
  }

  hear(message, at = undefined) {
    if (!message.run) return;
    this.deaf = false; // a message has arrived, so the kernel is alive, and only the connection was lost
    if (message.kind === "gone") {
      this.forget(message.run);
      return;
    }
    if (!this.runs.has(message.run)) this.runs.set(message.run, new Run(message.run, this.model, () => this.look()));
    this.runs.get(message.run).hear(message, at);
    if (["state", "table", "compared"].includes(message.kind)) this.look();
    this.makeRoom();
  }

  look() {
    const found = [...document.querySelectorAll(this.selector)].map((place) => [place, place.dataset.sparkring]);
    for (const [place, id] of [...found, ...this.views]) {
      this.runs.get(id)?.mount(place);
      if (!this.asked.has(id) && !this.deaf) {
        this.asked.add(id);
        this.ask(id, ASK_AGAIN);
      }
    }
    this.tidy();
  }

  // Remove the panels of outputs that have been cleared, and forget runs that can hardly be shown again. Should a place return,
  // it gets a new panel, and the page asks the kernel for the run again. For views, the front end calls hide() instead.
  tidy() {
    const now = Date.now();
    for (const run of this.runs.values()) {
      for (const [place, panel] of run.panels) {
        if (place.isConnected || this.views.has(place)) panel.away = null;
        else if (now - (panel.away ??= now) > AWAY_MS) run.unmount(place);
      }
    }
    const over = [...this.runs.values()].filter(({ state, panels }) => state?.ended && !panels.size);
    for (const { id } of over.slice(0, -KEPT_RUNS)) {
      this.forget(id);
      this.asked.delete(id);
    }
  }

  // Ask the kernel for a run, and ask again if there is no answer. The front end may open a channel that reaches the
  // kernel even while a cell is running. If the page asks before this channel is open, the kernel answers only after the
  // cell has ended.
  ask(id, left, again = {}) {
    this.model.send({ kind: "hello", run: id, ...again });
    if (!left) return;
    setTimeout(() => {
      if (!this.closed && !this.deaf && !this.runs.get(id)?.heard) this.ask(id, left - 1, { again: true });
    }, ASK_AGAIN_MS);
  }

  // If all runs together have too many characters, drop the oldest lines of the earliest run first.
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
    this.themed.disconnect();
    this.leaveKeys();
    this.leave(this.model);
    for (const id of [...this.runs.keys()]) this.forget(id);
  }
}
