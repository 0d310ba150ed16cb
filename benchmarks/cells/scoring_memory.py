"""Measure the memory of all Python processes of Spark while 4 tasks predict: `scoring_memory.py sparkring|peer SIZE`.

SIZE is the number of the model's parameters, of 4 bytes each. Print the largest memory in MB. Memory that several
processes share is counted once (PSS).
"""

import contextlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import spark_session


def memory_mb() -> float:
    """Return the memory of Spark's Python processes, which are in other process groups than this process."""
    groups = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if process.name() != "java":
                groups.add(os.getpgid(process.pid))
    groups.discard(os.getpgid(0))
    total = 0.0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) in groups and process.name() != "java":
                total += process.memory_full_info().pss
    return total / 1e6


def most_mb(go: Callable[[], object]) -> float:
    """Return the largest memory while go() runs."""
    ended, most = threading.Event(), [0.0]

    def look() -> None:
        while not ended.wait(0.05):
            most[0] = max(most[0], memory_mb())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        go()
    finally:
        ended.set()
        looking.join()
    return most[0]


def main(contestant: str, size: int) -> float:
    session = spark_session()
    with tempfile.TemporaryDirectory() as folder:
        scored = predicted(session, contestant, f"{folder}/model.pt", size)
        found = most_mb(scored.write.format("noop").mode("overwrite").save)
    session.stop()
    return found


def predicted(session: Any, contestant: str, path: str, size: int) -> Any:
    import torch
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import DoubleType

    import sparkring

    torch.save(torch.ones(size), path)

    def make() -> Any:
        import time

        import torch

        weights = torch.load(path)

        def predict(x: Any) -> Any:
            time.sleep(0.02)  # so that all tasks run at the same time
            return x * float(weights[:1000].sum())

        return predict

    udf: Any = predict_batch_udf if contestant == "peer" else sparkring.predict_udf
    scored = udf(make, return_type=DoubleType(), batch_size=1000)
    return session.range(0, 400_000, 1, 4).select(scored("id"))


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
