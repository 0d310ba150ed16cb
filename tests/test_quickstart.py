"""The quickstart notebook, run from its first cell to its last in a real kernel."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_core.utils import ensure_event_loop

import sparkring

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NOTEBOOK = NOTEBOOKS / "quickstart.ipynb"
SOURCE_ROOT = str(Path(sparkring.__file__).parents[1])
CELL_TIMEOUT_S = 300
FAILS_ON_PURPOSE = "failure"  # the cell's id
TRAINING = {"minus-one": 1, "minus-two": 2, "two": 2, "torch-run": 2}  # id → ranks


@dataclass
class Executed:
    """The notebook after its run, the page that it makes, and the figures that it reached."""

    notebook: nbformat.NotebookNode
    page: str
    outcome: list[dict[str, Any]]

    def outputs(self, cell_id: str) -> list[nbformat.NotebookNode]:
        return list(next(cell for cell in self.notebook.cells if cell.id == cell_id).outputs)

    def every_output(self) -> Iterator[tuple[str, nbformat.NotebookNode]]:
        """Each output with the id of its cell."""
        for cell in self.notebook.cells:
            for output in cell.get("outputs", ()):
                yield cell.id, output


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[None]:
    """The event loop that Jupyter's blocking calls share: here before the first test, gone after the last."""
    found = ensure_event_loop()
    yield
    found.close()


@pytest.fixture(scope="module")
def executed(run_demo: Any, loop: None, tmp_path_factory: pytest.TempPathFactory) -> Executed:
    """The notebook, run once for all tests."""
    folder = tmp_path_factory.mktemp("quickstart")
    mark = str(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARKRING_TEST", mark)
        patch.setenv("SPARKRING_HOME", str(folder / "home"))
        patch.setenv("SPARKRING_DEMO_OUTCOME", str(folder / "outcome.json"))
        patch.setenv("PYTHONPATH", SOURCE_ROOT)
        patch.setenv("JUPYTER_PATH", "")  # own_kernel() adds to it
        run_demo.own_kernel(folder / "jupyter")
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        run_demo.execute(notebook, NOTEBOOKS, folder / "kernel.log", CELL_TIMEOUT_S)
        page = run_demo.keep(notebook, folder, "quickstart")
    outcome = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    return Executed(notebook, page.read_text(encoding="utf-8"), outcome)


def shown(page: str) -> str:
    """What a reader of HTML sees, with single spaces."""
    return " ".join(html.unescape(re.sub(r"(?s)<(style|script)\b.*?</\1>|<[^>]*>", " ", page)).split())


def alive(mark: str) -> list[str]:
    """The processes that inherited `mark` from the kernel."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("SPARKRING_TEST") == mark:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def test_one_cell_is_meant_to_fail() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=nbformat.NO_CONVERT)
    assert [cell.id for cell in notebook.cells if "raises-exception" in cell.metadata.get("tags", ())] == [
        FAILS_ON_PURPOSE
    ]


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("cell_id", TRAINING)
def test_a_run_shows_its_ranks_and_metrics(executed: Executed, cell_id: str) -> None:
    (panel,) = (output for output in executed.outputs(cell_id) if output.output_type == "display_data")
    text = shown(panel.data["text/html"])
    assert re.search(r"\bfinished\b", text)
    assert " ".join(f"{rank} ✓" for rank in range(TRAINING[cell_id])) in text
    assert "val_accuracy" in text
    assert f"{TRAINING[cell_id]} rank" in panel.data["text/plain"]
    assert text[:300] in shown(executed.page)


@pytest.mark.slow
def test_only_the_cell_that_is_meant_to_fails(executed: Executed) -> None:
    (found,) = ((cell, output) for cell, output in executed.every_output() if output.output_type == "error")
    cell, error = found
    assert (cell, error.ename) == (FAILS_ON_PURPOSE, "RunFailed")
    assert error.traceback == [f"RunFailed: {error.evalue}"]
    assert error.evalue.startswith("rank 1 on ")
    assert re.search(r"^→ 5 .*reshape", error.evalue, re.MULTILINE)


@pytest.mark.slow
def test_nothing_but_the_notebook_speaks(executed: Executed) -> None:
    """No warnings of TensorFlow, Spark or the JVM on the driver's stderr; of ours there is nothing to warn of."""
    assert not [(cell, output.text) for cell, output in executed.every_output() if output.get("name") == "stderr"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_spark_says_that_it_made_a_session(executed: Executed) -> None:
    (panel,) = (output for output in executed.outputs("two") if output.output_type == "display_data")
    assert "no SparkSession yet: making one on this machine" in panel.data["text/html"]


@pytest.mark.slow
def test_nothing_outlives_the_kernel(
    executed: Executed, tmp_path_factory: pytest.TempPathFactory, wait_until: Callable[..., Any]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    marks = [str(path) for path in folder.glob("quickstart*")]
    assert marks
    wait_until(lambda: not any(alive(mark) for mark in marks), "the ranks and Spark's JVM have ended")
