"""How the page shows runs that end: stopped, failed, killed, or so quick that there is nothing to show."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import psutil
import pytest
from lab import Notebook, Opened, axe
from packaging.version import Version
from playwright.sync_api import Locator, Page, expect
from waiting import DEADLINE_S

ENDLESS = """%%horovod -n -2 --name endless
import time
for number in range(100_000):
    print("line", number)
    time.sleep(0.1)
"""
FAILING = """%%horovod -n -3 --name failing
import time
print("rank", rank, "begins")
if rank == 1:
    time.sleep(1)
    raise ValueError("shapes (3, 4) and (5,) do not match")
time.sleep(100)
"""
BACKGROUND = ENDLESS.replace("endless", "behind --background")
MEANWHILE = "6 * 7"
GANG = "%gang start -n -2"
QUICK = """%%horovod
print("quick", rank) if rank else None
"""
SILENT = """%%horovod
x = 1
"""
# Show a run of 1,024 ranks, made from events, without starting any rank.
MANY = """import time
from sparkring.history.events import *
from sparkring.history.record import RunRecord, replay
from sparkring.views import open_view

size, silent, slow = 1024, 77, 500
now, started = time.time(), time.time() - 300
soon = now + 3600  # in the future, so that ranks with a message at this time never count as silent
record = replay([
    RunStarted(started, "2026-11-20_14-03-22_many", "a thousand ranks", "%%horovod -n 1024\\ntrain()", size, "spark",
               "horovod", "all"),
    *(RankStarted(started + 20, rank, f"worker-{rank // 8:03}", 4000 + rank) for rank in range(size)),
], RunRecord(log_folder="/runs/many"))
record = replay((Output("stdout", b"the same everywhere\\n", now, rank) for rank in range(size)), record)
record = replay((Output("stdout", b"rank %d of %d\\n" % (rank, size), now, rank) for rank in range(690, 710)), record)
record = replay((Metrics({"loss": 1 / (1 + rank)}, epoch=2, epochs=5, steps=200,
                         step=30 if rank == slow else 90 + rank % 2,
                         time=now if rank == silent else soon, rank=rank) for rank in range(size)), record)
record = replay((RankUsed(rank % 101, 10**9, 8, 64 * 10**9, now, rank) for rank in range(size)), record)
view = open_view()
view.refresh(record)
"""
MANY_END = """record = replay([
    RankFailed(now + 1, 700, Failure("signal", "killed by SIGKILL", advice="the kernel may have run out of memory")),
    *(RankFailed(now + 2, rank, Failure("echo", "exited with code 1")) for rank in range(16)),
    RunFinished(now + 3, "failed", failed_rank=700),
], record)
view.close(record)
"""
# A rank of two falls behind, and then catches up.
BEHIND = """import time
from sparkring.history.events import *
from sparkring.history.record import RunRecord, replay
from sparkring.views import open_view

now = time.time()
record = replay([
    RunStarted(now, "2026-11-20_14-03-22_two", "two ranks", "%%torchrun -n -2", 2, "local", "torch", "all"),
    *(RankStarted(now, rank, "vm", 4000 + rank) for rank in range(2)),
    *(Metrics({"loss": 1.0}, step=40 - 20 * rank, steps=100, time=now + 3600, rank=rank) for rank in range(2)),
], RunRecord(log_folder="/runs/two"))
two = open_view()
two.refresh(record)
"""
# A run refreshes its view again and again. This cell does so once, so it waits until the view will not pass it over.
CAUGHT_UP = """record = replay([Metrics({"loss": 0.5}, step=40, steps=100, time=now + 3600, rank=1)], record)
from sparkring.views.live import STATE_PAUSE_S
time.sleep(max(0, two._due - time.monotonic(), STATE_PAUSE_S))
two.refresh(record)
"""
CAUGHT_UP_END = """two.close(replay([RunFinished(now + 9, "finished")], record))
"""
# From here on, pages get only what the kernel sends again, and the kernel does not hear them.
MISSED = """from sparkring.views import panel

