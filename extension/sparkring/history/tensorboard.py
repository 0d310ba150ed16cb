"""Writes a saved run's metrics as TensorBoard's event files: a series for each rank, and a series for the mean."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from sparkring.errors import DataError, OptionsError
from sparkring.history import run_store
from sparkring.history.epoch_steps import with_report
from sparkring.history.events import AttemptStarted, Metrics
from sparkring.history.metrics import placed
from sparkring.runtime.packages import require

FOLDER = "tensorboard"
_ADVICE = "Keras' fit reports them automatically; other code reports them with sparkring.log(loss=…)."


def environment() -> dict[str, str]:
    """Return the environment variables that TensorBoard needs when it is started with this Python.

    TENSORBOARD_BINARY is the path of TensorBoard's program. The variable is set only if the program is not on the PATH.
    TensorBoard imports pkg_resources. If pkg_resources is not installed, PYTHONPATH adds a replacement for it.
    """
    variables = {}
    beside = Path(sys.executable).with_name("tensorboard")
    if shutil.which("tensorboard") is None and beside.exists():  # the programs beside Python may not be on the PATH
        variables["TENSORBOARD_BINARY"] = str(beside)
    if importlib.util.find_spec("pkg_resources") is None:
        folder = str(Path(__file__).parents[1] / "compat" / "beside_tensorboard")
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    return variables


@contextlib.contextmanager
def environment_set() -> Iterator[None]:
    """Set the variables of environment() in this process while it starts TensorBoard, and restore them afterwards."""
    needed = environment()
    before = {name: os.environ.get(name) for name in needed}
    try:
        os.environ.update(needed)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def shell_command(folder: Path) -> str:
    """Return the shell command that starts TensorBoard with the event files in `folder`."""
    needed = environment()
    command = needed.pop("TENSORBOARD_BINARY", "tensorboard")
    settings = [f"{name}={shlex.quote(value)}" for name, value in needed.items()]
    return " ".join([*settings, shlex.quote(command), "--logdir", shlex.quote(str(folder))])


class Scalar(NamedTuple):
    """One point of a curve. `series` is the name of the curve's folder, and `time` is in Unix seconds."""

    series: str
    tag: str
    step: int
    time: float
    value: float


def last_with_metrics() -> Path:
    """Return the newest saved run that has metrics; raise OptionsError if none has."""
    for run in run_store.saved():
        with contextlib.suppress(FileNotFoundError):  # another kernel has removed the run
            if next(run_store.events_of_kind(run, Metrics), None) is not None:
                return run
    raise OptionsError(f"no saved run has metrics: {_ADVICE}")


def write_event_files(run: Path) -> Path:
    """Write event files with the metrics of the saved run `run`, and return their folder.

    Incomplete files are never left in this folder. Raise OptionsError if TensorBoard is not installed, and DataError if
    there are no metrics or writing fails.
    """
    require("tensorboard", "--tensorboard")
    began = [attempt.time for attempt in run_store.events_of_kind(run, AttemptStarted)]
    points = scalars(run_store.events_of_kind(run, Metrics), began[1:])
    if not points:
        raise DataError(f"run {run.name} has no metrics: {_ADVICE}")
    folder, new = run / FOLDER, run / f"{FOLDER}.{secrets.token_hex(4)}"
    try:
        _write(new, points)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    except OSError as error:
        raise DataError(f"TensorBoard's files cannot be written in {folder}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return folder


def scalars(reports: Iterable[Metrics], restarts: Sequence[float] = ()) -> list[Scalar]:
    """Return every value that was reported, and the means over the ranks.

    A metric's mean at a step is returned only if every rank that reports metrics has a value of the metric there.

    Values that were reported at the end of an epoch have tags that begin with `epoch/`, and their step is the epoch.
    The steps of other values are counted through all epochs if the number of steps per epoch is known. If counting
    starts over (after a restart, or because fit() is called again), a new series begins.
    """
    every = [*_within_epochs(reports)]
    first = min((report.epoch for report in every if report.epoch is not None), default=1)
    by = "epoch" if any(report.epoch is not None for report in every) else "step"
    points: list[Scalar] = []
    means: dict[tuple[int, str, int], list[Scalar]] = {}
    for (attempt, lap, at), report in placed(every, restarts, by):
        lap += attempt
        ends = by == "epoch" and (report.ends_epoch or report.step is None)
        step = at if ends or by == "step" else _step(report, min(first, 1))
        for name, value in report.values.items():
            tag = f"epoch/{name}" if ends else name
            scalar = Scalar(_series(f"rank-{report.rank}", lap), tag, step, report.time, float(value))
            points.append(scalar)
            means.setdefault((lap, tag, step), []).append(scalar)
    ranks = len({report.rank for report in every})
    points += [
        Scalar(_series("mean", lap), tag, step, max(point.time for point in those), _mean(those))
        for (lap, tag, step), those in means.items()
        if ranks > 1 and len({point.series for point in those}) == ranks
    ]
    return points


def _within_epochs(reports: Iterable[Metrics]) -> Iterator[Metrics]:
    """Yield each report with its step counted within the epoch, as in a record."""
    first: list[Metrics] = []
    last: dict[int, Metrics] = {}
    for report in reports:
        before = [last[report.rank]] if report.rank in last else []
        new_report = with_report([*first, *before], report)[-1]
        if new_report.epoch is not None and not first:
            first = [new_report]
        if new_report.steps or new_report.ends_epoch:
            last[new_report.rank] = new_report
        yield new_report


def _step(report: Metrics, first: int) -> int:
    """Return the report's step, counted through all epochs if the number of steps per epoch is known.

    `first` is the number of the first epoch.
    """
    assert report.step is not None
    return report.step + (0 if report.epoch is None else report.epoch - first) * (report.steps or 0)


def _series(name: str, lap: int) -> str:
    return name if lap == 1 else f"{name}-again-{lap - 1}"


def _mean(those: list[Scalar]) -> float:
    last = {scalar.series: scalar.value for scalar in those}  # only the last value of each rank counts
    return math.fsum(last.values()) / len(last) if all(map(math.isfinite, last.values())) else math.nan


def _write(folder: Path, points: list[Scalar]) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    by_series: dict[str, list[Scalar]] = {}
    for point in points:
        by_series.setdefault(point.series, []).append(point)
    for series, those in by_series.items():
        writer = EventFileWriter(str(folder / series))
        try:
            for point in those:
                value = Summary.Value(tag=point.tag, simple_value=point.value)
                writer.add_event(Event(wall_time=point.time, step=point.step, summary=Summary(value=[value])))
        finally:
            writer.close()
