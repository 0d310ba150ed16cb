"""How the page shows the ends of runs: stopped, failed, killed, or so quick that there is nothing to show."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib.metadata import version

import psutil
import pytest
from lab import Notebook, Opened
from packaging.version import Version
from playwright.sync_api import Locator, expect

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
# A run of 1,024 ranks, as its events would have it.
MANY = """import time
from sparkring.history.events import *
from sparkring.history.record import RunRecord, replay
from sparkring.views import open_view

size, silent, slow = 1024, 77, 500
now, started = time.time(), time.time() - 300
soon = now + 3600  # heard of as long as somebody looks
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
ITEMS = """%%foreach store in range(1000) -n -2 --name stores
print("store", store)
sparkring.log(score=abs(store - 500) / 1000)
if store in (7, 700):
    raise ValueError("no rows")
"""
AT_ENDLESS, AT_FAILING, AT_BACKGROUND, AT_MEANWHILE, AT_GANG, AT_QUICK, AT_SILENT, AT_MANY, AT_MANY_END = range(1, 10)
AT_SHOWN, AT_BY_NAME, AT_ITEMS = 10, 11, 12


@pytest.fixture(scope="module")
def notebook(opened: Opened) -> Notebook:
    cells = (ENDLESS, FAILING, BACKGROUND, MEANWHILE, GANG, QUICK, SILENT, MANY, MANY_END, "_", "%runs behind", ITEMS)
    found = opened("ends", "%load_ext sparkring", *cells)
    found.run(0, wait=True)
    return found


@pytest.fixture(autouse=True)
def nothing_goes_on(notebook: Notebook) -> Iterator[None]:
    """Interrupts the cell that a failed test has left running, for which other tests would wait."""
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


@pytest.mark.versions("of JupyterLab and ipykernel, by which Stop comes")
def test_the_stop_button(notebook: Notebook, shoot: Callable[..., None]) -> None:
    panel = running(notebook)
    stop = panel.get_by_role("button", name="■ Stop")
    if Version(version("ipykernel")) < Version("7"):
        # The kernel hears nothing of the page while a cell runs, so the panel shows no button.
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
        expect(tile(panel, rank)).not_to_have_class("x")
    shoot(notebook, "failed", notebook.cell(AT_FAILING))


def test_each_run_has_a_panel_of_its_own(notebook: Notebook) -> None:
    notebook.run(AT_FAILING, wait=True)
    failed = notebook.panel(AT_FAILING)
    expect(state(failed)).to_have_text("failed")
    panel = running(notebook)
    expect(state(failed)).to_have_text("failed")
    expect(failed.locator(".sr-row", has_text="line 0")).to_have_count(0)
    panel.get_by_role("button", name="■ Stop").click()
    was_interrupted(notebook, panel)
    expect(state(failed)).to_have_text("failed")


def test_a_run_in_the_background(notebook: Notebook) -> None:
    """The cell has ended and another has run, but the run's panel is still updated; its Stop button works."""
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


def test_a_thousand_ranks(notebook: Notebook, shoot: Callable[..., None]) -> None:
    notebook.run(AT_MANY, wait=True)
    panel = notebook.panel(AT_MANY)
    expect(panel.locator(".sr-tiles button")).to_have_count(1024)
    expect(panel.locator(".sr-note")).to_contain_text("1,024 running")
    expect(tile(panel, 500)).to_have_class(re.compile("sr-slow"))
    expect(tile(panel, 77)).to_have_class(re.compile("sr-silent"))
    assert panel.locator(".sr-tiles").bounding_box()["height"] < 140
    shoot(notebook, "thousand", notebook.cell(AT_MANY))
    panel.locator(".sr-lines").evaluate("(box) => { box.scrollTop = 0; }")
    everywhere = panel.locator(".sr-row").filter(has_text="the same everywhere")
    expect(everywhere.locator(".sr-tag")).to_have_text(re.compile(r"^\d+–1023$"))  # the first ranks' lines are gone
    tile(panel, 700).click()
    expect(panel.locator(".sr-row .sr-tag", has_text="7")).to_have_text(["700", "700"])
    expect(panel.locator(".sr-row").filter(has_text="rank 700 of 1024")).to_be_visible()
    tile(panel, 700).click()
    notebook.run(AT_MANY_END, wait=True)
    expect(state(panel)).to_have_text("failed")
    expect(tile(panel, 700)).to_have_class("x")
    tile(panel, 700).scroll_into_view_if_needed()
    shoot(notebook, "thousand-failed", panel)
    expect(panel.locator(".sr-row")).to_have_count(22)  # the box is full again after the theme has changed


