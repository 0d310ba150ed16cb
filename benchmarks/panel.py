"""The live panel in a real JupyterLab and a real browser: how soon it shows lines, how smoothly, and at what cost."""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import US, Effort, Goal, Measured, Row, Turns, say

# For lab.py, which the tests also use, and for what it imports.
sys.path += [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("browser", "plugins")]

PLAIN = "print in JupyterLab"
LINES_PER_S, SECONDS = 1_000, 10
RANKS, STEPS, REDRAWS = 8, 10_000, 50
SOON, LEAN, PROMPT, CHEAP, SMALL, SMOOTH = Goal(0.15), Goal(150), Goal(0.2), Goal(5), Goal(200), Goal(0.016)

# Collects in `spent` the CPU time that the kernel's thread spends on views.
SETUP = """%load_ext sparkring
import json, time
from sparkring.views.panel import PanelView

def watched(method):
    def call(self, record):
        begun = time.thread_time()
        try:
            return method(self, record)
        finally:
            spent.append(time.thread_time() - begun)
    return call

PanelView.refresh, PanelView.close = watched(PanelView.refresh), watched(PanelView.close)
spent = []
print("ready")
"""
STEADY = f"""%%horovod -n -2 --name steady
import time
begun = time.time()
for number in range({LINES_PER_S * SECONDS // 2}):
    late = begun + number / {LINES_PER_S // 2} - time.time()
    if late > 0:
        time.sleep(late)
    print(f"at {{time.time():.4f}} by {{rank}}")
"""
SPENT = "print(json.dumps(sum(spent)))"
BURST = """%%horovod -n -1 --name burst
for number in range(LINES):
    print("line", number, "of a burst, with some words to it")
"""
PLAIN_BURST = """for number in range(LINES):
    print("line", number, "of a burst, with some words to it")
"""
ORDINARY = """%%horovod -n -2 --name ordinary
import random
import sparkring
for epoch in range(1, 13):
    for step in range(1, 13):
        print(f"{step}/12 [{'=' * step}{'.' * (12 - step)}] - loss: {1 / (epoch + step / 12):.4f} - rank {rank}")
    values = {name: 1 / epoch + 0.01 * random.random() for name in ("loss", "accuracy", "val_loss", "val_accuracy")}
    sparkring.log(epoch=epoch, epochs=12, **values)
"""
AT_SETUP, AT_STEADY, AT_SPENT, AT_BURST, AT_PLAIN, AT_ORDINARY = range(6)

# After each frame, notes the time since the frame before, and the last line that is now on the screen.
WATCH = """() => {
  const seen = window.seen = { frames: [], lines: [], clicks: [], on: true };
  const now = () => performance.timeOrigin + performance.now();
  let before = performance.now();
  const frame = (at) => {
    seen.frames.push(at - before);
    before = at;
    setTimeout(() => {
      let last = -1;
      for (const row of document.querySelectorAll('.sr-panel .sr-row')) last = Math.max(last, Number(row.dataset.line));
      if (last > (seen.lines.at(-1)?.[1] ?? -1)) seen.lines.push([now() / 1000, last]);
    });
    if (seen.on) requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
  addEventListener('click', (event) => requestAnimationFrame(() => setTimeout(() =>
    seen.clicks.push((performance.now() - event.timeStamp) / 1000))), true);
}"""


def live(effort: Effort) -> list[Row]:
    with _lab() as (lab, browser):
        lines = 100_000 if effort.quick else 2_000_000
        turns = Turns(
            effort.runs if effort.quick else min(effort.runs, 3),
            {
                US: lambda: {**_steady(lab, browser), **_burst(lab, browser, lines), **_ordinary(lab, browser)},
                PLAIN: lambda: _plain_burst(lab, browser, lines),
            },
        )
    steady, burst = f"panel, {LINES_PER_S:,} lines/s", f"panel, {lines:,} lines at once"
    return [
        turns.row(f"{steady}: print to pixels, median", "s", "median", goal=SOON),
        turns.row(f"{steady}: print to pixels, 95th percentile", "s", "p95"),
        turns.row(f"{steady}: kernel's time for views", "% of a core", "spent", goal=CHEAP),
        turns.row(f"{burst}: speed", "lines/s", "speed", PLAIN, goal=Goal(200_000, at_least=True)),
        turns.row(f"{burst}: page's memory grows by", "MB", "grown", PLAIN, goal=LEAN),
        turns.row(f"{burst}: frame time, 99th percentile", "s", "frame_p99", PLAIN),
        turns.row(f"{burst}: frame time, longest", "s", "frame_max", PLAIN),
        turns.row(f"{burst}: slowest response to a click", "s", "click", goal=PROMPT),
        turns.row("size of the saved notebook of an ordinary run", "kB", "saved", goal=SMALL),
    ]