page = panel._open_page()
page.on_msg(page._heard, remove=True)
page.tell = lambda record, news: page._records.update({record.run_id: record})
"""
NOT_MISSED = """del page.tell
page.on_msg(page._heard)
"""
# The page is busy for three seconds when it loads the panel's script. anywidget waits for only two.
BUSY_PAGE = """() => {
  const make = URL.createObjectURL;
  URL.createObjectURL = (blob) => {
    URL.createObjectURL = make;
    const until = performance.now() + 3000;
    while (performance.now() < until);
    return make(blob);
  };
}"""
# The last item waits until the test has seen the panel during the run.
ITEMS = """%%foreach store in range(1000) -n -2 --name stores
import os
import time
while store == 999 and not os.path.exists("seen"):
    time.sleep(0.05)
sparkring.log(score=abs(store - 500) / 1000)
if store in (7, 700):
    print("store", store)
    for step in range(1, 6):
        sparkring.log(step=step, loss=1 / step, val_loss=2 / step)
    raise ValueError("no rows")
"""
FEW_ITEMS = """%%foreach number in range(3) -n -2
number ** 2
"""
TRIALS = """import optuna
trials = sparkring.search(lr=sparkring.log_uniform(1e-4, 1e-1), width=[16, 32, 64], trials=16, minimize="val_loss",
                          sampler="random", prune=optuna.pruners.ThresholdPruner(upper=1.0))
"""
TRIAL_COLUMNS = ("#", "lr", "width", "state", "time", "val_loss")
# Trials with a high lr are pruned. One trial runs until the file `ended` exists, so that the test can watch the search.
SEARCH = """%%foreach lr, width in trials -n -2 --name search
import os
import time
for epoch in range(1, 5):
    sparkring.log(epoch=epoch, val_loss=50 * lr + width / 1000 + 0.1 / epoch)
    if lr > 0.03:
        time.sleep(60)  # until it is pruned
if lr < 0.01:
    try:
        os.mkdir("held")
    except FileExistsError:
        pass
    else:
        while not os.path.exists("ended"):
            time.sleep(0.05)
