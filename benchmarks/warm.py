"""What cells, values and printed lines cost on a warm gang, compared with ipyparallel's engines."""

from __future__ import annotations

import contextlib
import functools
import io
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from harness import (
    ARRAY_MB,
    US,
    Case,
    Effort,
    Goal,
    Kernel,
    Measured,
    Row,
    Turns,
    cell,
    new_array,
    notebook,
    on_gang,
    run_cell,
    spark_session,
)
from peers import Engines, torch_distributor_sum

ON_SPARK, PX = f"{US} on Spark", "%%px --stream"
RANKS = 2
FASTER = Goal(0.7, ratio=True)
NO_SLOWER = Goal(1.0, at_least=True, ratio=True)
MOVED = Goal(500, at_least=True)
COLD, WARM = Goal(0.6, ratio=True), Goal(0.02, ratio=True)
CELLS = {"bind": "x = 1", "print": "print(1)"}


# ── Cells ─────────────────────────────────────────────────────────────────────


def cells(effort: Effort) -> list[Row]:
    spark_session()
    with both_gangs(), contextlib.closing(Engines()) as engines:
        times = functools.partial(_medians, 30 if effort.quick else 300)
        turns = Turns(
            effort.runs,
            {
                US: lambda: times("%%horovod -n -2", run_cell),
                PX: lambda: times(engines.magic(), run_cell),
                ON_SPARK: lambda: times("%%horovod -n 2", run_cell),
            },
        )
    rows = []
    for key, source in CELLS.items():
        what = f"warm cell `{source}`, 2 {{}}"
        rows += [
            turns.row(what.format("local ranks"), "ms", key, PX, goal=FASTER),
            turns.row(what.format("Spark tasks"), "ms", key, PX, us=ON_SPARK, goal=FASTER),
        ]
    return rows


def kernel_cells(effort: Effort) -> list[Row]:
    with Kernel() as kernel:
        kernel.run("%load_ext sparkring\n%gang start -n -2")
        kernel.run("import ipyparallel\ncluster = ipyparallel.Cluster(n=2, log_level=40)")
        kernel.run("cluster.start_cluster_sync(); client = cluster.connect_client_sync()")
        kernel.run("client.wait_for_engines(2); client.activate()")
        times = functools.partial(_medians, 30 if effort.quick else 300)
        turns = Turns(
            effort.runs,
            {US: lambda: times("%%horovod", kernel.run), PX: lambda: times("%%px --stream", kernel.run)},
        )
        kernel.run("%gang stop\ncluster.stop_cluster_sync()")
    return [
        turns.row(f"warm cell `{source}`, 2 local ranks, in a notebook's kernel", "ms", key, PX)
        for key, source in CELLS.items()
    ]


def _medians(count: int, magic: str, run: Callable[[str], Any]) -> Measured:
    """Return the median number of milliseconds that each of CELLS takes."""
    found = {}
    for key, source in CELLS.items():
        seconds = []
        for _ in range(count):
            begun = time.perf_counter()
            run(f"{magic}\n{source}")
            seconds.append(time.perf_counter() - begun)
        found[key] = 1000 * statistics.median(seconds)
    return found


# ── Values and lines ──────────────────────────────────────────────────────────


def arrays(effort: Effort) -> list[Row]:
    spark_session()
    with both_gangs(), contextlib.closing(Engines()) as engines:
        turns = Turns(
            effort.runs,
            {
                US: lambda: _array(-2),
                "ipyparallel": engines.array,
                ON_SPARK: lambda: _array(2),
            },
        )
    rows = []
    for key, way in (("push", "to 2 {}, which a warm cell reads"), ("pull", "from one of 2 {}, with --pull")):
        what = f"an array of {ARRAY_MB} MB {way}"
        rows += [
            turns.row(what.format("local ranks"), "MB/s", key, "ipyparallel", goal=MOVED),
            turns.row(what.format("Spark tasks"), "MB/s", key, "ipyparallel", us=ON_SPARK, goal=MOVED),
        ]
    return rows


def _array(np: int) -> Measured:
    names = notebook().user_ns
    names["sent"] = array = new_array()
    begun = time.perf_counter()
    found = run_cell(f"%%horovod -n {np}\nfloat(sent[-1])")
    pushed = time.perf_counter()
    assert found.values == [array[-1]] * RANKS
    run_cell(f"%%horovod -n {np}\nmade = sent + 1")
    pull = time.perf_counter()
    run_cell(f"%%horovod -n {np} --pull made\npass")
    pulled = time.perf_counter()
    assert names.pop("made")[-1] == array[-1] + 1
    return {"push": ARRAY_MB / (pushed - begun), "pull": ARRAY_MB / (pulled - pull)}


def lines(effort: Effort) -> list[Row]:
    count = 20_000 if effort.quick else 200_000
    source = f'for i in range({count}):\n    print("line", i)'
    with on_gang(-2), contextlib.closing(Engines()) as engines:
        turns = Turns(
            effort.runs,
            {
                US: lambda: _lines(f"%%horovod\n{source}", RANKS * count),
                PX: lambda: _lines(f"{engines.magic()}\n{source}", RANKS * count),
            },
        )
    what = f"{RANKS} × {count:,} lines printed by a warm cell"
    return [
        turns.row(f"{what}: start to end", "lines/s", "speed", PX, goal=NO_SLOWER),
        turns.row(f"{what}: lost", "lines", "lost", goal=Goal(0)),
    ]


def _lines(source: str, count: int) -> Measured:
    shown = io.StringIO()
    begun = time.perf_counter()
    found = run_cell(source, shown)
    seconds = time.perf_counter() - begun
    # sparkring's view shows only the last lines of a burst; the logs have all lines.
    said = "".join(found.logs(rank) for rank in range(RANKS)) if found is not None else shown.getvalue()
    return {"speed": count / seconds, "lost": count - said.count("line ")}


# ── PyTorch ───────────────────────────────────────────────────────────────────


def torch(effort: Effort) -> list[Row]:
    spark_session()
    rows = []
    for where, np, peer in (("local ranks", -2, "TorchDistributor, local"), ("Spark tasks", 2, "TorchDistributor")):
        cases: dict[str, Case] = {
            US: functools.partial(_torchrun, np),
            f"{US}, warm": functools.partial(_torch_warm, np),
            peer: functools.partial(torch_distributor_sum, local=np < 0),
        }
        turns = Turns(effort.runs, cases)
        what = f"function that joins torch.distributed and sums, 2 {where}"
        rows += [
            turns.row(f"{what}: %%torchrun, start to end", "s", "total", peer, goal=COLD),
            turns.row(
                f"{what}: the same on a warm gang, after the first", "s", "total", peer, us=f"{US}, warm", goal=WARM
            ),
        ]
    return rows


def _torchrun(np: int) -> Measured:
    begun = time.perf_counter()
    found = run_cell(f"%%torchrun -n {np}\n{cell('torch_sum')}\ntorch_sum()")
    seconds = time.perf_counter() - begun
    assert found.value == [RANKS] * 3
    return {"total": seconds}


def _torch_warm(np: int) -> Measured:
    with on_gang(np):
        _torchrun(np)
        # The median of several: if rank 1 happens to connect before rank 0 listens, torch waits about half a second.
        return {"total": statistics.median(_torchrun(np)["total"] for _ in range(10))}


# ── What they share ───────────────────────────────────────────────────────────


@contextlib.contextmanager
def both_gangs() -> Iterator[None]:
    with on_gang(-2), on_gang(2):
        yield
