"""The panel during and after a run: the tests watch one run from its first line to the saved notebook."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from lab import Lab, Notebook, Opened, axe
from playwright.sync_api import Locator, expect

SETUP = """%load_ext sparkring
FOLDER = {folder!r}
"""
# Like the quickstart's cell, but it runs until the file `end` exists, and pauses while the file `hold` exists.
TRAINING = """%%horovod -n -3 --name "a small quickstart"
import os
import sys
import time

import sparkring

def told(what):
    return os.path.exists(os.path.join(FOLDER, what))

print("the same everywhere")
print("\\x1b[32mgreen\\x1b[0m and \\x1b[1;31mbold red\\x1b[0m on", rank)
print("2026-11-22 10:00:00.123456: I tensorflow/core/util/port.cc:113] oneDNN is on", file=sys.stderr)
if rank == 1:
    print("a Needle, and another needle", file=sys.stderr)
step, steps = 0, 3000
while step < 20 or not told("end"):
    if step < steps and not told("hold"):
        step += 1
        print(f"step {step} of rank {rank}")
        sparkring.log(step=step, steps=steps, epoch=1, epochs=1, loss=1 / step + rank, accuracy=1 - 1 / step)
    time.sleep(0.1)
print("the last line of", rank)
"""


class Watched:
    """A notebook with a running cell."""

    AT = 1  # the cell

    def __init__(self, notebook: Notebook, folder: Path) -> None:
        self.notebook = notebook
        self.page = notebook.page
        self.panel = notebook.panel(self.AT)
        self.folder = folder

    def hold(self, on: bool) -> None:
        """Pause the ranks or let them continue, so that a test can look at a panel that does not change."""
        if on:
            (self.folder / "hold").touch()
            self.still()
        else:
            (self.folder / "hold").unlink(missing_ok=True)

    def still(self) -> None:
        """Wait until neither lines nor charts change. Charts are drawn later than lines, and drawing ends a drag."""
        seen, self_same = "", 0
        while self_same < 10:
            self.page.wait_for_timeout(150)
            charts = self.panel.locator(".sr-charts figure").evaluate_all("(all) => all.map((one) => one.textContent)")
            now = self.tile(0).inner_text() + "".join(charts)
            seen, self_same = now, self_same + 1 if now == seen else 0

    def tile(self, rank: int) -> Locator:
        return self.panel.locator(f".sr-tiles [data-rank='{rank}']")

    def button(self, name: str) -> Locator:
        return self.panel.get_by_role("button", name=name, exact=True)

    def tab(self, name: str) -> Locator:
        return self.panel.get_by_role("tab", name=name)

    def rows(self, text: str = "") -> Locator:
        rows = self.panel.locator(".sr-tab-logs .sr-row")
        return rows.filter(has_text=text) if text else rows

    def ranks_of_rows(self) -> set[str]:
        """Return the ranks that the visible lines are tagged with."""
        return set(self.panel.locator(".sr-tab-logs .sr-row .sr-tag").all_inner_texts())

    def until_ranks(self, *wanted: str) -> None:
        """Wait until the visible lines are tagged with exactly these ranks."""
        self.page.wait_for_function(
            """([at, wanted]) => {
              const panel = document.querySelectorAll('.jp-Notebook-cell')[at].querySelector('.sr-panel');
              const tags = panel.querySelectorAll('.sr-tab-logs .sr-row .sr-tag');
              const found = new Set([...tags].map((tag) => tag.textContent));
              return found.size === wanted.length && wanted.every((each) => found.has(each));
            }""",
            arg=[self.AT, list(wanted)],
        )

    def to_the_top(self) -> None:
        """Scroll to the first lines."""
        expect(self.rows().first).to_be_visible()
        self.page.wait_for_function(
            """(panel) => {
              const box = panel.querySelector('.sr-tab-logs .sr-lines');
              box.scrollTop = 0;
              return box.querySelector('[data-line="0"]');
            }""",
            arg=self.panel.element_handle(),
        )

    def number(self, locator: Locator) -> int:
        """Return the last number in an element's text."""
        return int(re.findall(r"\d+", locator.inner_text())[-1])

    def reset(self) -> None:
        """Reset the panel to its initial state."""
        self.hold(False)
        self.tab("Logs").click()
        chip = self.panel.locator(".sr-chip")
        if chip.is_visible():
            chip.click()
        self.panel.get_by_label("Search the lines").fill("")
        for name in ("stdout", "stderr", "fold identical", "follow"):
            if self.button(name).get_attribute("aria-pressed") == "false":
                self.button(name).click()
        for name in ("wrap", "time", "columns"):
            if self.button(name).get_attribute("aria-pressed") == "true":
                self.button(name).click()
        noise = self.button("start-up")
        if noise.is_visible() and noise.get_attribute("aria-pressed") == "true":
            noise.click()


@pytest.fixture(scope="module")
def started(opened: Opened, lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A run that goes on until the module's last tests end it."""
    folder = tmp_path_factory.mktemp("told")
    notebook = opened("live", SETUP.format(folder=str(folder)), TRAINING)
    notebook.run(0, wait=True)
    notebook.run(Watched.AT)
    found = Watched(notebook, folder)
    expect(found.panel).to_be_visible()
    expect(found.tile(0)).to_have_text(re.compile(r"0 ▶ e1 · \d+"))
    yield found
    (folder / "end").touch()
    expect(found.panel.locator(".sr-state")).to_have_text("finished")


@pytest.fixture
def live(started: Watched) -> Iterator[Watched]:
    """The same run, still running, with the panel in its initial state."""
    started.reset()
    yield started
    expect(started.page.locator("#jp-main-statusbar")).to_contain_text("| Busy")
    expect(started.panel.locator(".sr-state")).to_have_text("running")  # the run must last for the whole test
    expect(started.notebook.prompt(Watched.AT)).to_have_text("[*]:")


@pytest.mark.versions("of JupyterLab, ipywidgets, anywidget and ipykernel")
def test_it_moves_while_the_cell_runs(live: Watched, shoot: Callable[..., None]) -> None:
    expect(live.panel.locator(".sr-state")).to_have_text("running")
    expect(live.panel.locator(".sr-title")).to_have_text("a small quickstart")
    expect(live.rows("of rank").first).to_be_visible()
    expect(live.notebook.static(live.AT)).to_be_hidden()
    for rank in range(3):
        expect(live.tile(rank)).to_have_class(re.compile(r"^r\b"))
    bar, words = live.panel.get_by_role("progressbar"), live.panel.locator("div.sr-words")
    expect(words).to_contain_text("loss")
    expect(words).to_contain_text(re.compile(r"\bstep \d+"))
    step, share, last = live.number(live.tile(0)), bar.bounding_box(), live.rows().last.inner_text()
    expect(live.tile(0)).not_to_have_text(f"0 ▶ e1 · {step}")
    expect(live.rows().last).not_to_have_text(last)
    live.page.wait_for_function("([bar, width]) => bar.getBoundingClientRect().width > width",
                                arg=[bar.element_handle(), share["width"]])  # fmt: skip
    assert live.number(live.tile(0)) > step
    shoot(live.notebook, "running", live.notebook.cell(live.AT))


def test_the_overview(live: Watched, shoot: Callable[..., None]) -> None:
    """Charts and the last lines are shown together. A tab without content cannot be selected."""
    live.tab("Overview").click()
    overview = live.panel.get_by_role("tabpanel", name="Overview")
    expect(overview.locator("figure canvas")).to_have_count(2)
    expect(overview.locator(".sr-row").first).to_be_visible()
    expect(live.tab("Checkpoints")).to_have_attribute("aria-disabled", "true")
    live.tab("Checkpoints").click(force=True)
    expect(live.tab("Overview")).to_have_attribute("aria-selected", "true")
    shoot(live.notebook, "overview", live.panel)
    # Its lines can be wrapped, and "/" searches in the Logs tab. The buttons of a chart cover nothing.
    wrap = live.button("wrap")
    wrap.click()
    expect(wrap).to_have_attribute("aria-pressed", "true")
    expect(overview.locator(".sr-lines")).to_have_class(re.compile("sr-wrapped"))
    wrap.click()
    expect(overview.locator(".sr-lines")).not_to_have_class(re.compile("sr-wrapped"))
    figure = overview.locator("figure").first
    figure.hover()
    [caption, buttons] = [figure.locator(each).bounding_box() for each in ("figcaption", ".sr-take")]
    assert buttons["y"] > caption["y"] + caption["height"]
    overview.locator(".sr-lines").press("/")
    expect(live.panel.get_by_label("Search the lines")).to_be_focused()
    live.tab("Overview").click()
    live.tile(1).click()
    live.page.wait_for_function(
        """(panel) => {
          const tags = [...panel.querySelectorAll('.sr-tab-overview .sr-row .sr-tag')];
          return tags.length && tags.every((tag) => tag.textContent === '1');
        }""",
        arg=live.panel.element_handle(),
    )
    expect(live.tab("Overview")).to_have_attribute("aria-selected", "true")


def test_nothing_jumps_while_lines_arrive(live: Watched) -> None:
    live.page.evaluate(
        """(at) => {
          const output = document.querySelectorAll('.jp-Notebook-cell')[at].querySelector('.jp-Cell-outputArea');
          window.heights = new Set();
          new ResizeObserver(() => window.heights.add(output.getBoundingClientRect().height)).observe(output);
        }""",
        live.AT,
    )
    step = live.number(live.tile(0))
    live.page.wait_for_function(
        "([tile, step]) => Number(tile.innerText.match(/\\d+/g)?.at(-1)) > step + 30",
        arg=[live.tile(0).element_handle(), step],
    )
    assert live.page.evaluate("window.heights.size") == 1


def test_tiles_choose_whose_lines_are_shown(live: Watched) -> None:
    live.tile(1).click()
    live.until_ranks("1")
    expect(live.tile(1)).to_have_attribute("aria-pressed", "true")
    expect(live.panel.locator(".sr-chip")).to_contain_text("rank 1")
    live.tile(2).click(modifiers=["Control"])
    live.until_ranks("1", "2")
    live.tile(1).click(modifiers=["Control"])
    live.until_ranks("2")
    live.tile(2).click()
    live.until_ranks("0", "1", "2")
    expect(live.panel.locator(".sr-chip")).to_be_hidden()


def test_the_current_line_and_what_it_has_called(live: Watched, shoot: Callable[..., None]) -> None:
    at, stack = live.tile(1).locator(".sr-at"), live.panel.locator(".sr-stack")
    expect(at).to_have_attribute("data-at", "line 22: time.sleep(0.1)")
    live.tile(1).click()
    expect(stack).to_have_text(re.compile(r"^rank 1, line 22: time.sleep\(0.1\)\n.*<cell>:22 "))
    shoot(live.notebook, "stack", live.panel)
    live.tile(1).click()
    expect(stack).to_be_hidden()


def test_search(live: Watched, shoot: Callable[..., None]) -> None:
    search, count = live.panel.get_by_label("Search the lines"), live.panel.locator(".sr-tab-logs .sr-count")
    search.fill("NEEDLE")
    expect(count).to_have_text("1 match")
    expect(live.rows()).to_have_count(1)
    expect(live.panel.locator(".sr-tab-logs .sr-row mark")).to_have_text(["Needle", "needle"])
    search.press("Escape")
    expect(search).to_have_value("")
    live.until_ranks("0", "1", "2")
    expect(live.panel.locator("mark")).to_have_count(0)

    live.panel.locator(".sr-tab-logs .sr-lines").press("/")
    expect(search).to_be_focused()
    live.page.keyboard.type("needle")
    expect(live.rows()).to_have_count(1)
    shoot(live.notebook, "search", live.panel)
    live.rows().first.dblclick()
    expect(search).to_have_value("")
    expect(live.rows("Needle")).to_be_visible()
    expect(live.rows("the same everywhere")).to_be_visible()  # the neighbouring lines are shown again
    expect(live.button("follow")).to_have_attribute("aria-pressed", "false")


def test_what_is_shown_of_the_lines(live: Watched, shoot: Callable[..., None]) -> None:
    live.to_the_top()
    expect(live.button("follow")).to_have_attribute("aria-pressed", "false")
    # Identical lines from several ranks are folded into one.
    expect(live.rows("the same everywhere")).to_have_count(1)
    tag = live.rows("the same everywhere").locator(".sr-tag")
    expect(tag).to_have_text("0–2")
    expect(tag).to_have_class("sr-tag sr-c0")  # the lowest rank's colour, whichever rank's line arrived first
    live.tile(2).click()
    expect(live.rows("the same everywhere").locator(".sr-tag")).to_have_text("2")
    live.tile(2).click()
    live.button("fold identical").click()
    live.to_the_top()
    expect(live.rows("the same everywhere")).to_have_count(3)
    live.button("fold identical").click()
    # TensorFlow's start-up messages are hidden.
    expect(live.rows("oneDNN")).to_have_count(0)
    live.button("start-up").click()
    live.to_the_top()
    expect(live.rows("oneDNN").first).to_be_visible()
    live.button("start-up").click()
    # ANSI colours are shown as colours.
    live.to_the_top()
    green = live.rows("green").first.get_by_text("green", exact=True)
    expect(green).to_have_css("color", re.compile(r"^color\(srgb 0\.\d+ 0\.[3-7]"))
    expect(live.rows("green").first).to_contain_text(re.compile("green and bold red on [012]$"))
    shoot(live.notebook, "first-lines", live.panel)
    # Long lines can be wrapped, the times of lines shown, and the lines of ranks put side by side.
    live.button("time").click()
    expect(live.rows("Needle").locator(".sr-clock")).to_have_text(re.compile(r"^\d:\d\d\.\d$"))
    live.button("wrap").click()
    expect(live.panel.locator(".sr-tab-logs .sr-wrapped")).to_be_visible()
    rows = live.rows().evaluate_all("(all) => all.map((row) => [row.getBoundingClientRect().top, row.offsetHeight])")
    for (top, height), (below, _) in itertools.pairwise(sorted(rows)):
        assert abs(top + height - below) < 1, "each row is directly below another"
    live.button("columns").click()
    live.to_the_top()
    expect(live.panel.locator(".sr-heads .sr-part")).to_have_text(["rank 0", "rank 1", "rank 2"])
    expect(live.rows().filter(has_text="the same everywhere").first).to_be_visible()
    assert axe(live.page, f"[data-windowed-list-index='{live.AT}'] .sr-panel") == []
    for name in ("columns", "wrap", "time"):
        live.button(name).click()
    live.to_the_top()
    # Each stream can be hidden.
    expect(live.rows("Needle")).to_be_visible()
    live.button("stderr").click()
    expect(live.rows("Needle")).to_have_count(0)
    live.button("stderr").click()
    live.button("stdout").click()
    expect(live.rows()).to_have_count(1)
    expect(live.rows("Needle")).to_be_visible()


def test_lines_can_be_taken_along(live: Watched) -> None:
    live.tile(1).click()
    live.panel.get_by_label("Search the lines").fill("needle")
    expect(live.rows()).to_have_count(1)
    # VS Code saves a download when the click on the link bubbles up to the page's body.
    live.page.evaluate(
        """() => document.body.addEventListener('click', (event) => {
          window.offered ??= event.target.closest('a[download]')?.href;
        })"""
    )
    with live.page.expect_download() as download:
        live.button("download").click()
    assert live.page.evaluate("window.offered").startswith("blob:")
    expect(live.page.locator("a[download]")).to_have_count(0)
    assert Path(download.value.path()).read_text() == "[1] a Needle, and another needle\n"


def test_tabs_during_the_run(live: Watched, shoot: Callable[..., None]) -> None:
    live.tab("Metrics").click()
    metrics = live.panel.get_by_role("tabpanel")
    expect(metrics).to_have_count(1)
    expect(metrics).to_contain_text("accuracy")
    shoot(live.notebook, "metrics", live.panel)
    live.tab("Code").click()
    expect(live.panel.get_by_role("tabpanel")).to_contain_text("while step < 20")
    shoot(live.notebook, "code", live.panel)
    live.tab("Logs").click()
    expect(live.rows().first).to_be_visible()


def test_what_ranks_use_beside_the_loss(live: Watched, shoot: Callable[..., None]) -> None:
    """CPU and memory have charts on the axis of the loss, in the tab Metrics only."""
    live.tab("Metrics").click()
    for name in ("CPU (%)", "memory (GB)"):
        chart = live.panel.get_by_role("figure", name=f"{name} by step")
        expect(chart.locator("canvas")).to_be_visible()
        chart.press("End")
        expect(chart.locator(".sr-reading")).to_have_text(re.compile(r"^step [\d.,]+" + re.escape(name)))
    shoot(live.notebook, "used", live.panel)
    expect(live.panel.locator(".sr-overview .sr-used")).to_have_count(0)


def test_charts(live: Watched, shoot: Callable[..., None]) -> None:
    live.tab("Metrics").click()
    live.hold(True)
    charts = live.panel.locator(".sr-tab-metrics .sr-charts figure:not(.sr-used)")
    expect(charts).to_have_count(2)
    loss, reset = charts.first, live.button("reset zoom")
    expect(loss).to_have_attribute("aria-label", re.compile("^loss by step: from "))
    # At the cursor, the values of every rank are shown. Keys move the cursor from one point to the next.
    inside, reading = loss.locator(".u-over"), loss.locator(".sr-reading")
    expect(reading).to_be_hidden()
    inside.hover()
    expect(reading).to_have_text(re.compile(r"^step \d+loss(mean)[\d.]+(rank 0)[\d.]+(rank 1)[\d.]+(rank 2)[\d.]+$"))
    shoot(live.notebook, "charts", live.panel)
    steps = []
    for key in ("End", "ArrowLeft", "Home", "ArrowRight"):
        loss.press(key)
        steps.append(int(re.findall(r"^step (\d+)loss", reading.text_content() or "")[0]))
    assert steps[2] < steps[3] < steps[1] < steps[0]
    # The cursor stays at its step when the chart is made anew, as for another scale.
    log = live.button("log scale")
    at_cursor = reading.text_content()
    for _ in range(2):
        canvas = loss.locator("canvas").element_handle()
        log.evaluate("(button) => button.click()")  # without a pointer, and without taking the focus
        live.page.wait_for_function("(canvas) => !canvas.isConnected", arg=canvas)
        expect(reading).to_be_visible()
        assert reading.text_content() == at_cursor
    # A drag during which the chart has to change zooms. The zoom stays while new steps arrive.
    box = inside.bounding_box()
    assert box is not None
    live.page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 20)
    live.page.mouse.down()
    live.page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 40, steps=4)
    canvas = loss.locator("canvas").element_handle()
    log.evaluate("(button) => button.click()")
    live.page.wait_for_timeout(100)  # several frames
    live.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40, steps=4)
    assert canvas.evaluate("(canvas) => canvas.isConnected")
    live.page.mouse.up()
    expect(reset).to_be_visible()
    live.page.wait_for_function("(canvas) => !canvas.isConnected", arg=canvas)
    log.evaluate("(button) => button.click()")
    expect(reset).to_be_visible()
    step = live.number(live.tile(0))
    live.hold(False)
    expect(live.tile(0)).not_to_have_text(f"0 ▶ e1 · {step}")
    expect(reset).to_be_visible()
    reset.click()
    expect(reset).to_be_hidden()
    log.click()
    expect(log).to_have_attribute("aria-pressed", "true")
    expect(charts.locator("canvas")).to_have_count(2)
    log.click()
    # The charts can be smoothed and shown by time; they fill the height of the tab.
    tab = live.panel.get_by_role("tabpanel")
    tab.get_by_label("Smoothing").select_option("strong")
    tab.get_by_label("Horizontal axis").select_option("time")
    expect(loss.locator("figcaption")).to_have_text(re.compile(r"^loss [\d.]+ · best [\d.]+ at \d.* s$"))
    height = (loss.locator(".sr-plot").bounding_box() or {})["height"]
    assert 160 <= height <= 260
    tab.get_by_label("Horizontal axis").select_option("step")
    tab.get_by_label("Smoothing").select_option("off")
    # A click on a rank's line selects the rank, as a click on its tile does.
    live.tile(2).click()
    expect(live.tab("Metrics")).to_have_attribute("aria-selected", "true")
    live.tile(2).click()
    live.hold(True)
    box = inside.bounding_box()
    assert box is not None
    for down in range(2, int(box["height"]), 2):
        live.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + down)
        if inside.evaluate("(over) => over.style.cursor") == "pointer":
            break
    rank = int((reading.locator(".sr-near").first.text_content() or "").removeprefix("rank "))
    live.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + down)
    expect(live.tile(rank)).to_have_attribute("aria-pressed", "true")
    live.tile(rank).click()
    # A file takes the place of a copy that the page may not make.
    live.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    for kind, begin in (("CSV", b"step,"), ("PNG", b"\x89PNG")):
        loss.hover()
        with live.page.expect_download() as download:
            loss.get_by_role("button", name=kind).click()
        assert Path(download.value.path()).read_bytes().startswith(begin)
    live.page.evaluate("delete navigator.clipboard")


