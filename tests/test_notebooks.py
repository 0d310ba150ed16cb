"""Tests that run the notebooks, except the quickstart, and the tutorials from beginning to end in a real kernel."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_core.utils import ensure_event_loop
from texts import mentions
from waiting import PACE

import sparkring

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.md"))
SOURCE_ROOT = str(Path(sparkring.__file__).parents[1])
CELL_TIMEOUT_S = round(300 * PACE)
HAS_PETASTORM = sys.version_info < (3, 13)  # there are no builds of the versions of pyarrow and NumPy that it needs
# Notebooks that run with spare processes, as for users. Several ranks on this machine import the same packages.
WITH_SPARES = {"survive", "strategies", "images", "scaling"}
PICTURES = {  # the cells that draw pictures
    "shards": ("data-picture", "picture"),
    "mixed_inputs": ("picture", "bars"),
    "images": ("tiles-picture", "mistakes", "map"),
}


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[None]:
    """Make the event loop that Jupyter's blocking calls share, and close it after the last test."""
    found = ensure_event_loop()
    yield
    found.close()


@pytest.fixture
def execute(run_demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that runs the cells of a notebook in a folder."""

    def run(notebook: nbformat.NotebookNode, folder: Path, *, spares: bool) -> None:
        monkeypatch.setenv("PYTHONPATH", SOURCE_ROOT)
        monkeypatch.setenv("SPARKRING_SPARE", "1" if spares else "0")
        monkeypatch.setenv("JUPYTER_PATH", "")  # own_kernel() adds to it
        run_demo.own_kernel(tmp_path / "jupyter")
        run_demo.execute(notebook, folder, tmp_path / "kernel.log", CELL_TIMEOUT_S)

    return run


@pytest.fixture
def outputs(execute: Callable[..., None]) -> Callable[[str], dict[str, list[Any]]]:
    """Return a function that runs a notebook, and returns the outputs of its cells by id."""

    def run(name: str) -> dict[str, list[Any]]:
        notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        execute(notebook, NOTEBOOKS, spares=name in WITH_SPARES)
        found = {cell.id: cell.get("outputs", []) for cell in notebook.cells}
        noise = [output.text for cell in found.values() for output in cell if output.get("name") == "stderr"]
        # These make a Spark session and write or score a DataFrame; sparkring says so. They also have pandas
        # UDFs, for which pyspark 4.3 warns about pandas 3.
        spoken = name in ("mixed_inputs", "images", "online", "ensemble")
        said = ("sparkring: ", "FutureWarning: PySpark does not yet fully support pandas")
        assert not [text for text in noise if not spoken or not any(each in text for each in said)]
        return found

    return run


def printed(cell: list[Any]) -> str:
    return "".join(output.text for output in cell if output.output_type == "stream")


def result(cell: list[Any]) -> str:
    return next(str(output.data["text/plain"]) for output in cell if output.output_type == "execute_result")


def test_every_notebook_is_run_here_or_in_the_quickstarts_tests() -> None:
    run = set(re.findall(r'outputs\("(\w+)"\)', Path(__file__).read_text(encoding="utf-8"))) | {"quickstart"}
    assert run == {path.stem for path in NOTEBOOKS.glob("*.ipynb")}


@pytest.mark.slow
@pytest.mark.extended("notebook", "the quickstart runs in make test")
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_the_cells_of_a_tutorial_run_as_written(path: Path, execute: Callable[..., None], tmp_path: Path) -> None:
    """Every block of Python is a cell. Blocks that are not for notebooks have no language, or the language `py`."""
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", path.read_text(encoding="utf-8"))
    execute(nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, blocks)]), tmp_path, spares=True)


@pytest.mark.slow
@pytest.mark.extended("notebook", "the quickstart runs in make test")
def test_a_hundred_trees_vote(outputs: Callable[[str], dict[str, list[Any]]]) -> None:
    """Each partition has trained a tree, and their vote, a column, beats the average tree."""
    found = outputs("ensemble")
    assert printed(found["models"]).startswith("100 trees, ")
    single, together = map(float, re.findall(r": +(\d\.\d{3})\b", printed(found["accuracy"])))
    assert 0.6 < single < together <= 1
    assert len(re.findall(r"^\| *(?:china|flower)\|", printed(found["vote"]), re.MULTILINE)) == 2
    assert any("image/png" in output.get("data", {}) for output in found["picture"])
    for cell in ("context", "train", "batches"):
        (panel,) = (output for output in found[cell] if output.output_type == "display_data")
        assert re.search(r"\bfinished\b", panel.data["text/html"])


@pytest.mark.slow
@pytest.mark.extended("notebook", "the quickstart runs in make test")
def test_a_conversation(outputs: Callable[[str], dict[str, list[Any]]]) -> None:
    """Variables stay on the ranks from cell to cell, and survive a mistake."""
    found = outputs("conversation")
    assert result(found["join"]).split("\n") == ["rank 0: 450", "ranks 1–3: 449"]
    assert re.search(r"ms; the mean over all ranks is 0\.305\d, numpy says 0\.305\d", printed(found["fast-result"]))
    assert any("image/png" in output.get("data", {}) for output in found["collectives-picture"])
    assert "together: 0.9" in printed(found["ask-result"])
    (error,) = (output for output in found["mistake"] if output.output_type == "error")
    assert error.evalue.startswith("rank 3 on ")
    assert "The gang stays up" in error.evalue
    assert result(found["still"]) == f"rank 0: {64 * 128 + 128}"
    assert "stopped" in printed(found["stop"])


@pytest.mark.slow
@pytest.mark.extended("notebook", "the quickstart runs in make test")
def test_three_ways_to_feed_a_ring(outputs: Callable[[str], dict[str, list[Any]]]) -> None:
    """All three readers work. On uneven row groups, Petastorm's shards hang, which is reported, and shards() works.

    If Petastorm cannot be installed, the other two work, and the cells that are meant to fail say so.
    """
    found = outputs("shards")
    cells = ("keep", "petastorm-keep", "tfrecord-keep", "fine-keep")
    kept = {cell: printed(found[cell]) for cell in cells if HAS_PETASTORM or cell != "petastorm-keep"}
    for text in kept.values():
        accuracy = float(re.search(r"held-out accuracy (\d\.\d{3})$", text, re.MULTILINE)[1])  # type: ignore[index]
        assert 0.93 <= accuracy <= 1
    rows = {cell: re.findall(r"^rank \d has read ([\d,]+) ", text, re.MULTILINE) for cell, text in kept.items()}
    if HAS_PETASTORM:
        assert rows.pop("petastorm-keep") == ["6,480", "6,453"]
    assert list(rows.values()) == [["6,464", "6,464"]] * 3

    failed = [cell for cell, made in found.items() if any(output.output_type == "error" for output in made)]
    assert failed == ["hang", "fewer"]
    panel, error = found["hang"]
    (refused,) = found["fewer"]
    assert refused.ename == "DataError"
    if HAS_PETASTORM:
        assert error.ename == "RunTimeout"
        assert mentions(error.evalue, "rank 0", "TensorFlow graph", "rank 1", "allreduce", "cell line")
        assert mentions(panel.data["text/html"], "silent for", "rank 0", "TensorFlow graph")
        assert printed(found["hang-result"]).splitlines() == [
            "rank 0 was given 7,733 rows for 121 steps",
            "rank 1 was given 5,200 rows for 82 steps",
        ]
        assert mentions(refused.evalue, "5 row groups", "1 file", "8 ranks")
    else:
        assert mentions(error.evalue, "Petastorm", "cannot be installed")
        assert mentions(refused.evalue, "Petastorm", "cannot be installed")
    assert all(any("image/png" in output.get("data", {}) for output in found[cell]) for cell in PICTURES["shards"])


@pytest.mark.slow
@pytest.mark.extended("notebook", "the quickstart runs in make test")
def test_a_picture_and_what_came_before_it(outputs: Callable[[str], dict[str, list[Any]]]) -> None:
    """Each picture gets its own window of readings; otherwise, both inputs would be no better than one."""
    found = outputs("mixed_inputs")
    told = dict(re.findall(r"^(.+): (\d\.\d{3})$", printed(found["outcome"]), re.MULTILINE))
    picture, readings, both = (float(told[name]) for name in ("picture", "readings", "picture and readings"))
    assert picture < 0.6
    assert readings < 0.8
    assert 1 > both > 0.9
    assert "'window': Spec(shape=(3, 32), dtype=dtype('float32'))" in result(found["shards"])
    assert all(
        any("image/png" in output.get("data", {}) for output in found[cell]) for cell in PICTURES["mixed_inputs"]
    )


@pytest.mark.slow
@pytest.mark.extended("notebook", "the quickstart runs in make test")
def test_images_from_a_table_to_mistakes(outputs: Callable[[str], dict[str, list[Any]]]) -> None:
    """The pipeline and predict() give the same predictions. A wrong shape is found before Petastorm's ranks start."""
    found = outputs("images")
    accuracies = [found["fit"], *([found["train"]] if HAS_PETASTORM else [])]
    for cell in accuracies:
        said = printed(cell) + "".join(str(output.data) for output in cell if output.output_type == "execute_result")
        assert 0.9 < float(re.search(r"held-out accuracy: (\d\.\d{3})", said)[1]) <= 1  # type: ignore[index]
    assert float(re.search(r"largest difference: (\S+)", printed(found["predict"]))[1]) < 0.001  # type: ignore[index]
    assert all(any("image/jpeg" in output.get("data", {}) for output in found[cell]) for cell in PICTURES["images"])
    (error,) = found["wrong"]
    if HAS_PETASTORM:
        assert "'pixels' is float32 of shape (16, 16, 3)" in error.evalue
        assert "declares float32 of shape (3, 16, 16)" in error.evalue
    else:
        assert mentions(error.evalue, "Petastorm", "cannot be installed")


@pytest.mark.slow
@pytest.mark.extended("notebook", "the quickstart runs in make test")
def test_what_survives(outputs: Callable[[str], dict[str, list[Any]]]) -> None:
    """A killed rank or executor makes no difference to the weights. A changed cell needs --resume."""
    found = outputs("survive")
    for cell in ("killed", "executor", "keras"):
        panel = next(output for output in found[cell] if output.output_type == "display_data")
        assert "after 1 restart" in panel.data["text/plain"]
        # A checkpoint is saved in the background. On a slow machine, the rank dies before the last one is complete.
        assert re.search(r"\(step (75|100) was saved", panel.data["text/html"])
        assert re.search(r"continued from step (75|100)", panel.data["text/html"])
        assert ("killed by SIGKILL" in panel.data["text/html"]) == (cell != "executor")
    assert any("image/png" in output.get("data", {}) for output in found["curve"])
    (shown,) = found["list"]
    assert mentions(shown.data["text/plain"], "resume point", "step 225")
    assert "<img" in shown.data["text/html"]
    for cell in ("same", "executor-same"):
        assert len(re.findall("bit-for-bit equal: True", printed(found[cell]))) == 5
        assert "False" not in printed(found[cell])
    (error,) = found["asked"]
    assert error.ename == "CheckpointError"
    assert "+train(4)" in error.evalue
    assert result(found["resumed"]) == "ranks 0, 1: 300"
    share = float(re.search(r"(\d+\.\d)% of the held-out characters", printed(found["best"]))[1])  # type: ignore[index]
    assert 25 < share < 75
    (shown,) = found["keras-list"]
    assert mentions(shown.data["text/plain"], "resume point", "step 225")


@pytest.mark.slow
@pytest.mark.extended("notebook", "the quickstart runs in make test")
def test_training_on_a_stream(outputs: Callable[[str], dict[str, list[Any]]]) -> None:
    """The live model stays accurate while the frozen one does not. Each micro-batch counts once, despite the kill."""
    found = outputs("online")
    panel = next(output for output in found["stream"] if output.output_type == "display_data")
    assert "after 1 restart" in panel.data["text/plain"]
    figures = re.search(r"live (\d\.\d+) · frozen (\d\.\d+)", panel.data["text/plain"])
    assert figures
    assert float(figures[2]) < 0.1 < 0.9 < float(figures[1])
    assert result(found["result"]) == "StreamResult(60 batches, 30,720 rows, saved=59)"
    assert result(found["once"]) == "rank 0: True"
    assert re.search(r"\b59 +\d+$", result(found["versions"])), "the last predictions are by the last weights"
    assert any("image/png" in output.get("data", {}) for output in found["picture"])


@pytest.mark.slow
@pytest.mark.extended("notebook", "the quickstart runs in make test")
def test_hundreds_of_models(outputs: Callable[[str], dict[str, list[Any]]]) -> None:
    """After the kill, exactly the missing items run. Bad trials of the search are pruned."""
    found = outputs("hundreds")
    assert mentions(result(found["plan"]), "300 items", "at once", "this machine")
    there = int(re.search(r"killed with (\d+) of 300 results", printed(found["kill"]))[1])  # type: ignore[index]
    counts = re.findall(r"^ *(\d+) items (\w+)$", printed(found["result"]), re.MULTILINE)
    states = {state: int(count) for count, state in counts}
    assert 137 <= there < 300
    assert there - states["kept"] in (0, 1), "the kill may have cut off one result"
    assert states == {"kept": states["kept"], "finished": 300 - states["kept"]}
    assert float(re.search(r"four weeks: (\d+\.\d)%", printed(found["result"]))[1]) < 20  # type: ignore[index]
    assert "# tag: parameters\nstore = " in printed(found["notebook"])
    assert "NaN" not in result(found["notebooks-result"])
    assert re.search(r"better for \d+ of 300 stores$", printed(found["notebooks-result"]), re.MULTILINE)
    pruned = int(re.search(r"(\d+) of 32 trials were pruned", printed(found["best"]))[1])  # type: ignore[index]
    assert 0 < pruned < 32
    for cell in ("picture", "search-picture"):
        assert any("image/png" in output.get("data", {}) for output in found[cell])


def test_a_horovodrunner_notebook_needs_the_extension_and_one_line() -> None:
    cells = nbformat.read(NOTEBOOKS / "coming_from_databricks.ipynb", as_version=4).cells
    ids = [cell.id for cell in cells]
    theirs = [cell for cell in cells[ids.index("begin") : ids.index("better-text")] if cell.cell_type == "code"]
    assert [cell.id for cell in theirs if "sparkring" in cell.source] == ["mount"]
    assert "from sparkdl import HorovodRunner" in "\n".join(cell.source for cell in theirs)


@pytest.mark.slow
@pytest.mark.extended("notebook", "the quickstart runs in make test")
def test_a_horovodrunner_notebook_as_it_is(outputs: Callable[[str], dict[str, list[Any]]]) -> None:
    """Both runs and the cell train. Two ranks on Spark have the same model, and a failing rank is named."""
    found = outputs("coming_from_databricks")
    one, two = (
        next(output.data for output in found[cell] if output.output_type == "display_data") for cell in ("one", "two")
    )
    assert "1 rank finished" in one["text/plain"]
    assert "rank 0 of 1 trains on 1437 digits" in one["text/html"]
    assert "epoch 6 ends after" in one["text/plain"]  # LogCallback prints this line, which is shown by default …
    assert "Epoch 6/6" not in one["text/plain"]  # … and Keras prints this one, which is not
    assert "2 ranks finished" in two["text/plain"]
    assert "Epoch 6/6" in two["text/plain"]
    assert all(
        any("image/png" in output.get("data", {}) for output in found[cell])
        for cell in ("data-picture", "curves", "predictions")
    )
    losses = re.findall(r"^rank \d on \S+: loss (\S+), accuracy (\S+)$", printed(found["ranks"]), re.MULTILINE)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    (error,) = (output for output in found["failure"] if output.output_type == "error")
    assert mentions(error.evalue.partition("\n")[0], "rank 1", "failed", "ValueError")
    assert "count_pixels" in error.evalue
    function, cell = map(float, re.findall(r"\d\.\d{3}", printed(found["cell-result"])))
    assert 0.9 < function <= 1
    assert 0.9 < cell <= 1
    udfs = re.findall(r"^(\w+): held-out accuracy (\S+)$", printed(found["udf"]), re.MULTILINE)
    assert [name for name, _ in udfs] == ["predict_batch_udf", "predict_udf"]
    assert 0.9 < float(udfs[0][1]) == float(udfs[1][1])
    assert float(re.search(r"(\d\.\d{3})$", printed(found["mirrored"]))[1]) > 0.9  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.extended("notebook", "the quickstart runs in make test")
def test_two_frameworks_come_to_the_same_net(outputs: Callable[[str], dict[str, list[Any]]]) -> None:
    """With the same rows and initial weights, the nets differ only by the order of additions."""
    found = outputs("strategies")
    same = printed(found["same"])
    assert re.findall(r"^(\w+) +both ranks hold the same weights: (\w+)$", same, re.MULTILINE) == [
        ("PyTorch", "True"),
        ("TensorFlow", "True"),
    ]
    apart, moved = map(float, re.findall(r"(\d\S*) at most; .* up to (\S+)$", same, re.MULTILINE)[0])
    assert apart < 0.01 * moved
    reached = [float(value) for value in re.findall(r"held-out accuracy (\d\.\d{3})", printed(found["answer"]))]
    assert len(reached) == 2
    assert abs(reached[0] - reached[1]) < 0.01
    assert all(0.85 < value < 1 for value in reached)
    drawn = ("data-picture", "saw", "curves", "picture")
    assert all(any("image/jpeg" in output.get("data", {}) for output in found[cell]) for cell in drawn)


@pytest.mark.slow
@pytest.mark.extended("notebook", "the quickstart runs in make test")
def test_why_a_rank_is_slow(outputs: Callable[[str], dict[str, list[Any]]]) -> None:
    """The first run names the slow rank and the function. After the change, no rank is named for it."""
    found = outputs("slow_rank")
    verdicts = []
    for cell in ("slow", "fast"):
        (panel,) = (output for output in found[cell] if output.output_type == "display_data")
        verdicts.append(mentions(panel.data["text/plain"], "for rank 1", "augment"))
    assert verdicts == [True, False]
    assert len(re.findall(r"\d s$", printed(found["compare"]), re.MULTILINE)) == 2


@pytest.mark.slow
@pytest.mark.extended("notebook", "the quickstart runs in make test")
def test_how_training_scales(outputs: Callable[[str], dict[str, list[Any]]]) -> None:
    """The table has a row for each number of ranks, and the findings quote it."""
    found = outputs("scaling")
    numbers = re.findall(r"\d+", re.search(r"^ranks: (.*?);", printed(found["load"]), re.MULTILINE)[1])  # type: ignore[index]
    assert numbers[:2] == ["1", "2"]
    rows = re.findall(r"^(\d+) +([\d,]+) +(\d+\.\d\d) +(\d+)%", result(found["table"]), re.MULTILINE)
    assert [row[0] for row in rows] == numbers
    rates = [int(row[1].replace(",", "")) for row in rows]
    (findings,) = (output.data["text/markdown"] for output in found["findings"])
    for (ranks, _, speed_up, efficiency), rate in zip(rows, rates, strict=True):
        assert float(speed_up) == pytest.approx(rate / rates[0], abs=0.02)
        assert int(efficiency) == pytest.approx(100 * float(speed_up) / int(ranks), abs=1.5)
        said = f"**{ranks} ranks** train on {speed_up} times as many images per second"
        assert (said in findings) == (ranks != "1")
    assert any("image/png" in output.get("data", {}) for output in found["picture"])