def test_items(notebook: Notebook, shoot: Callable[..., None]) -> None:
    """Their table can be sorted and searched, also by keys, and leads from an item to its lines."""
    notebook.run(AT_ITEMS)
    panel = notebook.panel(AT_ITEMS)
    expect(panel.locator("div.sr-words")).to_contain_text(re.compile(r"\d+ of 1,000 items"))
    expect(state(panel)).to_have_text("failed")
    expect(panel).to_contain_text("failed: 998 of 1,000 items finished · 2 failed")
    panel.get_by_role("tab", name="Items").click()
    table = panel.get_by_role("table", name="Items")
    shown = table.locator(".sr-itemrows [role=row]")
    for way, first in (("ascending", "store=500"), ("descending", "store=0")):
        table.get_by_role("button", name="score").click()
        expect(table.get_by_role("columnheader", name="score")).to_have_attribute("aria-sort", way)
        expect(shown.first).to_contain_text(first)
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
    item = chosen.get_attribute("data-item")
    expect(panel.locator(".sr-itemwhole")).to_contain_text("ValueError: no rows")
    before = notebook.structure()
    table.press("Enter")
    assert notebook.structure() == before
    lines = panel.locator(".sr-row")
    expect(lines.first).to_contain_text(f"store {item}")
    assert set(panel.locator(".sr-row .sr-tag").all_inner_texts()) == {item}


def ended_with_its_kernel(panel: Locator) -> None:
    expect(state(panel)).to_have_text("ended with the kernel")
    expect(panel.locator(".sr-head small").first).to_contain_text(re.compile(r"as of \d\d:\d\d:\d\d"))
    expect(panel.locator("div.sr-words")).not_to_contain_text("left")
    expect(panel.get_by_role("button", name="■ Stop")).to_be_hidden()
    for rank in (0, 1):
        expect(tile(panel, rank)).to_have_class("s")
    expect(panel.locator(".sr-row").first).to_be_visible()  # the lines that the page has can still be read


def test_outputs_that_were_cleared_and_a_kernel_that_restarts(notebook: Notebook, shoot: Callable[..., None]) -> None:
    """A background run is shown again by its name and by its object. It ends with its kernel."""
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
        expect(tile(panel, 0)).to_have_class("r")
    # command() would wait for the answer to the dialog.
    notebook.page.evaluate("() => { window.jupyterapp.commands.execute('kernelmenu:restart') }")
    notebook.page.get_by_role("dialog").get_by_role("button", name="Confirm Kernel Restart").click()
    ended_with_its_kernel(panel)
    ended_with_its_kernel(notebook.panel(AT_SHOWN))
    shoot(notebook, "restarted", notebook.cell(AT_BY_NAME))
    expect(notebook.page.locator("#jp-main-statusbar")).to_contain_text("| Idle")
    notebook.run(0, wait=True)


def test_a_kernel_that_is_killed_in_the_middle(notebook: Notebook, opened: Opened, shoot: Callable[..., None]) -> None:
    panel = running(notebook)
    static = notebook.static(AT_ENDLESS)
    expect(static).to_have_count(1)  # it appears after some seconds
    notebook.save()
    kernel = notebook.lab.kernel(notebook.name)
    ranks = kernel.children(recursive=True)
    kernel.kill()
    assert not psutil.wait_procs(ranks, timeout=30)[1]
    notebook.page.get_by_role("dialog").get_by_role("button", name="Ok").click()
    ended_with_its_kernel(panel)
    again = opened(notebook.name)
    static = again.static(AT_ENDLESS)
    expect(static).to_be_visible()
    expect(static).to_contain_text("endless")
    expect(static).to_contain_text(re.compile(r"as of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"))
    expect(static).to_contain_text(re.compile(r"line \d+"))
    expect(static.locator(".sr-ranks span")).to_have_count(2)
    # Runs that had ended are shown as before.
    expect(again.static(AT_FAILING)).to_contain_text("ValueError: shapes (3, 4) and (5,) do not match")
    assert "Error displaying widget" not in again.page.content()
    shoot(again, "after-a-kill", again.cell(AT_ENDLESS))


@pytest.fixture(scope="module", autouse=True)
def no_complaints(opened: Opened) -> Iterator[None]:
    yield
    assert opened.errors == []
