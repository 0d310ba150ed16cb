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

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"
ALL_CELLS_MS = 400_000  # TensorFlow, Spark and torch are started one after another
FAILS_ON_PURPOSE = "failure"  # the id of a cell
TRAINING = {"minus-one": 1, "minus-two": 2, "two": 2, "torch-run": 2}  # id → ranks


class Running:
    """The notebook in its page while all of its cells run."""

    def __init__(self, opened: Opened) -> None:
        made = nbformat.read(QUICKSTART, as_version=4)
        self.at = {cell.id: number for number, cell in enumerate(made.cells)}
        self.launches = [
            number for number, cell in enumerate(made.cells) if re.match(r"%%horovod(?!.*--dry-run)", cell.source)
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
def running(opened: Opened) -> Running:
    return Running(opened)


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


def test_one_cell_is_meant_to_fail() -> None:
    notebook = nbformat.read(QUICKSTART, as_version=nbformat.NO_CONVERT)
    assert [cell.id for cell in notebook.cells if "raises-exception" in cell.metadata.get("tags", ())] == [
        FAILS_ON_PURPOSE
    ]


def test_a_panel_moves_while_its_cell_runs(running: Running, shoot: Callable[..., None]) -> None:
    found = running.notebook
    found.show(running.at["minus-two"])
    ring = found.panel(running.at["minus-two"])
    expect(ring.locator(".sr-state")).to_have_text("running", timeout=ALL_CELLS_MS)
    ring.get_by_role("tab", name="Metrics").click()
    expect(ring.locator(".sr-tab-metrics")).to_contain_text("val_accuracy")
    expect(found.prompt(running.at["minus-two"])).to_have_text("[*]:")  # the cell is still running

    running.until_done()
    for number in running.launches:
        found.show(number)
        wanted = "failed" if number == running.launches[-1] else "finished"  # the last one shows an error
        expect(found.panel(number).locator(".sr-state")).to_have_text(wanted)
    found.show(running.at["minus-two"])
    shoot(found, "quickstart", ring)


def test_every_step_reaches_its_accuracy(executed: Executed) -> None:
    assert [(row["step"], row["where"], row["ranks"]) for row in executed.outcome] == [
        ("Keras", "the notebook's kernel", 1),
        ("Keras", "one process", 1),
        ("Keras", "two processes", 2),
        ("Keras", "two Spark tasks", 2),
        ("PyTorch", "two processes", 2),
    ]
    assert all(0.95 <= row["accuracy"] <= 1 for row in executed.outcome)
    assert all(row["seconds"] > 0 for row in executed.outcome)


@pytest.mark.parametrize("cell_id", TRAINING)
def test_a_run_shows_its_ranks_and_metrics(executed: Executed, cell_id: str) -> None:
    (panel,) = (output for output in executed.outputs(cell_id) if output.output_type == "display_data")
    text = shown(panel.data["text/html"])
    assert re.search(r"\bfinished\b", text)
    assert " ".join(f"{rank} ✓" for rank in range(TRAINING[cell_id])) in text
    assert "val_accuracy" in text
    assert f"{TRAINING[cell_id]} rank" in panel.data["text/plain"]
    assert text[:300] in shown(executed.page)


def test_only_the_cell_that_is_meant_to_fails(executed: Executed) -> None:
    (found,) = ((cell, output) for cell, output in executed.every_output() if output.output_type == "error")
    cell, error = found
    assert (cell, error.ename) == (FAILS_ON_PURPOSE, "RunFailed")
    assert error.traceback == [f"RunFailed: {error.evalue}"]
    assert error.evalue.startswith("rank 1 on ")
    assert re.search(r"^→ 5 .*reshape", error.evalue, re.MULTILINE)


def test_nothing_but_the_notebook_speaks(executed: Executed) -> None:
    """stderr stays empty: TensorFlow, Spark, the JVM and sparkring print no warnings."""
    assert not [(cell, output.text) for cell, output in executed.every_output() if output.get("name") == "stderr"]


def test_pictures_and_tables_are_there(executed: Executed) -> None:
    pictures = [cell for cell, output in executed.every_output() if "image/png" in output.get("data", {})]
    assert pictures == ["data-picture", "curves", "mistakes"]
    (table,) = executed.outputs("dry-run")
    rows = {line.split()[0]: line for line in table.data["text/plain"].splitlines()[2:]}
    assert {"x_train", "y_train", "make_model", "keras", "learning_rate"} <= set(rows)
    assert re.search(r"\bmodule\b.* by reference$", rows["keras"].rstrip())
    (runs,) = executed.outputs("runs")
    assert len(runs.data["text/plain"].splitlines()[2:]) == 5
    (logs,) = executed.outputs("logs")
    first, *_, last = logs.text.splitlines()
    assert first == "rank 1 has 718 digits"
    assert last.startswith("ValueError: cannot reshape")


def test_spark_says_that_it_made_a_session(executed: Executed) -> None:
    (panel,) = (output for output in executed.outputs("two") if output.output_type == "display_data")
    assert "no SparkSession yet: making one on this machine" in panel.data["text/html"]


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
