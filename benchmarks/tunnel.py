"""What it costs that messages go through Spark jobs, because executors cannot reach the notebook."""

from __future__ import annotations

import _thread
import contextlib
import statistics
import threading
import time
from collections.abc import Callable
from unittest import mock

from harness import US, Effort, Measured, Row, Turns, on_gang, run, run_cell, spark_session

from sparkring.cluster.base import Address
from sparkring.cluster.classic import Classic
from sparkring.views import Quiet

DIRECT = f"{US}, directly"
FIGURES = {
    "a cell on new ranks": ("s", "launch"),
    "a warm cell": ("s", "warm"),
    "lines that a warm cell prints": ("lines/s", "lines"),
    "Stop of a warm cell": ("s", "stop"),
}
AFTER_S = 2.0  # Stop comes so long after the beginning of the cell


def ways(effort: Effort) -> list[Row]:
    spark_session()
    # Nobody answers at the other address.
    turns = Turns(
        effort.runs, {DIRECT: lambda: _measured(effort, "127.0.0.1"), US: lambda: _measured(effort, "127.0.0.2")}
    )
    what = "2 Spark tasks whose messages go through Spark jobs: {}"
    return [turns.row(what.format(name), unit, key, DIRECT) for name, (unit, key) in FIGURES.items()]


def _measured(effort: Effort, host: str) -> Measured:
    with mock.patch.object(Classic, "address", return_value=Address(host, "127.0.0.1", 0)):
        run("1", 2, Quiet(), framework="plain")  # the first launch finds out whether executors can connect
        launch_s = _seconds(lambda: run("1", 2, Quiet(), framework="plain"))
        with on_gang(2):
            cells = [_seconds(lambda: run_cell("%%horovod -n 2\n1")) for _ in range(5 if effort.quick else 20)]
            count = 10_000 if effort.quick else 100_000
            lines_s = _seconds(lambda: run_cell(f"%%horovod -n 2\nfor i in range({count}):\n    print('line', i)"))
            stopped_at = []

            def stop() -> None:
                time.sleep(AFTER_S)
                stopped_at.append(time.perf_counter())
                _thread.interrupt_main()

            threading.Thread(target=stop).start()
            with contextlib.suppress(KeyboardInterrupt):
                run_cell("%%horovod -n 2\nimport time\ntime.sleep(1000)")
            stop_s = time.perf_counter() - stopped_at[0]
    return {"launch": launch_s, "warm": statistics.median(cells), "lines": 2 * count / lines_s, "stop": stop_s}


def _seconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun
