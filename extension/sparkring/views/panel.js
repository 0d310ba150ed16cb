// The live panel. Draws what views/live.py tells of runs; its texts are plain, its HTML is the extension's own.
// Everything that is clicked or typed works here, in the page: while a cell runs, most front ends let Python hear nothing.

const KEPT_CHARACTERS = 48e6; // of all runs on the page: of older lines there are the log files
const ASK_AGAIN = 2, ASK_AGAIN_MS = 1000;
const SETTLE_MS = 500; // the wait before an unfinished traceback is shown
const KERNEL_GONE = "ended with the kernel";
const LOOKS = { starting: "", interrupted: "sr-cut", "timed out": "sr-cut", [KERNEL_GONE]: "sr-cut" };
const TABS = ["logs", "metrics", "shards", "checkpoints", "restarts", "timeline", "code"];

// Keys that the notebook still gets: run the cell, save, search, list all commands.
const NOTEBOOKS_KEYS = new Set(["Shift enter", "Ctrl enter", "Ctrl s", "Ctrl f", "Ctrl Shift c"]);

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
    this.stop = make("button", { type: "button", class: "sr-stop", hidden: true, onclick: () => this.stopRun() }, "■ Stop");
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
    // Wherever it is clicked it has the focus, so that keys are its own.
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
    this.buttons[this.tab].focus(); // the disabled button would lose the focus to the page
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
    put(this.facts, [...state.facts, over ? state.took : duration(now - state.started)].join(" · "));
    this.stop.hidden = over || !stops;
    this.stop.disabled = stopping;
    put(this.stop, stopping ? "stopping …" : "■ Stop");
    const share = state.state === "finished" ? 1 : state.fraction;
    this.bar.style.width = `${100 * (share ?? 0)}%`;
    this.bar.setAttribute("aria-valuenow", String(Math.round(100 * (share ?? 0))));
    put(this.words, [state.waiting, state.progress, state.left, ...state.last].filter(Boolean).join(" · ") || "\u00a0");
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
    this.last = Date.now() / 1000;
    if (message.kind === "lines") {
      this.lines.add(message);
      this.settle(SETTLE_MS);
    } else if (message.kind === "state") {
      this.state = message;
      this.offset = this.last - message.now;
      if (message.ended) this.settle(0);
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

  // Show unfinished tracebacks, in case no more lines come.
  settle(after) {
    clearTimeout(this.settling);
    if (!this.lines.tracebacks.size) return;
    this.settling = setTimeout(() => {
      this.lines.settle();
      for (const panel of this.panels.values()) panel.schedule();
    }, after);
  }

  // The kernel and its ranks are gone: show the last known state.
  cut() {
    const { state } = this;
    if (!state || state.ended) return;
    const ended = this.last - this.offset, clock = new Date(1000 * this.last).toTimeString().slice(0, 8);
    this.state = { ...state, state: KERNEL_GONE, ended, took: `${duration(ended - state.started)} · as of ${clock}`,
                   left: "", waiting: "", ranks: { ...state.ranks, state: state.ranks.state.replace(/[.r]/g, "s") } };
    this.settle(0);
    for (const panel of this.panels.values()) {
      panel.stateDirty = true;
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

// Keys typed in a panel must not reach the notebook, where D D would delete the running cell. JupyterLab ignores keys of an
// element with this attribute, but tests the focused element before its ancestors. So the focused element itself gets the
// attribute, just before the key reaches JupyterLab's listener on the document. It loses the attribute at the next key,
// since by then the focus may be within it, on an element of the notebook's.
let kept = null;

function keepKeys(event) {
  kept?.removeAttribute("data-lm-suppress-shortcuts");
  kept = event.target.closest?.(".sr-run") ? event.target : null;
  if (!NOTEBOOKS_KEYS.has(keyName(event))) kept?.setAttribute("data-lm-suppress-shortcuts", "");
}

// VS Code listens at the window and knows no such attribute. It gets keys with Ctrl or Cmd and function keys, because the
// whole application has them, to copy or to show the terminal; those without are the notebook's.
function stopKeys(event) {
  if (event.ctrlKey || event.metaKey || /^F\d/.test(event.key) || NOTEBOOKS_KEYS.has(keyName(event))) return;
  if (event.target.closest?.(".sr-run")) event.stopPropagation();
}

function keyName(event) {
  return [(event.ctrlKey || event.metaKey) && "Ctrl", event.altKey && "Alt", event.shiftKey && "Shift", event.key.toLowerCase()]
    .filter(Boolean).join(" ");
}

// All runs of this kernel that the page knows of, and the places for their panels.
class Runs {
  constructor(model) {
    this.runs = new Map();
    this.asked = new Set();
    this.closed = false;
    this.selector = `[data-sparkring][data-page="${CSS.escape(model.get("page"))}"]`;
    this.heard = (message) => this.hear(message);
    // The kernel has died or restarts.
    this.cut = () => {
      this.deaf = true;
      for (const run of this.runs.values()) run.cut();
    };
    this.listen(model);
    // A notebook takes outputs out of the page and puts them back as it scrolls.
    this.watch = new MutationObserver((changes) => {
      if (changes.some((change) => !change.target.closest?.(".sr-panel"))) this.look();
    });
    this.watch.observe(document.body, { childList: true, subtree: true });
    window.addEventListener("keydown", keepKeys, true);
    document.addEventListener("keydown", stopKeys);
    this.look();
  }

  // When a page has been loaded, the kernel announces its model again to all pages.
  listen(model) {
    this.leave(this.model);
    this.model = model;
    for (const run of this.runs.values()) run.model = model;
    model.on("msg:custom", this.heard);
    model.on("comm_live_update", this.cut);
    // VS Code lets go of its connection when the kernel restarts, and does not tell its models.
    this.kernel = model.widget_manager?.kernel;
    this.kernel?.disposed?.connect(this.cut);
  }

  leave(model) {
    model?.off("msg:custom", this.heard);
    model?.off("comm_live_update", this.cut);
    this.kernel?.disposed?.disconnect(this.cut);
  }

  hear(message) {
    if (!message.run) return;
    this.deaf = false; // only the connection was lost
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
      if (!this.asked.has(id) && !this.deaf) {
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
      if (!this.closed && !this.deaf && !this.runs.get(id)?.heard) this.ask(id, again - 1);
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
    window.removeEventListener("keydown", keepKeys, true);
    document.removeEventListener("keydown", stopKeys);
    this.leave(this.model);
    for (const id of [...this.runs.keys()]) this.forget(id);
  }
}

export default {
  initialize({ model }) {
    const known = (window.sparkringPages ??= new Map()), page = model.get("page");
    if (known.get(page)?.closed === false) known.get(page).listen(model);
    else known.set(page, new Runs(model));
    const runs = known.get(page);
    return () => { if (runs.model === model) runs.close(); };
  },
  render() {}, // some front ends load a widget's script only where a view of it stands; there is nothing to see in it
};