"""
AT_ENDLESS, AT_FAILING, AT_BACKGROUND, AT_MEANWHILE, AT_GANG, AT_QUICK, AT_SILENT, AT_MANY, AT_MANY_END = range(1, 10)
AT_SHOWN, AT_BY_NAME, AT_ITEMS, AT_TRIALS, AT_SEARCH = 10, 11, 12, 13, 14
AT_BEHIND, AT_CAUGHT_UP, AT_CAUGHT_UP_END, AT_FEW_ITEMS, AT_MISSED, AT_NOT_MISSED = range(15, 21)


@pytest.fixture(scope="module")
def notebook(opened: Opened) -> Notebook:
    cells = (ENDLESS, FAILING, BACKGROUND, MEANWHILE, GANG, QUICK, SILENT, MANY, MANY_END, "_", "%runs behind", ITEMS)
    more = (TRIALS, SEARCH, BEHIND, CAUGHT_UP, CAUGHT_UP_END, FEW_ITEMS, MISSED, NOT_MISSED)
    found = opened("ends", "%load_ext sparkring", *cells, *more)
    found.run(0, wait=True)
    return found


@pytest.fixture(autouse=True)
def nothing_goes_on(notebook: Notebook) -> Iterator[None]:
    """If a failed test has left a cell running, interrupts the cell, because other tests would wait for it."""
    yield
    if notebook.prompt(AT_ENDLESS).inner_text() == "[*]:":
        notebook.command("notebook:interrupt-kernel")


def state(panel: Locator) -> Locator:
    return panel.locator(".sr-state")


def tile(panel: Locator, rank: int) -> Locator:
    return panel.locator(f".sr-tiles [data-rank='{rank}']")


def running(notebook: Notebook) -> Locator:
    """Run the endless cell, and return its panel."""
    notebook.run(AT_ENDLESS)
    panel = notebook.panel(AT_ENDLESS)
    expect(state(panel)).to_have_text("running")
    expect(panel.locator(".sr-row").first).to_be_visible()
    return panel


def was_interrupted(notebook: Notebook, panel: Locator) -> None:
    notebook.until_done(AT_ENDLESS)
    expect(state(panel)).to_have_text("interrupted")
    expect(notebook.cell(AT_ENDLESS).locator(".jp-OutputArea-output").last).to_contain_text("KeyboardInterrupt")


@pytest.mark.versions("of JupyterLab and ipykernel, which deliver Stop")
def test_the_stop_button(notebook: Notebook, shoot: Callable[..., None]) -> None:
    panel = running(notebook)
    stop = panel.get_by_role("button", name="■ Stop")
    if Version(version("ipykernel")) < Version("7"):
        # While a cell is running, the kernel gets no messages from the page, so the panel shows no button.
        expect(stop).to_be_hidden()
        notebook.command("notebook:interrupt-kernel")
        was_interrupted(notebook, panel)
        return
    expect(stop).to_be_visible()
    before = notebook.structure()
    stop.click()
    for key in "dd":
        notebook.page.keyboard.press(key)
        assert notebook.structure() == before
    was_interrupted(notebook, panel)
    expect(stop).to_be_hidden()
    shoot(notebook, "stopped", notebook.cell(AT_ENDLESS))


def test_jupyters_own_interrupt(notebook: Notebook) -> None:
    panel = running(notebook)
    notebook.page.get_by_role("button", name=re.compile("^Interrupt the kernel")).click()
    was_interrupted(notebook, panel)


@pytest.mark.versions("of JupyterLab, whose connection to the kernel interrupts the cell")
@pytest.mark.extended("repetition", "test_the_stop_button, and test_a_page_that_is_loaded_again")
def test_stop_in_a_page_that_is_loaded_while_the_cell_runs(notebook: Notebook) -> None:
    panel = running(notebook)
    notebook.save()
    notebook.reload()
    stop = panel.get_by_role("button", name="■ Stop")
    expect(stop).to_be_visible()
    stop.click()
    expect(state(panel)).to_have_text("interrupted")
    expect(stop).to_be_hidden()
    expect(notebook.page.locator("#jp-main-statusbar")).to_contain_text("| Idle")


def test_a_page_that_was_not_ready_for_the_first_messages(notebook: Notebook) -> None:
    """A slow page loads the panel's script late, and its questions may reach the kernel only after the cell."""
    notebook.run(AT_MISSED, wait=True)
    running(notebook)
    notebook.command("notebook:interrupt-kernel")
    notebook.until_done(AT_ENDLESS)
    notebook.run(AT_NOT_MISSED, wait=True)


def test_a_rank_that_fails(notebook: Notebook, shoot: Callable[..., None]) -> None:
    notebook.run(AT_FAILING, wait=True)
    panel = notebook.panel(AT_FAILING)
    expect(state(panel)).to_have_text("failed")
    why = panel.get_by_role("alert")
    expect(why).to_contain_text("rank 1")
    expect(why).to_contain_text("ValueError: shapes (3, 4) and (5,) do not match")
    expect(why).to_contain_text("cell line 6")
    expect(tile(panel, 1)).to_have_text("1 ✗")
    expect(tile(panel, 1)).to_have_css("background-color", "rgb(198, 58, 53)")
    for rank in (0, 2):
        expect(tile(panel, rank)).not_to_have_class(re.compile(r"^x\b"))
    shoot(notebook, "failed", notebook.cell(AT_FAILING))
    # The error can be found among the lines, and the cell can be run again, even if other cells are selected as well.
    panel.get_by_role("tab", name="Logs").click()
    panel.get_by_role("button", name="first error").click()
    expect(panel.locator(".sr-tab-logs .sr-marked")).to_contain_text("Traceback")
    before = [notebook.prompt(at).inner_text() for at in range(AT_FAILING)]
    number = int(re.sub(r"\D", "", notebook.prompt(AT_FAILING).inner_text()))
    notebook.prompt(AT_FAILING).click()
    notebook.page.keyboard.press("Shift+ArrowUp")
    panel.get_by_role("button", name="Run again").click()
    expect(notebook.prompt(AT_FAILING)).to_have_text(f"[{number + 1}]:")
    expect(state(panel)).to_have_text("failed")
    assert [notebook.prompt(at).inner_text() for at in range(AT_FAILING)] == before


