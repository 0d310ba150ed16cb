"""Launches and warm cells on Spark Connect, beside a classic session and pyspark's TorchDistributor on Spark Connect.

A process has either kind of session, so each session is in a process of its own, which runs this file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness import HERE, US, Effort, Goal, Measured, Row, Turns, cell, run_cell, say, spark_session
from peers import torch_distributor_sum

ON_CONNECT, CLASSIC, PEER = f"{US} on Spark Connect", f"{US}, classic session", "TorchDistributor on Spark Connect"
NEEDED = ("grpc_status", "google.rpc", "zstandard")  # what pyspark's client imports
ENVIRONMENT = HERE.parent / ".venv-current" / "bin" / "python"
AT_MOST_TWICE = Goal(2.0, ratio=True)
STARTS_S = 120.0
WARM_CELLS = 20


def sessions(effort: Effort) -> list[Row]:
    python = _python()
    where = "import pyspark; print(pyspark.__version__, pyspark.__path__[0])"
    answer = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout
    version, home = answer.strip().split(" ", 1)
    with _server(python, home) as url, _client(python, url) as connected, _client(python, "classic") as classic:
        for ask in (connected, classic):
            ask("launch")  # the first launch of a session sends the code of sparkring
        turns = Turns(
            effort.runs,
            {
                ON_CONNECT: lambda: connected("launch") | connected("warm"),
                CLASSIC: lambda: classic("launch") | classic("warm"),
                PEER: lambda: connected("distributor"),
            },
        )
    what = f"function that joins torch.distributed and sums, 2 tasks of Spark {version}"
    return [
        turns.row(f"{what}: %%torchrun, start to end", "s", "launch", CLASSIC, us=ON_CONNECT, goal=AT_MOST_TWICE),
        turns.row("… compared with TorchDistributor", "s", "launch", PEER, us=ON_CONNECT),
        turns.row(
            f"warm cell `1`, 2 tasks of Spark {version}", "ms", "warm", CLASSIC, us=ON_CONNECT, goal=AT_MOST_TWICE
        ),
    ]


def _python() -> str:
    """Return a Python that has what pyspark's client of Spark Connect needs."""
    with contextlib.suppress(ModuleNotFoundError):  # the package that would contain it is missing
        if all(map(importlib.util.find_spec, NEEDED)):
            return sys.executable
    if not ENVIRONMENT.exists():
        raise RuntimeError(f"Spark Connect needs {', '.join(NEEDED)}: run `make env-current`")
    return str(ENVIRONMENT)


@contextlib.contextmanager
def _server(python: str, home: str) -> Iterator[str]:
    """Start a server of Spark Connect on local[4], and yield its URL. `home` is the folder of pyspark."""
    say("starting a server of Spark Connect …")
    settings = {"spark.ui.enabled": "false", "spark.connect.grpc.binding.port": "0"}
    settings["spark.connect.grpc.binding.address"] = "127.0.0.1"
    options = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    main_class = "org.apache.spark.sql.connect.service.SparkConnectServer"
    environment = {**os.environ, "SPARK_HOME": home, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": python}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("wb") as file:
            command = [f"{home}/bin/spark-submit", "--master", "local[4]", *options, "--class", main_class]
            process = subprocess.Popen([*command, "spark-internal"], env=environment, stdout=file, stderr=file)
        try:
            until = time.monotonic() + STARTS_S
            while (started := re.search(r"server started at: (\S+)", log.read_text())) is None:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the server of Spark Connect did not start: {log.read_text()[-600:]}")
                time.sleep(0.1)
            yield f"sc://{started[1]}"
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def _client(python: str, session: str) -> Iterator[Callable[[str], Measured]]:
    """Start a process with a session, and yield a function that lets it measure one of CASES."""
    command = [python, __file__, session]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(name: str) -> Measured:
            print(name, file=process.stdin, flush=True)
            answer = process.stdout.readline()
            measured: Measured = json.loads(answer or '{"error": "the process with the session has ended"}')
            if "error" in measured:
                raise RuntimeError(measured["error"])
            return measured

        yield ask
        process.stdin.close()


def _launch() -> Measured:
    begun = time.perf_counter()
    done = run_cell(f"%%torchrun -n 2\n{cell('torch_sum')}\ntorch_sum()")
    seconds = time.perf_counter() - begun
    assert done.value == [2.0] * 3
    return {"launch": seconds}


def _warm() -> Measured:
    run_cell("%gang start -n 2 --framework torch")
    try:
        run_cell("%%torchrun -n 2\n1")
        cells = []
        for _ in range(WARM_CELLS):
            begun = time.perf_counter()
            run_cell("%%torchrun -n 2\n1")
            cells.append(time.perf_counter() - begun)
    finally:
        run_cell("%gang stop spark")
    return {"warm": 1000 * statistics.median(cells)}


def _distributor() -> Measured:
    return {"launch": torch_distributor_sum(local=False, connect=True)["total"]}


CASES = {"launch": _launch, "warm": _warm, "distributor": _distributor}


def main(session: str) -> None:
    """Measure what the lines of stdin name, with a session of Spark Connect or a classic one."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what sparkring, Spark and the peer print
    if session == "classic":
        spark_session()
    else:
        from pyspark.sql import SparkSession

        SparkSession.builder.remote(session).getOrCreate()
    for line in sys.stdin:
        try:
            answer: dict[str, object] = {**CASES[line.strip()]()}
        except Exception as error:  # the other process reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
