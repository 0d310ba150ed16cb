"""Records of every kind of run that a notebook can show. As in real runs, the records are computed from events."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sparkring.history.events import (
    AttemptEnded,
    AttemptStarted,
    BatchEnded,
    CapturedName,
    CheckpointDamaged,
    CheckpointSaved,
    CodeFrame,
    DataOpened,
    DataPlanned,
    DataRead,
    Event,
    Failure,
    GpuUsed,
    ItemEnded,
    ItemsPlanned,
    ItemStarted,
    Lateness,
    MemberJoined,
    Metrics,
    Notice,
    Output,
    Piece,
    RankExited,
    RankFailed,
    RankFinished,
    RankStarted,
    RankUsed,
    RunFinished,
    RunStarted,
    SearchBegan,
    Searched,
    SearchEnded,
    StreamBegan,
    TensorTimes,
    TimelineSaved,
    UserMessage,
)
from sparkring.history.record import RunRecord, replay

BEGAN = 1_700_000_000.0
NOW = BEGAN + 60
_CELL = "%%horovod -n -4\nimport horovod.tensorflow.keras as hvd\nmodel.fit(data, epochs=3)"
_NOISE = b"2026-01-01 12:00:00.1: I tensorflow/core/port.cc:1] oneDNN\n"


def _record(*events: Event, size: int = 4, up: bool = True, **fields: object) -> RunRecord:
    known = {
        "time": BEGAN,
        "run_id": "2026-11-20_14-03-22_a1b2",
        "title": "training",
        "code": _CELL,
        "size": size,
        "where": "local",
        "framework": "horovod",
        "logs": "all",
        "versions": (("python", "3.11"),),
        "captured": (
            CapturedName("images", "numpy.ndarray", 1_200_000, "by value"),
            CapturedName("lock", "_thread.lock", None, "cannot", "it is a lock", "Make it there"),
        ),
    }
    ranks = [RankStarted(BEGAN + 1, rank, f"node-{rank % 2}", 4000 + rank) for rank in range(size)] if up else []
    return replay([RunStarted(**{**known, **fields}), *ranks, *events], RunRecord(log_folder="/runs/a1b2"))


def _measured(size: int = 4, steps: int = 30) -> Iterator[Event]:
    for step in range(1, steps + 1):
        for rank in range(size):
            loss = math.exp(-step / 9) + rank / 40
            yield Metrics(
                {"loss": loss, "val_loss": loss * 1.2, "accuracy": 1 - loss / 2},
                step,
                1,
                40,
                3,
                time=BEGAN + 2 + step,
                rank=rank,
            )


def _printed(size: int = 4) -> Iterator[Event]:
    yield Output("stderr", _NOISE, time=BEGAN + 2, rank=0)
    for rank in range(size):
        colours = b" ".join(b"\x1b[3%dmcolour\x1b[0m" % colour for colour in range(8))
        yield Output(
            "stdout", b"the same everywhere\n" + b"of rank %d: %s\n" % (rank, colours), time=BEGAN + 3, rank=rank
        )
        yield Output(
            "stderr",
            b"a warning that is long enough to take more than one line " * 8 + b"\n",
            time=BEGAN + 4,
            rank=rank,
        )
        yield Output(
            "stdout", b"".join(b"line %d of %d\n" % (line, rank) for line in range(5)), time=BEGAN + 5, rank=rank
        )
    yield UserMessage("a message to the notebook", time=BEGAN + 6, rank=1)


def _reading(size: int = 4) -> Iterator[Event]:
    names = tuple((number, f"part-{number}.parquet") for number in range(4))
    for rank in range(size):
        yield DataOpened(
            0,
            "/data/digits",
            "parquet",
            ("a", "b"),
            "a > 3",
            "3f2a",
            8,
            32,
            40_000,
            4_000_000,
            256,
            time=BEGAN + 2,
            rank=rank,
        )
        yield DataPlanned(
            0, 1, pieces=tuple(Piece(at // 2, at % 2, 100) for at in range(8)), names=names, time=BEGAN + 3, rank=rank
        )
        yield DataRead(
            0,
            1,
            800 - 200 * rank,
            8,
            64_000,
            800,
            waited_s=9.0 if rank == 3 else 0.1,
            elapsed_s=10.0,
            place=f"part-{rank}.parquet, row group 1 of 4",
            time=NOW - 5,
            rank=rank,
        )


def _used(size: int = 4) -> Iterator[Event]:
    for at in range(5):
        for rank in range(size):
            yield RankUsed(90 + at + rank, (at + 10) * 10**8, 8, 64 * 10**9, time=BEGAN + 3 + 5 * at, rank=rank)


def _saved() -> Iterator[Event]:
    for step in range(1, 9):
        yield CheckpointSaved(
            "/ckpt/digits",
            str(step),
            10 * step,
            4_200_000,
            metrics={"loss": 1 / step},
            best=step == 7,
            time=BEGAN + 5 * step,
            rank=0,
        )
    yield CheckpointDamaged("/ckpt/digits", "8", 80, "rank-0.safetensors is cut", time=BEGAN + 46, rank=0)


def _ended(outcome: str = "finished", failed_rank: int | None = None, size: int = 4) -> list[Event]:
    ends = [RankFinished(NOW - 1, rank, "") for rank in range(size)] if outcome == "finished" else []
    return [*ends, RunFinished(NOW, outcome, "", failed_rank)]


_FAILURE = Failure("exception", "ValueError: shapes do not match", (CodeFrame("<cell>", 3, "<module>", True),))
_TIMELINE = TimelineSaved(
    BEGAN + 50,
    "timeline.json",
    123_456,
    20.0,
    8.0,
    1.0,
    0.5,
    3.0,
    7.5,
    42,
    2,
    (TensorTimes("allreduce.grad", 40, 8.0, 0.0, 0.5, 3.0), TensorTimes("broadcast.w", 2, 0.5)),
    (Lateness(1, 38, 6.0), Lateness(0, 2, 0.4)),
    problem="its end is missing",
)
_RESTARTED = [
    AttemptStarted(BEGAN, 1, 4),
    *_printed(),
    CheckpointSaved("/ckpt/digits", "1", 11, 9, time=BEGAN + 9, rank=0),
    RankFailed(BEGAN + 11.52, 1, Failure("signal", "killed by SIGKILL")),
    AttemptEnded(BEGAN + 11.52, 1, "rank 1 was killed by SIGKILL", 1),
    AttemptStarted(BEGAN + 12, 2, 4, "1", 11),
    *(RankStarted(BEGAN + 13, rank, "node-0", 4100 + rank) for rank in range(4)),
    *_measured(),
    CheckpointSaved("/ckpt/digits", "2", 20, 9, time=BEGAN + 30, rank=0),
]
_SPACE = (Searched("lr", 1e-4, 1e-1, log=True), Searched("width", choices=("64", "128")))


def _items(*, search: bool) -> list[Event]:
    """Return the events of twenty items with curves. Three of the items failed or, in a search, were pruned."""
    found: list[Event] = [
        ItemsPlanned(BEGAN, 2, 1, 20),
        *([SearchBegan(BEGAN, "loss", "min", _SPACE)] if search else []),
    ]
    for item in range(20):
        time, bad = BEGAN + 2 * item + 2, item in (3, 8, 13)
        parameters = {"lr": 10 ** -(1 + item % 4), "width": 64 * (1 + item % 2)} if search else {}
        found.append(ItemStarted(time, item, f"store='store {item}'", 0, parameters=parameters))
        for step in range(1, 10):
            found.append(Metrics({"loss": math.exp(-step / 9) + item / 40}, step=step, time=time, rank=0))
        ending = "finished" if not bad else "pruned" if search else "failed"
        found.append(ItemEnded(time + 1, item, ending, "Model()", _FAILURE if ending == "failed" else None))
    return [*found, *([SearchEnded(NOW, {"lr": 0.75, "width": 0.25})] if search else [])]


def _batches() -> Iterator[Event]:
    """Yield the events of forty batches of a stream. New ranks have trained on two of them again."""
    yield StreamBegan(BEGAN + 1, "`sensors`", ("model", "optimizer"), None, 5)
    for batch in range(40):
        time = BEGAN + 2 + batch
        for rank in range(2):
            yield Metrics({"loss": math.exp(-batch / 9) + rank / 40}, step=batch, time=time, rank=rank)
        saved, how = batch % 5 == 4, "replayed" if batch in (20, 21) else "trained"
        if saved:
            yield CheckpointSaved("/ckpt/live", str(batch), batch, 4_200_000, time=time, rank=0)
        saving_s = 0.08 if saved else 0.0
        yield BatchEnded(time, batch, 640 + batch, how, 0.5, 0.02, 0.01, 0.3, saving_s, saved, 5_000 + 40 * batch)


_MANY = [RankFailed(NOW - 2, 700, _FAILURE), *(RankExited(NOW - 1, rank) for rank in range(690, 700))]

RECORDS: dict[str, RunRecord] = {
    "starting": _record(MemberJoined(BEGAN + 1, 0, "h"), Notice(BEGAN + 2, "waiting for slots"), up=False),
    "running": _record(
        *_printed(),
        *_measured(),
        *_reading(),
        *_saved(),
        GpuUsed("0", "NVIDIA H200", 10**9, 10**11, 80, time=BEGAN + 3, rank=0),
        *_used(),
    ),
    "finished": _record(*_printed(), *_measured(), *_reading(), *_saved(), *_ended()),
    "failed": _record(
        *_printed(), *_measured(), RankFailed(NOW - 1, 1, _FAILURE), RankExited(NOW - 1, 0), *_ended("failed", 1)
    ),
    "interrupted": _record(*_printed(), *_ended("interrupted"), ranks=(0, 1, 2)),
    "restarted": _record(*_RESTARTED, *_ended()),
    "timeline": _record(_TIMELINE, *_ended()),
    "items": _record(*_items(search=False), RunFinished(NOW, "failed", "17 of 20 items finished · 3 failed"), size=2),
    "search": _record(*_items(search=True), RunFinished(NOW, "finished"), size=2),
    "stream": _record(*_batches(), *_ended(size=2), size=2, warm=True, checkpoint_dir="/ckpt/live"),
    "many": _record(*_MANY, *_ended("failed", 700, 1024), size=1024),
    "quick": _record(
        Output("stdout", b"hello\n", time=BEGAN + 0.1, rank=1), RunFinished(BEGAN + 0.2, "finished"), warm=True
    ),
}