def test_each_run_has_a_panel_of_its_own(notebook: Notebook) -> None:
    notebook.run(AT_FAILING, wait=True)
    failed = notebook.panel(AT_FAILING)
    expect(state(failed)).to_have_text("failed")
    panel = running(notebook)
    expect(state(failed)).to_have_text("failed")
    assert axe(notebook.page, ".sr-panel", "landmark-unique") == []
    expect(failed.locator(".sr-row", has_text="line 0")).to_have_count(0)
    panel.get_by_role("button", name="■ Stop").click()
    was_interrupted(notebook, panel)
    expect(state(failed)).to_have_text("failed")


def test_a_run_in_the_background(notebook: Notebook) -> None:
    """After the cell has ended and another has run, the run's panel is still updated, and its Stop button works."""
    notebook.run(AT_BACKGROUND, wait=True)
    panel = notebook.panel(AT_BACKGROUND)
    expect(state(panel)).to_have_text("running")
    expect(panel.locator(".sr-row").first).to_be_visible()
    notebook.run(AT_MEANWHILE, wait=True)
    expect(notebook.cell(AT_MEANWHILE).locator(".jp-OutputArea-output")).to_have_text("42")
    expect(state(panel)).to_have_text("running")
    panel.get_by_role("button", name="■ Stop").click()
    expect(state(panel)).to_have_text("interrupted")


def test_quick_cells_on_a_warm_gang_leave_no_panel(notebook: Notebook) -> None:
    notebook.run(AT_GANG, wait=True)
    for at in (AT_QUICK, AT_QUICK, AT_SILENT):  # the first cell on a new gang may be slow
        notebook.run(at, wait=True)
    notebook.page.wait_for_timeout(300)
    expect(notebook.panel(AT_QUICK)).to_have_count(0)
    expect(notebook.static(AT_QUICK)).to_contain_text("quick 1")
    expect(notebook.panel(AT_SILENT)).to_have_count(0)
    expect(notebook.static(AT_SILENT)).to_have_count(0)


def test_the_tabs_stay_where_they_are_when_a_rank_catches_up(notebook: Notebook) -> None:
    notebook.run(AT_BEHIND, wait=True)
    panel = notebook.panel(AT_BEHIND)
    note, tabs = panel.locator(".sr-rankview .sr-note"), panel.get_by_role("tablist")
    expect(note).to_contain_text("rank 1 is 20 steps behind")
    before = tabs.evaluate("(tabs) => tabs.offsetTop")
    notebook.run(AT_CAUGHT_UP, wait=True)
    expect(note).not_to_contain_text("behind")
    assert tabs.evaluate("(tabs) => tabs.offsetTop") == before
    notebook.run(AT_CAUGHT_UP_END, wait=True)
    expect(note).to_be_hidden()


def test_a_table_of_few_items_is_no_higher_than_its_rows(notebook: Notebook) -> None:
    notebook.run(AT_FEW_ITEMS, wait=True)
    panel = notebook.panel(AT_FEW_ITEMS)
    expect(state(panel)).to_have_text("finished")
    expect(panel.locator(".sr-itemrows .sr-itemrow")).to_have_count(3)
    assert panel.locator(".sr-body").bounding_box()["height"] < 150
    panel.locator(".sr-itemrows .sr-itemrow").first.click()
    assert panel.locator(".sr-body").bounding_box()["height"] == 420