@contextlib.contextmanager
def _lab() -> Iterator[tuple[Any, Any]]:
    import lab as labs
    from playwright.sync_api import expect

    expect.set_options(timeout=300_000)
    say("starting JupyterLab …")
    with (
        tempfile.TemporaryDirectory(prefix="panel-") as folder,
        labs.jupyterlab(Path(folder) / "lab") as lab,
        _browser() as browser,
    ):
        yield lab, browser


@contextlib.contextmanager
def _browser() -> Iterator[Any]:
    import lab as labs

    path = labs.chromium()
    if path is None:
        raise RuntimeError(f"there is no browser: none of {', '.join(labs.CHROMIUMS)} is on PATH")
    with labs.browser(path, ["--enable-precise-memory-info"]) as browser:
        yield browser


@contextlib.contextmanager
def _notebook(lab: Any, browser: Any, lines: int = 0) -> Iterator[Any]:
    """Open a notebook with a kernel of its own, ready to run the cells."""
    from lab import Opened

    setup = f"{SETUP}\nLINES = {lines}"
    found = Opened(browser, lab)("panel", setup, STEADY, SPENT, BURST, PLAIN_BURST, ORDINARY)
    try:
        found.run(AT_SETUP, wait=True)
        yield found
    finally:
        for session in lab.ask("/api/sessions"):
            lab.ask(f"/api/sessions/{session['id']}", "DELETE")
        found.page.close()


# ── A thousand lines a second ─────────────────────────────────────────────────


def _steady(lab: Any, browser: Any) -> Measured:
    with _notebook(lab, browser) as notebook:
        notebook.page.evaluate(WATCH)
        notebook.run(AT_STEADY, wait=True)
        notebook.page.wait_for_timeout(500)
        shown = notebook.page.evaluate("window.seen.lines")
        panel = notebook.panel(AT_STEADY)
        panel.get_by_role("tab", name="Logs").click()
        with notebook.page.expect_download() as download:
            panel.get_by_role("button", name="download").click()
        printed = [float(at) for at in re.findall(r"at ([\d.]+) by", Path(download.value.path()).read_text())]
        notebook.run(AT_SPENT, wait=True)
        spent = json.loads(notebook.cell(AT_SPENT).locator(".jp-OutputArea-output").inner_text())
    if len(printed) != LINES_PER_S * SECONDS:
        raise RuntimeError(f"the page has {len(printed)} of {LINES_PER_S * SECONDS} lines")
    took, frame = [], 0
    for number, at in enumerate(printed):
        while shown[frame][1] < number:
            frame += 1
        took.append(shown[frame][0] - at)
    return {
        "median": statistics.median(took),
        "p95": statistics.quantiles(took, n=20)[-1],
        "spent": 100 * spent / (max(printed) - min(printed)),
    }


# ── The burst ─────────────────────────────────────────────────────────────────


def _burst(lab: Any, browser: Any, lines: int) -> Measured:
    with _notebook(lab, browser, lines) as notebook:
        tile = notebook.panel(AT_BURST).locator(".sr-tiles button").first

        def meanwhile() -> None:
            if tile.count() and tile.is_visible():
                tile.click()

        found = _measured(notebook, AT_BURST, lines, meanwhile)
        clicks = notebook.page.evaluate("window.seen.clicks")[1:]  # the first click put the cursor into the cell
        return {**found, "click": max(clicks)}


def _plain_burst(lab: Any, browser: Any, lines: int) -> Measured:
    with _notebook(lab, browser, lines) as notebook:
        return _measured(notebook, AT_PLAIN, lines, lambda: None)


def _measured(notebook: Any, at: int, lines: int, meanwhile: Any) -> Measured:
    """Run the cell, and measure the page's memory and frames; `meanwhile` is called twice a second."""
    session = notebook.page.context.new_cdp_session(notebook.page)
    session.send("Performance.enable")

    def held() -> float:
        found = session.send("Performance.getMetrics")["metrics"]
        return next(each["value"] for each in found if each["name"] == "JSHeapUsedSize")

    session.send("HeapProfiler.collectGarbage")
    before = most = held()
    notebook.page.evaluate(WATCH)
    begun = time.perf_counter()
    notebook.run(at)
    while not re.search(r"\d", notebook.prompt(at).inner_text()):
        notebook.page.wait_for_timeout(500)
        meanwhile()
        most = max(most, held())
    seconds = time.perf_counter() - begun
    notebook.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    notebook.page.wait_for_timeout(1000)
    meanwhile()
    session.send("HeapProfiler.collectGarbage")
    frames = sorted(each / 1000 for each in notebook.page.evaluate("window.seen.frames"))
    return {
        "speed": lines / seconds,
        "grown": (max(most, held()) - before) / 1e6,
        "frame_p99": frames[int(0.99 * (len(frames) - 1))],
        "frame_max": frames[-1],
    }