# In JupyterLab's command mode, each of these keys does something, some only when pressed twice.
NOTEBOOK_KEYS = [*"dd00iixzZabmrM", "ArrowDown", "Shift+ArrowUp", "Escape", "Delete", "Control+a", "Control+Backspace",
                 "Control+Shift+M", "Control+Shift+ArrowUp", "Control+z", "Alt+Enter"]  # fmt: skip
# Notes the keys that reach the window, where VS Code listens.
LISTEN_AT_WINDOW = "() => { reached = []; addEventListener('keydown', (event) => reached.push(event.key)); }"
FOCUSED = "() => document.activeElement.matches('.sr-panel, .sr-panel *')"


def test_keys_that_move_within_the_panel(live: Watched) -> None:
    live.tab("Logs").focus()
    live.page.keyboard.press("ArrowLeft")
    expect(live.tab("Overview")).to_have_attribute("aria-selected", "true")
    live.page.keyboard.press("ArrowRight")
    live.page.keyboard.press("ArrowRight")
    expect(live.tab("Metrics")).to_be_focused()
    expect(live.tab("Metrics")).to_have_attribute("aria-selected", "true")
    live.page.keyboard.press("ArrowLeft")
    expect(live.tab("Logs")).to_have_attribute("aria-selected", "true")
    live.to_the_top()
    lines = live.panel.locator(".sr-tab-logs .sr-lines")
    lines.press("Space")
    live.page.wait_for_function("(box) => box.scrollTop > box.clientHeight / 2", arg=lines.element_handle())
    live.tile(0).focus()
    live.page.keyboard.press("ArrowRight")
    expect(live.tile(1)).to_be_focused()
    live.page.keyboard.press("Enter")
    live.until_ranks("1")
    live.page.keyboard.press("Space")
    live.until_ranks("0", "1", "2")
    live.page.keyboard.press("Tab")
    expect(live.tab("Logs")).to_be_focused()


def test_keys_typed_in_the_panel_do_nothing_to_the_notebook(live: Watched) -> None:
    """No key has an effect, wherever the user has clicked. If JupyterLab got `D D`, it would delete the running cell.

    Only keys with Ctrl reach the window, where VS Code listens.
    """
    live.tile(1).click()
    live.until_ranks("1")
    live.hold(True)
    code = live.panel.locator(".sr-tab-code")
    live.page.evaluate(LISTEN_AT_WINDOW)
    for clicked in (live.panel.locator(".sr-chip"), live.tile(0), live.rows().last, live.panel.locator(".sr-title"),
                    live.button("stdout"), live.panel.locator("div.sr-words"),
                    live.panel.get_by_label("Search the lines"), live.tab("Code"), code.locator("pre").first,
                    live.tab("Logs")):  # fmt: skip
        clicked.click()
        before = live.notebook.structure()
        assert before[0] == "command"
        for key in NOTEBOOK_KEYS:
            live.page.keyboard.press(key)
            assert live.notebook.structure() == before, f"after {key!r} in {clicked}"
            assert live.page.evaluate(FOCUSED), f"after {key!r} in {clicked}"
    assert set(live.page.evaluate("reached")) == {"Control", "Shift", "a", "Backspace", "M", "ArrowUp", "z"}
    live.tab("Logs").click()
    search = live.panel.get_by_label("Search the lines")
    search.fill("step needle")
    for key in ("Control+Backspace", *"needle"):
        search.press(key)
    expect(search).to_have_value("step needle")
    search.press("Control+a")
    search.press("Delete")
    expect(search).to_have_value("")


def test_keys_that_stay_the_notebook_s(live: Watched, wait_until: Callable[..., Any]) -> None:
    """Ctrl+S in the panel saves the notebook, with the static view as soon as there is one."""
    live.panel.locator(".sr-tab-logs .sr-lines").focus()

    def is_saved() -> bool:
        live.page.keyboard.press("Control+s")
        live.page.wait_for_timeout(200)
        kept = nbformat.read(live.notebook.path, as_version=4).cells[live.AT]
        return any("data-sparkring-static" in output.get("data", {}).get("text/html", "") for output in kept.outputs)

    wait_until(is_saved, "the notebook's file holds the static view")


CONTRAST = """(panel) => {
  const parse = (text) => { const all = text.match(/[\\d.]+/g).map(Number);
    const unit = text.startsWith('color(') ? 255 : 1;
    return [...all.slice(0, 3).map((each) => each * unit), all[3] ?? 1]; };
  const over = ([r, g, b, a], below) => [r, g, b].map((each, at) => each * a + below[at] * (1 - a));
  const light = (rgb) => { const [r, g, b] = rgb.map((each) => { const c = each / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const parents = (element) => element ? [...parents(element.parentElement), element] : [];
  const found = [];
  const texts = document.createTreeWalker(panel, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.textContent.trim(), element = texts.currentNode.parentElement;
    const aside = 'svg, [disabled], [aria-disabled=true], .sr-sign, .sr-panel [style*="color:"]';
    if (!text || !element.checkVisibility() || element.closest(aside)) continue;
    let ground = [255, 255, 255], share = 1;
    for (const each of parents(element)) {
      const style = getComputedStyle(each);
      ground = over(parse(style.backgroundColor), ground);
      share *= Number(style.opacity);
    }
    if (!share) continue; // shown only when the pointer is near
    const [r, g, b, a] = parse(getComputedStyle(element).color);
    const [one, other] = [light(over([r, g, b, a * share], ground)), light(ground)].sort((a, b) => b - a);
    found.push([(one + 0.05) / (other + 0.05), element.className || element.tagName, text.slice(0, 40)]);
  }
  return found;
}"""


@pytest.mark.parametrize("look", [pytest.param("dark", marks=pytest.mark.extended("appearance", "light")), "light"])
def test_everybody_can_use_it(live: Watched, look: str) -> None:
    live.notebook.theme(look)
    live.to_the_top()
    expect(live.rows("the same everywhere")).to_be_visible()
    unnamed = live.panel.get_by_role("button", name=re.compile("^$"))
    assert unnamed.count() == 0
    assert live.panel.locator("button:not([type='button'])").count() == 0  # none would submit a form
    assert live.panel.get_by_role("tablist").get_by_role("tab", selected=True).count() == 1
    expect(live.panel).to_have_attribute("aria-label", re.compile("."))
    for rank in range(3):  # what a rank uses is in its label; the curve is left out for readers who cannot see it
        expect(live.tile(rank)).to_have_attribute("aria-label", re.compile(r"CPU \d+ % \(\d+ cores?\), [\d.]+ MB of "))
        words = live.tile(rank).locator(".sr-figure").evaluate_all("(all) => all.map((each) => each.dataset.words)")
        assert re.fullmatch(r"CPU \d+ %, [\d.]+ MB", ", ".join(words)), words
        expect(live.tile(rank).locator("svg[aria-hidden='true']")).to_have_count(2)
    for tab in live.panel.get_by_role("tab").all():
        assert live.page.locator(f"[id='{tab.get_attribute('aria-controls')}']").get_attribute("role") == "tabpanel"
    for name in ("Overview", "Metrics", "Code", "Logs"):
        live.tab(name).click()
        found = live.panel.evaluate(CONTRAST)
        assert len(found) > 10
        assert [each for each in found if each[0] < 4.5] == []
        assert axe(live.page, f".jp-Notebook-cell[data-windowed-list-index='{live.AT}'] .sr-panel") == []


