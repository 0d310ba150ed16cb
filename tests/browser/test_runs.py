"""What `%runs` shows in JupyterLab: a list that is sorted and filtered, rows that open, and runs over one another."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator

import nbformat
from lab import Lab, Opened, axe
from playwright.sync_api import expect

from sparkring.history.events import CapturedName, Event, Metrics, RankFinished, RankStarted, RunFinished, RunStarted
from sparkring.history.record import RunRecord
from sparkring.history.run_folder import RunFolder

BEGAN = 1_700_000_000.0


def story(number: int, name: str, lr: float, *, by: str, kernel_was_killed: bool = False) -> Iterator[Event]:
    """Yield the events of a run with a curve, by step or epoch. Its cell has read the learning rate."""
    run_id, began = f"2023-11-14_22-1{number}-20_aaaaa{number}", BEGAN + 60 * number
    lrs = (CapturedName("lr", "float", 9, "by value", numbers=(("", lr),)),)
    code = f"%%torchrun -n -2\ntrain(epochs={number})"
    yield RunStarted(began, run_id, name, code, 2, "local", "torch", "all", captured=lrs)
    for rank in range(2):
        yield RankStarted(began + 1, rank, "node", 10 + rank)
    for at in range(1, 21):
        for rank in range(2):
            yield Metrics({"loss": lr / at + rank / 100}, **{by: at}, time=began + 2 + at, rank=rank)  # type: ignore[arg-type]
    if not kernel_was_killed:
        yield from (RankFinished(began + 30, rank, "") for rank in range(2))
        yield RunFinished(began + 31, "finished", measured=(("loss", lr / 20 + 0.005),))


def save(lab: Lab, *stories: Iterator[Event]) -> None:
    for events in map(list, stories):
        started = events[0]
        assert isinstance(started, RunStarted)
        folder = RunFolder(started.run_id)
        folder.seen(events, RunRecord())
        folder.ended(RunRecord())
        folder.path.rename(lab.folder.parent / "home" / "runs" / folder.path.name)


def test_runs(opened: Opened, lab: Lab, shoot: Callable[..., None]) -> None:
    """Rows open in the live panel, and selected runs are drawn over one another. A saved notebook keeps the list."""
    (lab.folder.parent / "home" / "runs").mkdir(exist_ok=True)
    stories = [
        story(1, "listed", 0.1, by="step"),
        story(2, "listed", 0.9, by="step"),
        story(3, "listed", 0.4, by="epoch"),
        story(4, "listed", 0.2, by="step", kernel_was_killed=True),
    ]
    save(lab, *stories)
    cells = ("%load_ext sparkring", "%runs --where \"name = 'listed'\"", "%runs aaaaa3", "%runs aaaaa1 aaaaa3")
    notebook = opened("runs", *cells)
    for at in range(4):
        notebook.run(at, wait=True)
    notebook.show(1)
    listing = notebook.cell(1).locator(".sr-runs")
    rows = listing.locator("tbody > tr:has(input)")
    ids = rows.locator("button")
    expect(ids).to_have_text(["aaaaa4", "aaaaa3", "aaaaa2", "aaaaa1"])
    expect(rows.nth(1)).to_contain_text(re.compile(r"listed.*31 s.*2 local.*0\.4000.*0\.0250.*finished"))
    expect(notebook.static(1)).to_be_hidden()

    loss = listing.get_by_role("button", name=re.compile("^loss"))
    loss.click()
    expect(ids).to_have_text(["aaaaa1", "aaaaa3", "aaaaa2", "aaaaa4"])
    loss.click()
    expect(ids).to_have_text(["aaaaa2", "aaaaa3", "aaaaa1", "aaaaa4"])
    expect(listing.get_by_role("columnheader", name="loss")).to_have_attribute("aria-sort", "descending")
    search = listing.get_by_role("searchbox")
    search.fill("lr < 0.5")
    expect(ids).to_have_text(["aaaaa3", "aaaaa1", "aaaaa4"])
    search.fill("")
    expect(ids).to_have_text(["aaaaa2", "aaaaa3", "aaaaa1", "aaaaa4"])

    ids.nth(0).click()
    panel = listing.locator(".sr-panel")
    expect(panel.locator(".sr-state")).to_have_text("finished")
    panel.get_by_role("tab", name="Metrics").click()
    expect(panel.get_by_role("figure", name="loss by step").locator("canvas")).to_be_visible()
    ids.nth(0).click()
    expect(panel).to_have_count(0)
    ids.nth(3).click()
    expect(panel.locator(".sr-state")).to_have_text("unfinished")
    ids.nth(3).click()

    button = listing.get_by_role("button", name="compare")
    expect(button).to_be_disabled()
    for box in rows.locator("input").all():
        box.check()
    rows.locator("input").nth(3).uncheck()
    button.click()
    compared = listing.get_by_role("region", name="Comparison")
    expect(compared.locator("canvas")).to_be_visible()
    expect(compared.locator("figcaption b")).to_have_text(["A loss", "B loss", "C loss"])
    expect(compared.locator("tr").filter(has_text=re.compile("^lr"))).to_have_text("lr0.10.90.4")
    expect(compared.locator("pre").last).to_contain_text("+train(epochs=3)")
    compared.get_by_role("figure").press("End")
    expect(compared.locator(".sr-reading")).to_contain_text("A loss")
    rows.locator("input").nth(1).uncheck()  # this run counts epochs
    button.click()
    axis = compared.get_by_role("combobox", name="Horizontal axis of the comparison")
    expect(axis.locator("option")).to_have_text(["step", "time"])
    axis.select_option("time")
    expect(compared.get_by_role("figure")).to_have_attribute("aria-label", re.compile("A loss by time"))
    canvas = compared.locator("canvas").element_handle()
    drawn = canvas.evaluate("canvas => canvas.toDataURL()")
    notebook.theme("dark")  # the texts in the chart must have the theme's colour
    notebook.page.wait_for_function("([canvas, drawn]) => canvas.toDataURL() !== drawn", arg=[canvas, drawn])
    assert axe(notebook.page, "[data-windowed-list-index='1'] .sr-runs") == []
    shoot(notebook, "runs", notebook.cell(1))

    notebook.show(3)
    expect(notebook.panel(2).get_by_role("figure", name="loss by epoch").locator("canvas")).to_be_visible()
    expect(notebook.cell(3).get_by_role("figure", name="A loss by time").locator("canvas")).to_be_visible()
    notebook.save()
    notebook.reload()
    notebook.show(1)
    expect(ids).to_have_text(["aaaaa4", "aaaaa3", "aaaaa2", "aaaaa1"])

    for path in (lab.folder.parent / "home" / "runs").glob("*_aaaaa4"):
        shutil.rmtree(path)
    ids.nth(0).click()
    expect(listing.locator(".sr-runwhole").first).to_contain_text("no longer saved")

    kept = notebook.save()
    kept.metadata.clear()  # so that JupyterLab asks which kernel to use
    kept.cells[1].source += " "  # so that JupyterLab does not trust the notebook
    nbformat.write(kept, notebook.path.with_stem("runs-saved"))
    notebook.page.evaluate("() => { window.jupyterapp.commands.execute('kernelmenu:restart') }")
    notebook.page.get_by_role("dialog").get_by_role("button", name="Confirm Kernel Restart").click()
    expect(notebook.static(1)).to_be_visible()  # the list needs the kernel; its static form does not
    expect(listing).to_have_count(0)

    saved = opened("runs-saved", kernel=False)
    table = saved.cell(1).locator(".sr-table").first
    expect(table.locator("> tbody > tr")).to_have_count(4)
    expect(table).to_contain_text("0.0250")
    table.locator("summary").first.click()
    expect(table.locator("details").first).to_contain_text("train(epochs=4)")
    shoot(saved, "runs-saved", saved.cell(1))
    saved.show(3)
    expect(saved.cell(3).locator("img")).to_be_visible()
    assert opened.errors == []
