"""Tests of a saved run's metrics for TensorBoard, which TensorBoard's own reader reads back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sparkring.errors import DataError, OptionsError
from sparkring.history import events
from sparkring.history.record import RunRecord
from sparkring.history.run_folder import RunFolder
from sparkring.history.tensorboard import environment, scalars, write_event_files

RUN = "2026-01-01_00-00-00_aaaa"


def saved(*reports: events.Metrics, size: int = 2, run: str = RUN):
    """Save a run with these reports, and return its folder."""
    folder = RunFolder(run)
    started = events.RunStarted(1.0, run, "cell", "", size, "local", "plain", "all")
    folder.seen([started, *reports], RunRecord())
    folder.ended(RunRecord())
    return folder.path


def read_back(folder) -> dict[str, dict[str, list[tuple[int, float, float]]]]:
    """Return steps, wall times and values, by series and tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for series in sorted(folder.iterdir()):
        reader = EventAccumulator(str(series), size_guidance={"scalars": 0})
        reader.Reload()
        found[series.name] = {
            tag: [(each.step, each.wall_time, each.value) for each in reader.Scalars(tag)]
            for tag in reader.Tags()["scalars"]
        }
    return found


def keras(rank: int, time: float, loss: float, epoch: int, step: int | None = None) -> events.Metrics:
    """Return a report like those of Keras' fit: within an epoch of 10 steps, or at the end of the epoch."""
    values = {"loss": loss} if step else {"loss": loss, "val_loss": loss + 1}
    return events.Metrics(values, step, epoch, 10 if step else None, 2, ends_epoch=step is None, time=time, rank=rank)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("over_all", [False, True], ids=["within the epoch", "over all epochs"])
def test_steps_are_the_same_however_the_user_counts(first, over_all):
    reports = [
        events.Metrics({"loss": 1.0}, step + 4 * epoch * over_all, epoch + first, 4, 3, time=4.0 * epoch + step, rank=0)
        for epoch in range(3)
        for step in range(1, 5)
    ]
    assert [each.step for each in scalars(reports)] == [*range(1, 13)]


def test_ranks_and_their_mean_by_step_and_by_epoch():
    """Steps continue from epoch to epoch, means are over all ranks, and times are those of the reports."""
    folder = write_event_files(
        saved(
            keras(0, 10.0, 4.0, 1, 5), keras(1, 10.5, 2.0, 1, 5), keras(0, 12.0, 3.0, 1), keras(1, 12.0, 1.0, 1),
            keras(0, 14.0, 2.0, 2, 5), keras(0, 16.0, 1.0, 2), keras(1, 16.5, 0.5, 2),
        )
    )  # fmt: skip
    found = read_back(folder)
    assert sorted(found) == ["mean", "rank-0", "rank-1"]
    assert found["rank-0"] == {
        "loss": [(5, 10.0, 4.0), (15, 14.0, 2.0)],
        "epoch/loss": [(1, 12.0, 3.0), (2, 16.0, 1.0)],
        "epoch/val_loss": [(1, 12.0, 4.0), (2, 16.0, 2.0)],
    }
    assert found["mean"]["loss"] == [(5, 10.5, 3.0)]
    assert found["mean"]["epoch/loss"] == [(1, 12.0, 2.0), (2, 16.5, 0.75)]


def test_counting_that_begins_anew_is_a_series_of_its_own():
    """Steps that are counted again after a restart form a separate series; a single rank has no mean."""
    reports = [events.Metrics({"loss": at}, step, time=float(at), rank=0) for at, step in enumerate((1, 2, 3, 2, 3))]
    found = read_back(write_event_files(saved(*reports)))
    assert [step for step, _, _ in found["rank-0"]["loss"]] == [1, 2, 3]
    assert [step for step, _, _ in found["rank-0-again-1"]["loss"]] == [2, 3]
    assert set(found) == {"rank-0", "rank-0-again-1"}


def test_reports_without_a_step_are_counted():
    """Reports without a step, as from log(loss=…), are numbered."""
    found = scalars(
        [events.Metrics({"loss": 3.0}, time=1.0, rank=0), events.Metrics({"loss": float("nan")}, time=2.0, rank=0)]
    )
    assert [(each.step, each.tag) for each in found] == [(1, "loss"), (2, "loss")]


def test_written_anew_each_time():
    """Files of an earlier call are replaced, and nothing else is left in the run's folder."""
    path = saved(keras(0, 1.0, 1.0, 1))
    write_event_files(path)
    folder = write_event_files(path)
    assert [len(list(series.iterdir())) for series in folder.iterdir()] == [1]
    assert [each.name for each in path.iterdir() if "tensorboard" in each.name] == ["tensorboard"]


def test_all_or_nothing(monkeypatch):
    """If the disk is full, the earlier files stay, and no new ones are left."""
    import tensorboard.summary.writer.event_file_writer as writers

    path = saved(keras(0, 1.0, 1.0, 1), keras(1, 1.0, 1.0, 1))
    before = read_back(write_event_files(path))

    def full(self, event):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writers.EventFileWriter, "add_event", full)
    with pytest.raises(DataError, match="No space left"):
        write_event_files(path)
    assert [each.name for each in path.iterdir() if "tensorboard" in each.name] == ["tensorboard"]
    assert read_back(path / "tensorboard") == before


def test_without_metrics_or_tensorboard(monkeypatch):
    """If a run has no metrics, or TensorBoard is missing, an error says so."""
    path = saved()
    with pytest.raises(DataError, match="no metrics"):
        write_event_files(path)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(OptionsError, match="pip install tensorboard"):
        write_event_files(path)
    assert not (path / "tensorboard").exists()


@pytest.mark.slow
@pytest.mark.extended("library", "the tests above read the files")
def test_tensorboard_itself_starts_and_reads_them():
    """TensorBoard starts even if its environment is not on PATH, and even if setuptools has no pkg_resources."""
    folder = write_event_files(saved(keras(0, 1.0, 1.0, 1), keras(0, 2.0, 0.5, 2)))
    needed = environment()
    command = [needed.pop("TENSORBOARD_BINARY", "tensorboard"), "--inspect", "--logdir", str(folder)]
    done = subprocess.run(command, env=os.environ | needed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "epoch/val_loss" in done.stdout


def test_in_a_terminal_the_command_is_printed(capsys):
    """The whole command is printed, quoted for a shell."""
    from sparkring.notebook.extension import MAGICS

    path = saved(keras(0, 1.0, 1.0, 1))
    MAGICS["runs"].run(None, f"{RUN} --tensorboard")
    assert capsys.readouterr().out.rstrip().endswith(f"tensorboard --logdir {path / 'tensorboard'}")


def test_without_a_name_the_last_run_with_metrics_is_shown(capsys):
    from sparkring.notebook.extension import MAGICS

    saved(run="2026-01-03_00-00-00_cccc")
    with pytest.raises(OptionsError, match=r"no saved run .*metrics: .*Keras"):
        MAGICS["runs"].run(None, "--tensorboard")
    saved(keras(0, 1.0, 1.0, 1))
    path = saved(keras(0, 1.0, 1.0, 1), run="2026-01-02_00-00-00_bbbb")
    MAGICS["runs"].run(None, "--tensorboard")
    assert capsys.readouterr().out.rstrip().endswith(f"tensorboard --logdir {path / 'tensorboard'}")
