"""The quickstart, run from its first cell to its last in JupyterLab, as somebody does who has just opened it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import nbformat
from lab import Notebook, Opened
from playwright.sync_api import expect

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"
ALL_CELLS_MS = 400_000  # TensorFlow, Spark and torch are started one after another


def test_the_quickstart(opened: Opened, shoot: Callable[..., None]) -> None:
    made = nbformat.read(QUICKSTART, as_version=4)
    at = {cell.id: number for number, cell in enumerate(made.cells)}
    launches = [number for number, cell in enumerate(made.cells) if re.match(r"%%horovod(?!.*--dry-run)", cell.source)]
    code = [number for number, cell in enumerate(made.cells) if cell.cell_type == "code"]
    for number in code:
        made.cells[number].outputs, made.cells[number].execution_count = [], None
    nbformat.write(made, opened.lab.folder / "quickstart.ipynb")
    found: Notebook = opened("quickstart")
    found.run_all()

    found.show(at["minus-two"])
    ring = found.panel(at["minus-two"])
    expect(ring.locator(".sr-state")).to_have_text("running", timeout=ALL_CELLS_MS)
    ring.get_by_role("tab", name="Metrics").click()
    expect(ring.locator(".sr-tab-metrics")).to_contain_text("val_accuracy")
    expect(found.prompt(at["minus-two"])).to_have_text("[*]:")  # all that while the cell was still running

    found.show(code[-1])
    found.until_done(code[-1], timeout=ALL_CELLS_MS)
    for number in launches:
        found.show(number)
        wanted = "failed" if number == launches[-1] else "finished"  # the last one shows what a mistake looks like
        expect(found.panel(number).locator(".sr-state")).to_have_text(wanted)
    found.show(at["minus-two"])
    shoot(found, "quickstart", ring)
