"""The quickstart, run from its first cell to its last in JupyterLab, as a new user would run it."""

from __future__ import annotations

import contextlib
import html
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from lab import Lab, Notebook, Opened
from playwright.sync_api import expect
from waiting import PACE

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"
ALL_CELLS_MS = 400_000 * PACE
FAIL_ON_PURPOSE = ["bad-store", "failure"]  # the ids of cells
TRAINING = ["ring", "spark"]
# Without --pictures, the models of the stores and the nets are smaller: they would take most of the time of all tests.
SMALLER = {"n_estimators=250": "n_estimators=2", "1_440, 3, 32": "96, 3, 16"}


class Running:
    """The notebook in its page while all of its cells run."""

    def __init__(self, opened: Opened, smaller: dict[str, str]) -> None:
        made = nbformat.read(QUICKSTART, as_version=4)
        for text, other in smaller.items():
            (cell,) = (cell for cell in made.cells if text in cell.source)
            cell.source = cell.source.replace(text, other)
        self.at = {cell.id: number for number, cell in enumerate(made.cells)}
        self.launches = [
            number for number, cell in enumerate(made.cells) if re.match(r"%%(foreach|torchrun) ", cell.source)
        ]
        code = [number for number, cell in enumerate(made.cells) if cell.cell_type == "code"]
        for number in code:
            made.cells[number].outputs, made.cells[number].execution_count = [], None
        nbformat.write(made, opened.lab.folder / "quickstart.ipynb")
        self._last = code[-1]
        self.notebook: Notebook = opened("quickstart")
        self.notebook.run_all()

    def until_done(self) -> None:
        """Wait until the last cell has ended."""
        self.notebook.show(self._last)
        self.notebook.until_done(self._last, timeout=ALL_CELLS_MS)


@dataclass
class Executed:
    """The notebook, saved after its run, its HTML page, and the results that it wrote."""

    notebook: nbformat.NotebookNode
    page: str
    outcome: list[dict[str, Any]]

    def outputs(self, cell_id: str) -> list[nbformat.NotebookNode]:
        return list(next(cell for cell in self.notebook.cells if cell.id == cell_id).outputs)

    def every_output(self) -> Iterator[tuple[str, nbformat.NotebookNode]]:
        """Yield each output with the id of its cell."""
        for cell in self.notebook.cells:
            for output in cell.get("outputs", ()):
                yield cell.id, output


@pytest.fixture(scope="module")
def running(opened: Opened, pytestconfig: pytest.Config) -> Running:
    return Running(opened, {} if pytestconfig.getoption("--pictures") else SMALLER)


@pytest.fixture(scope="module")
def executed(running: Running, lab: Lab, run_demo: Any, tmp_path_factory: pytest.TempPathFactory) -> Executed:
    """The notebook after its run, which all tests share. It is saved in the same way as under `make demo`."""
    running.until_done()
    notebook = running.notebook.save()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if run_demo.is_shown(output)]
    page = run_demo.keep(notebook, tmp_path_factory.mktemp("quickstart"), "quickstart")
    return Executed(notebook, page.read_text(encoding="utf-8"), json.loads(lab.outcome.read_text(encoding="utf-8")))


def shown(page: str) -> str:
    """Return the text that a reader of the HTML sees, with single spaces."""
    return " ".join(html.unescape(re.sub(r"(?s)<(style|script)\b.*?</\1>|<[^>]*>", " ", page)).split())


def test_two_cells_are_meant_to_fail() -> None:
    notebook = nbformat.read(QUICKSTART, as_version=nbformat.NO_CONVERT)
    failing = [cell.id for cell in notebook.cells if "raises-exception" in cell.metadata.get("tags", ())]
    assert failing == FAIL_ON_PURPOSE


@pytest.mark.extended("notebook", "test_it_moves_while_the_cell_runs shows it with another cell")
def test_a_panel_moves_while_its_cell_runs(running: Running) -> None:
    found = running.notebook
    found.show(running.at["ring"])
    ring = found.panel(running.at["ring"])
    expect(ring.locator(".sr-state")).to_have_text("running", timeout=ALL_CELLS_MS)
    metrics = ring.get_by_role("tab", name="Metrics")
    expect(metrics).to_be_enabled(timeout=ALL_CELLS_MS)  # after the first epoch
    metrics.click()
    expect(ring.locator(".sr-tab-metrics")).to_contain_text("val_accuracy")
    expect(found.prompt(running.at["ring"])).not_to_have_text(re.compile(r"\d"))  # the cell is still running
    expect(ring.locator(".sr-state")).to_have_text("running")