def test_a_thousand_ranks(notebook: Notebook, shoot: Callable[..., None]) -> None:
    notebook.run(AT_MANY, wait=True)
    panel = notebook.panel(AT_MANY)
    expect(panel.locator(".sr-tiles button")).to_have_count(1024)
    expect(tile(panel, 500)).to_have_class(re.compile("sr-slow"))
    expect(tile(panel, 77)).to_have_class(re.compile("sr-silent"))
    expect(panel.locator(".sr-note")).to_contain_text("1 behind · 1 silent · 1,022 running")
    expect(panel.locator(".sr-note")).to_contain_text("steps behind · rank 77 is silent")
    expect(tile(panel, 99)).to_have_attribute("aria-label", re.compile(r"CPU 99 % \(8 cores\), 1\.00 GB of 64\.0 GB"))
    colours = panel.get_by_label("Value shown by the colours")
    colours.select_option("CPU")
    expect(colours.locator("option:checked")).to_have_text("CPU: 0 % to 100 %")
    expect(tile(panel, 99)).to_have_attribute("style", re.compile("--sr-heat: 99%"))
    expect(colours.locator("option[value='waits for data']")).to_be_disabled()
    colours.select_option("state")
    assert panel.locator(".sr-tiles").bounding_box()["height"] < 140
    shoot(notebook, "thousand", notebook.cell(AT_MANY))
    panel.get_by_role("tab", name="Logs").click()
    rows = panel.locator(".sr-tab-logs .sr-row")
    panel.locator(".sr-tab-logs .sr-lines").evaluate("(box) => { box.scrollTop = 0; }")
    everywhere = rows.filter(has_text="the same everywhere")
    expect(everywhere.locator(".sr-tag")).to_have_text(re.compile(r"^\d+–1023$"))  # the first ranks' lines are gone
    tile(panel, 700).click()
    expect(rows.locator(".sr-tag", has_text="7")).to_have_text(["700", "700"])
    expect(rows.filter(has_text="rank 700 of 1024")).to_be_visible()
    tile(panel, 700).click()
    notebook.run(AT_MANY_END, wait=True)
    expect(state(panel)).to_have_text("failed")
    expect(tile(panel, 700)).to_have_class("x")
    tile(panel, 700).scroll_into_view_if_needed()
    shoot(notebook, "thousand-failed", panel)
    assert rows.count() > 10  # the box is full again after the theme has changed


def test_items(notebook: Notebook, shoot: Callable[..., None]) -> None:
    """The table of items can be sorted and searched.

    With the pointer or the keyboard, a user can open an item's error, curves and lines.
    """
    notebook.run(AT_ITEMS)
    panel = notebook.panel(AT_ITEMS)
    expect(panel.locator("div.sr-words")).to_contain_text(
        re.compile(r"\d+ of 1,000 items .* · [\d.,]+ items/(s|min) · ")
    )
    (notebook.lab.folder / "seen").touch()
    expect(state(panel)).to_have_text("failed")
    expect(panel).to_contain_text("failed: 998 of 1,000 items finished · 2 failed")
    panel.get_by_role("tab", name="Items").click()
    table = panel.get_by_role("grid", name="Items")
    shown = table.locator(".sr-itemrows [role=row]")
    for way, first in (("ascending", "store=500"), ("descending", "store=0")):
        table.get_by_role("button", name="score").click()
        expect(table.get_by_role("columnheader", name="score")).to_have_attribute("aria-sort", way)
        expect(shown.first).to_contain_text(first)
    panel.get_by_role("button", name="failed only").click()
    expect(shown).to_have_count(2)
    panel.get_by_role("button", name="failed only").click()
    panel.get_by_role("tab", name="Metrics").click()
    expect(panel.locator(".sr-tab-metrics").get_by_role("figure", name="loss of the items", exact=True)).to_be_visible()
    panel.get_by_role("tab", name="Items").click()
    search = panel.get_by_label("Search the items")
    search.fill("no rows")
    expect(shown).to_have_count(2)
    expect(panel.locator(".sr-tab-items .sr-count")).to_have_text("2 of 1,000")
    shoot(notebook, "items", panel)
    table.focus()
    for key in ("ArrowDown", "ArrowDown"):
        table.press(key)
    chosen = table.locator("[aria-selected=true]")
    expect(chosen).to_have_count(1)
    expect(shown.last).to_have_attribute("aria-selected", "true")  # the table is drawn again some time after a key
    item = chosen.get_attribute("data-item")
    whole = panel.get_by_role("region", name="The chosen item")
    expect(whole).to_contain_text("ValueError: no rows (cell line 11: `raise ValueError")
    expect(whole.get_by_role("figure")).to_have_attribute(
        "aria-label", "loss by step: from 1 to 0.2; val_loss by step: from 2 to 0.4"
    )
    expect(whole.get_by_role("log").locator(".sr-row").first).to_contain_text(f"store {item}")
    whole.get_by_role("log").focus()
    notebook.page.keyboard.press("Escape")
    expect(whole).to_be_hidden()
    expect(table).to_be_focused()
    shown.first.click()
    expect(whole.get_by_role("log").locator(".sr-row").first).to_contain_text(re.compile("store 7$"))
    shoot(notebook, "item", panel, lambda: accessible(notebook, AT_ITEMS))
    shown.last.click()
    before = notebook.structure()
    table.press("Enter")
    assert notebook.structure() == before
    lines = panel.locator(".sr-tab-logs .sr-row")
    expect(lines.first).to_contain_text(f"store {item}")
    assert set(panel.locator(".sr-tab-logs .sr-row .sr-tag").all_inner_texts()) == {item}


