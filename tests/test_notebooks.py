"""The notebooks on %%barrier and on warm gangs, run from the first cell to the last in a real kernel."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_core.utils import ensure_event_loop

import sparkring

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
SOURCE_ROOT = str(Path(sparkring.__file__).parents[1])
CELL_TIMEOUT_S = 300


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[None]:
    """The event loop that Jupyter's blocking calls share: here before the first test, gone after the last."""
    found = ensure_event_loop()
    yield
    found.close()


def run_demo() -> Any:
    """notebooks/run_demo.py, which can execute any of the notebooks."""
    spec = importlib.util.spec_from_file_location("run_demo", NOTEBOOKS / "run_demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, list[Any]]]:
    """Runs a notebook of this name; returns the outputs of its cells, by id."""

    def run(name: str) -> dict[str, list[Any]]:
        monkeypatch.setenv("PYTHONPATH", SOURCE_ROOT)
        monkeypatch.setenv("JUPYTER_PATH", "")  # own_kernel() adds to it
        demo = run_demo()
        demo.own_kernel(tmp_path / "jupyter")
        notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        demo.execute(notebook, NOTEBOOKS, tmp_path / "kernel.log", CELL_TIMEOUT_S)
        found = {cell.id: cell.get("outputs", []) for cell in notebook.cells}
        assert not [output.text for cell in found.values() for output in cell if output.get("name") == "stderr"]
        return found

    return run


def printed(cell: list[Any]) -> str:
    return "".join(output.text for output in cell if output.output_type == "stream")


def result(cell: list[Any]) -> str:
    return next(str(output.data["text/plain"]) for output in cell if output.output_type == "execute_result")


@pytest.mark.parametrize("name", ["ensemble", "conversation"])
def test_is_kept_without_outputs(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.slow
def test_the_vote_beats_each_model(outputs: Callable[[str], dict[str, list[Any]]]) -> None:
    found = outputs("ensemble")
    *single, together = map(float, re.findall(r"\d\.\d{3}$", printed(found["vote"]), re.MULTILINE))
    assert len(single) == 4
    assert 1 > together > max(single) > 0.6
    assert any("image/png" in output.get("data", {}) for output in found["picture"])
    for cell in ("context", "train", "batches"):
        (panel,) = (output for output in found[cell] if output.output_type == "display_data")
        assert re.search(r"\bfinished\b", panel.data["text/html"])


@pytest.mark.slow
def test_a_conversation(outputs: Callable[[str], dict[str, list[Any]]]) -> None:
    """Variables stay on the ranks from cell to cell, and survive a mistake."""
    found = outputs("conversation")
    assert result(found["join"]).split("\n") == ["rank 0: 450", "ranks 1–3: 449"]
    assert re.search(r"ms; the mean over all ranks is 0\.305\d, numpy says 0\.305\d", printed(found["fast-result"]))
    assert any("image/png" in output.get("data", {}) for output in found["collectives-picture"])
    assert "together: 0.9" in printed(found["ask-result"])
    (error,) = (output for output in found["mistake"] if output.output_type == "error")
    assert error.evalue.startswith("rank 3 on ")
    assert "The gang goes on" in error.evalue
    assert result(found["still"]) == f"rank 0: {64 * 128 + 128}"
    assert "stopped" in printed(found["stop"])