def test_a_page_that_is_loaded_again(started: Watched) -> None:
    """The saved view is shown at once, and the panel once the busy kernel has sent the state of its widgets."""
    started.notebook.save()
    started.notebook.reload()
    expect(started.notebook.cell(Watched.AT)).to_contain_text("running")
    expect(started.panel.locator(".sr-state")).to_have_text("running")
    step = started.number(started.tile(0))
    expect(started.tile(0)).not_to_have_text(f"0 ▶ e1 · {step}")  # the step count is still growing
    expect(started.notebook.prompt(Watched.AT)).not_to_have_text(re.compile(r"\d"))
    (started.folder / "end").touch()
    expect(started.panel.locator(".sr-state")).to_have_text("finished")
    started.tab("Logs").click()
    # Each rank's last line is shown once. The first lines are not checked, since those of a long run are only in files.
    for rank in range(3):
        expect(started.rows(f"the last line of {rank}")).to_have_count(1)


# ── The end of the run ────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def over(started: Watched) -> Watched:
    """The same cell after a second, complete run, since the reloaded page missed the end of the first run."""
    (started.folder / "end").touch()
    expect(started.panel.locator(".sr-state")).to_have_text("finished")
    started.notebook.run(started.AT, wait=True)
    started.reset()
    return started


def test_its_end_stays(over: Watched, shoot: Callable[..., None]) -> None:
    expect(over.panel.locator(".sr-state")).to_have_text("finished")
    expect(over.rows("the last line of").first).to_be_visible()
    for rank in range(3):
        expect(over.tile(rank)).to_have_class(re.compile(r"^f\b"))
    expect(over.button("■ Stop")).to_be_hidden()
    shoot(over.notebook, "finished", over.notebook.cell(over.AT))