def accessible(notebook: Notebook, at: int) -> None:
    assert axe(notebook.page, f".jp-Notebook-cell[data-windowed-list-index='{at}'] .sr-panel") == []


GREY, BLUE, GREEN, AMBER = (118, 118, 118), (47, 128, 208), (35, 147, 90), (185, 122, 16)
COLOURS = """(canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const found = new Set();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) found.add(data.slice(at, at + 3).join());
  return [...found];
}"""


def colours(figure: Locator) -> set[tuple[int, ...]]:
    """Return the colours of trials that a figure shows. Trials that are not chosen are almost transparent."""
    found = {tuple(map(int, each.split(","))) for each in figure.locator("canvas").evaluate(COLOURS)}
    return found & {GREY, BLUE, GREEN, AMBER}


def test_a_search(notebook: Notebook, wait_until: Callable[..., Any], shoot: Callable[..., None]) -> None:
    """Trials are drawn while the search runs, and can be chosen with the pointer or the keyboard."""
    notebook.show(AT_TRIALS)
    notebook.run(AT_TRIALS, wait=True)
    notebook.run(AT_SEARCH)
    panel, page = notebook.panel(AT_SEARCH), notebook.page
    tab, count = panel.get_by_role("tabpanel", name="Search"), panel.locator(".sr-search .sr-count")
    try:
        expect(panel.locator("div.sr-words")).to_contain_text(
            re.compile(r"15 of 16 trials · \d pruned · best val_loss ")
        )
        expect(state(panel)).to_have_text("running")
        expect(tab).to_be_visible()
        curves, history, axes = (tab.get_by_role("figure", name=name) for name in ("Curves", "Best", "Parameters"))
        wait_until(lambda: colours(history) == {BLUE, AMBER}, "the finished trials are drawn, and the best values")
        # With the keyboard: the Tab key follows the order of the page, and each axis has two sliders.
        log, (low, high) = tab.get_by_role("button", name="log scale"), ends(tab, "lr")
        log.focus()
        copy = tab.get_by_role("button", name="copy")
        expect(tab.locator(".sr-best")).to_contain_text(re.compile(r"dict\(lr=0\.\d+, width=\d\d\)"))
        slices = tab.get_by_role("figure", name=" by ")
        expect(slices).to_have_count(2)
        for focused in (copy, curves, history, axes, low, high, *ends(tab, "width"), *ends(tab, "val_loss")):
            page.keyboard.press("Tab")
            expect(focused).to_be_focused()
            expect(focused).to_have_css("outline-style", "solid")
        lowest, highest = ends(tab, "val_loss")
        expect(highest).to_have_attribute("aria-valuenow", "100")
        for _ in range(4):
            highest.press("PageDown")
        expect(highest).to_have_attribute("aria-valuenow", "20")
        expect(lowest).to_have_attribute("aria-valuemax", "20")
        expect(count).to_have_text(re.compile(r"^\d+ of 16 trials$"))
        highest.press("Escape")
        expect(count).to_have_text("")
        _, widest = ends(tab, "width")
        widest.press("ArrowDown")
        expect(widest).to_have_attribute("aria-valuetext", "32")
        expect(count).to_have_text(re.compile(r"^\d+ of 16 trials$"))
        tab.get_by_role("button", name="reset").click()
        expect(log).to_be_focused()
        expect(count).to_have_text("")
        # With the pointer: drag along an axis, drag one end, and click to choose all trials.
        axes.scroll_into_view_if_needed()
        top, bottom = high.bounding_box(), low.bounding_box()
        assert top is not None
        assert bottom is not None
        x, above, below = top["x"] + top["width"] / 2, top["y"] + 10, bottom["y"] - 4
        drag(page, (x, below), (x, (above + below) / 2))
        expect(high).to_have_attribute("aria-valuenow", re.compile("^(4|5)[0-9]$"))
        assert float(high.get_attribute("aria-valuetext") or 0) == pytest.approx(10**-2.5, rel=0.5), (
            "a logarithmic axis"
        )
        chosen = count.inner_text()
        drag(page, (x, (above + below) / 2 - 3), (x, above + (below - above) / 4))
        expect(high).to_have_attribute("aria-valuenow", re.compile("^7[0-9]$"))
        expect(count).not_to_have_text(chosen)
        page.mouse.click(x, (above + below) / 2)
        expect(count).to_have_text("")
    finally:
        (notebook.lab.folder / "ended").touch()
    expect(state(panel)).to_have_text("finished")
    expect(panel.locator(".sr-shares")).to_be_hidden()  # 16 trials say too little about it
    expect(panel.locator("div.sr-words")).to_contain_text(re.compile(r"16 trials: \d+ finished · \d pruned · best"))
    wait_until(lambda: colours(history) == {BLUE, AMBER}, "no trial runs")
    shoot(notebook, "trials", panel, lambda: accessible(notebook, AT_SEARCH))
    # With keys, a user can move from trial to trial, and open the trial's item.
    history.press("End")
    reading = tab.locator(".sr-reading")
    expect(reading).to_contain_text(re.compile("^trial15 (finished|pruned)val_loss"))
    history.press("ArrowLeft")
    expect(reading).to_contain_text("trial14")
    history.press("Enter")
    expect(panel.get_by_role("row", selected=True)).to_have_attribute("data-item", "14")
    expect(panel.get_by_role("region", name="The chosen trial")).to_contain_text("14 lr=")
    # A trial has a column for each parameter, and conditions choose trials.
    expect(panel.get_by_role("columnheader")).to_have_text([re.compile(name) for name in TRIAL_COLUMNS])
    panel.get_by_label("Search the trials").fill("width=32")
    widths = panel.locator(".sr-itemrows [role=row] > :nth-child(3)")
    expect(widths.first).to_have_text("32")
    assert {*widths.all_inner_texts()} == {"32"}
    notebook.show(0)