# ── What is saved ─────────────────────────────────────────────────────────────


def _ordinary(lab: Any, browser: Any) -> Measured:
    with _notebook(lab, browser) as notebook:
        notebook.run(AT_ORDINARY, wait=True)
        notebook.save()
        return {"saved": notebook.path.stat().st_size / 1000}


# ── Charts, in a page without JupyterLab ──────────────────────────────────────

# Loads the panel's script, and notes how long the page works in each of its frames. uPlot draws in a microtask, which
# runs before the microtask that notes the time.
OPEN = """async ([script, messages]) => {
  const frame = window.requestAnimationFrame.bind(window);
  const took = window.took = [];
  window.requestAnimationFrame = (draw) => frame((at) => {
    const began = performance.now();
    draw(at);
    Promise.resolve().then(() => took.push((performance.now() - began) / 1000));
  });
  const get = (name) => (name === "page" ? "page" : undefined);
  const model = { get, on: (name, hear) => { window[name] = hear; }, off() {}, send() {} };
  (await import(URL.createObjectURL(new Blob([script], { type: "text/javascript" })))).default.initialize({ model });
  messages.forEach(window["msg:custom"]);
}"""
# Tells the panel that the curves have changed, and waits until it has drawn them.
REDRAW = """async ([ranks, steps, redraws]) => {
  const x = Array.from({ length: steps }, (_, step) => step + 1);
  const noise = (step, rank) => Math.sin(step * 12.9898 + rank * 78.233) * Math.sin(step * 0.7);
  const line = (rank) => x.map((step) => Math.exp(-3 * step / steps) + rank / 60 + 0.08 * noise(step, rank));
  const curve = { name: "loss", last: "0.1", colour: "#2f80d0", dashed: false, mean: line(ranks / 2), undone: [],
                  ranks: Object.fromEntries(Array.from({ length: ranks }, (_, rank) => [rank, line(rank)])) };
  const charts = [{ words: "loss", x, time: x, curves: [curve] }];
  const message = { run: "run", kind: "charts", axis: "step", axes: {}, restarts: [], checkpoints: [], charts };
  const next = () => new Promise((done) => setTimeout(() => requestAnimationFrame(() => setTimeout(done))));
  const found = [];
  for (let turn = 0; turn <= redraws; turn++) {
    window.took.length = 0;
    window["msg:custom"](structuredClone(message));
    await next();
    if (turn) found.push(Math.max(...window.took)); // the first drawing makes the charts
  }
  return found;
}"""


def charts(effort: Effort) -> list[Row]:
    with _browser() as browser:
        turns = Turns(effort.runs, {US: lambda: _redraws(browser)})
    what = f"panel, a chart of {RANKS} ranks × {STEPS:,} steps: time to redraw, "
    return [turns.row(what + "median", "s", "median", goal=SMOOTH), turns.row(what + "95th percentile", "s", "p95")]


def _redraws(browser: Any) -> Measured:
    from sparkring.history.events import RankStarted, RunStarted
    from sparkring.history.record import RunRecord, replay
    from sparkring.views import live as messages
    from sparkring.views import panel as sources

    ranks = (RankStarted(1.0, rank, "host", 1) for rank in range(RANKS))
    record = replay([RunStarted(0.0, "run", "charts", "", RANKS, "local", "plain", "all"), *ranks], RunRecord())
    script, style = (
        Path(sources.__file__).with_name(f"panel.bundle.{kind}").read_text("utf-8") for kind in ("js", "css")
    )
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    try:
        page.set_content(f'<style>{style}</style><div data-sparkring="run" data-page="page"></div>')
        page.evaluate(OPEN, [script, messages.whole(record, 1.0)])
        found = page.evaluate(REDRAW, [RANKS, STEPS, REDRAWS])
    finally:
        page.close()
    return {"median": statistics.median(found), "p95": statistics.quantiles(found, n=20)[-1]}