def test_panels_show_how_the_runs_ended(running: Running, shoot: Callable[..., None]) -> None:
    found = running.notebook
    running.until_done()
    for number in running.launches:
        found.show(number)
        wanted = "failed" if number in {running.at[cell] for cell in FAIL_ON_PURPOSE} else "finished"
        expect(found.panel(number).locator(".sr-state")).to_have_text(wanted)
    found.show(running.at["ring"])
    shoot(found, "quickstart", found.panel(running.at["ring"]))


def test_every_step_reaches_its_accuracy(executed: Executed, pytestconfig: pytest.Config) -> None:
    """How much faster two processes are is not asserted, because it depends on the machine."""
    assert [(row["step"], row["where"], row["ranks"]) for row in executed.outcome] == [
        ("forty models", "a loop in the kernel", 1),
        ("forty models", "two processes", 2),
        ("one net", "the kernel", 1),
        ("one net", "two processes", 2),
        ("one net", "the kernel, DataLoader with 2 workers", 1),
        ("one net", "two Spark tasks", 2),
        ("one net", "two processes, Horovod", 2),
    ]
    least = 0.8 if pytestconfig.getoption("--pictures") else 0.15  # a net that has learned nothing reaches 0.04
    assert all(least <= row["accuracy"] <= 1 for row in executed.outcome if row["step"] == "one net")
    assert all(row["seconds"] > 0 and row["speedup"] > 0 for row in executed.outcome)


def panel(executed: Executed, cell_id: str) -> str:
    (found,) = (output for output in executed.outputs(cell_id) if output.output_type == "display_data")
    return str(found.data["text/html"])


@pytest.mark.parametrize("cell_id", TRAINING)
def test_a_run_shows_its_ranks_and_metrics(executed: Executed, cell_id: str) -> None:
    text = shown(panel(executed, cell_id))
    assert re.search(r"\bfinished\b", text)
    assert "0 ✓ 1 ✓" in text
    assert "val_accuracy" in text
    assert text[:300] in shown(executed.page)


def test_only_the_cells_that_are_meant_to_fail(executed: Executed) -> None:
    found = {cell: output for cell, output in executed.every_output() if output.output_type == "error"}
    assert [*found] == FAIL_ON_PURPOSE
    store, rank = found.values()
    assert store.ename == "ItemsFailed"
    assert "store 27" in store.evalue
    assert "contains NaN" in store.evalue
    assert rank.ename == "RunFailed"
    assert rank.evalue.startswith("rank 1 on ")
    assert re.search(r"^→ 5 .*reshape", rank.evalue, re.MULTILINE)
    (traceback,) = rank.traceback
    assert traceback.splitlines()[0] == f"RunFailed: {rank.evalue.splitlines()[0]}"
    assert "cell line 5" in traceback
    assert "→" not in traceback, "the panel above the error shows the code"


def test_only_the_store_with_a_gap_runs_again(executed: Executed) -> None:
    assert "39 kept" in shown(panel(executed, "good-store"))


def test_a_killed_rank_is_named_and_the_run_goes_on(executed: Executed) -> None:
    text = shown(panel(executed, "killed"))
    assert re.search(r"rank 1 .*SIGKILL", text)
    assert re.search(r"begins after epoch [12]", text)


def test_nothing_but_the_notebook_speaks(executed: Executed) -> None:
    """On stderr, sparkring says that it makes a SparkSession. PyTorch, Spark and the JVM print no warnings."""
    texts = [(cell, output.text) for cell, output in executed.every_output() if output.get("name") == "stderr"]
    assert {cell for cell, _ in texts} == {"clock-spark"}, texts
    assert all(line.startswith("sparkring: ") for _, text in texts for line in text.splitlines())


def test_pictures_and_tables_are_there(executed: Executed) -> None:
    pictures = [cell for cell, output in executed.every_output() if "image/png" in output.get("data", {})]
    assert pictures == ["best", "pieces", "chart"]
    (runs,) = executed.outputs("runs")
    assert len(runs.data["text/plain"].splitlines()[2:]) == 5
    (seconds,) = executed.outputs("again-seconds")
    assert re.fullmatch(r"\d+\.\d\d s from start to end\n", seconds.text)


def test_nothing_outlives_the_kernel(executed: Executed, lab: Lab, wait_until: Callable[..., Any]) -> None:
    """Processes are found by the notebook's name, which the server sets in the kernel's environment."""
    name = lab.kernel("quickstart").environ()["JPY_SESSION_NAME"]
    assert name.endswith("quickstart.ipynb")

    def alive() -> list[str]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("JPY_SESSION_NAME") == name:
                    found.append(process.name())
        return found

    assert "java" in alive()
    lab.ask(f"/api/sessions/{lab.session('quickstart')['id']}", "DELETE")
    wait_until(lambda: not alive(), "the kernel, the ranks and Spark's JVM have ended")
