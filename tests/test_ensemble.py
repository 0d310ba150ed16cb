"""The notebook on %%barrier, run from its first cell to its last in a real kernel."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_core.utils import ensure_event_loop

import sparkring

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NOTEBOOK = NOTEBOOKS / "ensemble.ipynb"
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


def test_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.slow
def test_the_vote_beats_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE_ROOT)
    monkeypatch.setenv("JUPYTER_PATH", "")  # own_kernel() adds to it
    demo = run_demo()
    demo.own_kernel(tmp_path / "jupyter")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    demo.execute(notebook, NOTEBOOKS, tmp_path / "kernel.log", CELL_TIMEOUT_S)
    outputs = {cell.id: cell.get("outputs", []) for cell in notebook.cells}
    assert not [output.text for found in outputs.values() for output in found if output.get("name") == "stderr"]
    printed = "".join(output.text for output in outputs["vote"])
    *single, together = map(float, re.findall(r"\d\.\d{3}$", printed, re.MULTILINE))
    assert len(single) == 4
    assert 1 > together > max(single) > 0.6
    assert any("image/png" in output.get("data", {}) for output in outputs["picture"])
    for cell in ("context", "train", "batches"):
        (panel,) = (output for output in outputs[cell] if output.output_type == "display_data")
        assert re.search(r"\bfinished\b", panel.data["text/html"])
