"""How fast a large value comes back from a rank."""

from __future__ import annotations

import functools
import time

from harness import US, Effort, Measured, Row, Turns, run

from sparkring.views import Quiet


def large(effort: Effort) -> list[Row]:
    size_mb = 100 if effort.quick else 500
    turns = Turns(effort.runs, {US: functools.partial(_speed, size_mb)})
    return [turns.row(f"an array of {size_mb} MB from one local rank, to the end of the run", "MB/s", "speed")]


def _speed(size_mb: int) -> Measured:
    source = f"import time, numpy\nfound = numpy.ones({size_mb} * 125_000)\nprint(f'{{time.time():.6f}}')\nfound"
    result = run(source, -1, Quiet())
    ended = time.time()
    assert result.value.nbytes == size_mb * 1_000_000
    return {"speed": size_mb / (ended - float(result.logs(0)))}