def test_an_ended_run_after_a_reload(over: Watched) -> None:
    over.notebook.save()
    over.notebook.reload()
    expect(over.panel.locator(".sr-state")).to_have_text("finished")
    expect(over.panel.locator(".sr-tab-overview .sr-row", has_text="the last line of").first).to_be_visible()
    expect(over.notebook.static(over.AT)).to_be_hidden()


def test_the_saved_notebook_without_a_kernel(over: Watched, opened: Opened, shoot: Callable[..., None]) -> None:
    kept = over.notebook.save()
    kept.metadata.clear()  # so that JupyterLab asks which kernel to use
    nbformat.write(kept, over.notebook.path.with_stem("reopened"))
    found = opened("reopened", kernel=False)
    expect(found.panel(over.AT)).to_have_count(0)
    # JupyterLab does not trust this file and has removed all styles, but the view is still readable.
    shown = found.cell(over.AT).locator(".jp-Cell-outputArea")
    expect(shown).to_contain_text("finished")
    expect(shown).to_contain_text("0 ✓ 1 ✓ 2 ✓")
    expect(shown).to_contain_text("the last line of")
    expect(shown).to_contain_text("accuracy")
    assert shown.locator("img").count() > 0
    expect(shown.locator(".sr-state")).to_have_css("background-color", "rgb(29, 127, 75)")
    assert "Error displaying widget" not in found.page.content()
    shoot(found, "reopened", found.cell(over.AT))
    found.page.close()


@pytest.fixture(scope="module", autouse=True)
def no_complaints(opened: Opened) -> Iterator[None]:
    yield
    assert opened.errors == []