def ends(tab: Locator, name: str) -> list[Locator]:
    return [tab.get_by_role("slider", name=f"{which} {name}", exact=True) for which in ("lowest", "highest")]


def drag(page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(*end, steps=3)
    page.mouse.up()


def ended_with_its_kernel(panel: Locator) -> None:
    expect(state(panel)).to_have_text("ended with the kernel")
    expect(panel.locator(".sr-head small").first).to_contain_text(re.compile(r"as of \d\d:\d\d:\d\d"))
    expect(panel.locator("div.sr-words")).not_to_contain_text("left")
    expect(panel.get_by_role("button", name="■ Stop")).to_be_hidden()
    for rank in (0, 1):
        expect(tile(panel, rank)).to_have_class(re.compile(r"^s\b"))
    expect(panel.locator(".sr-row").first).to_be_visible()  # the lines that were sent to the page can still be read


def restart(notebook: Notebook) -> None:
    """Restart the kernel, without waiting until it is ready."""
    # command() would wait for the answer to the dialog.
    notebook.page.evaluate("() => { window.jupyterapp.commands.execute('kernelmenu:restart') }")
    notebook.page.get_by_role("dialog").get_by_role("button", name="Confirm Kernel Restart").click()


def test_outputs_that_were_cleared_and_a_kernel_that_restarts(notebook: Notebook, shoot: Callable[..., None]) -> None:
    """A background run can be shown again by its name or by its object. The run ends with its kernel."""
    notebook.run(AT_BACKGROUND, wait=True)
    expect(state(notebook.panel(AT_BACKGROUND))).to_have_text("running")
    notebook.cell(AT_BACKGROUND).locator(".jp-InputArea .cm-content").click()
    notebook.command("notebook:clear-cell-output")
    expect(notebook.panel(AT_BACKGROUND)).to_have_count(0)
    for at in (AT_SHOWN, AT_BY_NAME):
        notebook.run(at, wait=True)
        panel = notebook.panel(at)
        expect(state(panel)).to_have_text("running")
        expect(panel.locator(".sr-row").first).to_be_visible()
        expect(tile(panel, 0)).to_have_class(re.compile(r"^r\b"))
    restart(notebook)
    ended_with_its_kernel(panel)
    ended_with_its_kernel(notebook.panel(AT_SHOWN))
    shoot(notebook, "restarted", notebook.cell(AT_BY_NAME))
    expect(notebook.page.locator("#jp-main-statusbar")).to_contain_text("| Idle")
    notebook.run(0, wait=True)


@pytest.mark.extended("repetition", "test_a_page_that_was_not_ready_for_the_first_messages misses messages, too")
def test_a_run_after_a_restart_in_a_busy_page_with_other_panels(notebook: Notebook) -> None:
    """anywidget drops the messages to a widget whose script was loaded late. The panel gets them all the same."""
    before = running(notebook)
    restart(notebook)
    ended_with_its_kernel(before)
    expect(notebook.page.locator("#jp-main-statusbar")).to_contain_text("| Idle")
    notebook.run(0, wait=True)
    notebook.page.evaluate(BUSY_PAGE)
    panel = running(notebook)
    expect(panel.locator(".sr-row").last).to_contain_text(re.compile(r"line [2-9]\d"))
    panel.get_by_role("button", name="■ Stop").click()
    was_interrupted(notebook, panel)
    notebook.run(AT_FAILING, wait=True)
    expect(state(notebook.panel(AT_FAILING))).to_have_text("failed")


@pytest.mark.extended(
    "repetition", "a kernel that restarts; test_a_saved_notebook_shows_the_state_as_of_when_it_was_saved"
)
def test_a_kernel_that_is_killed_in_the_middle(opened: Opened, shoot: Callable[..., None]) -> None:
    notebook = opened("killed", "%load_ext sparkring", ENDLESS, FAILING)
    notebook.run(0, wait=True)
    notebook.run(AT_FAILING, wait=True)
    panel = running(notebook)
    static = notebook.static(AT_ENDLESS)
    expect(static).to_have_count(1)  # the static view appears after some seconds
    notebook.save()
    kernel = notebook.lab.kernel(notebook.name)
    ranks = kernel.children(recursive=True)
    kernel.kill()
    assert not psutil.wait_procs(ranks, timeout=DEADLINE_S)[1]
    notebook.page.get_by_role("dialog").get_by_role("button", name="Ok").click()
    ended_with_its_kernel(panel)
    again = opened(notebook.name)
    static = again.static(AT_ENDLESS)
    expect(static).to_be_visible()
    expect(static).to_contain_text("endless")
    expect(static).to_contain_text(re.compile(r"as of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"))
    expect(static).to_contain_text(re.compile(r"line \d+"))
    expect(static.locator(".sr-ranks span")).to_have_count(2)
    # Runs that had ended before the kernel was killed are still shown.
    expect(again.static(AT_FAILING)).to_contain_text("ValueError: shapes (3, 4) and (5,) do not match")
    assert "Error displaying widget" not in again.page.content()
    shoot(again, "after-a-kill", again.cell(AT_ENDLESS))


@pytest.fixture(scope="module", autouse=True)
def no_complaints(opened: Opened) -> Iterator[None]:
    yield
    assert opened.errors == []
