"""Runs Spark jobs that end when the notebook is interrupted."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import TYPE_CHECKING, TypeVar

from sparkring.cluster.base import SERVER_LOST_S
from sparkring.runtime.interrupts import held_back

if TYPE_CHECKING:
    from sparkring.cluster.base import Cluster

Answer = TypeVar("Answer")
_FIRST_WORD_S, _RAREST_WORD_S = 1.0, 60.0  # the first and the longest time between two reports
_CANCEL_AGAIN_S, _LOOK_S = 0.2, 0.5


def interruptibly(
    cluster: Cluster,
    what: str,
    ask: Callable[[], Answer],
    say: Callable[[str], None] | None = None,
    limit_s: float = math.inf,
) -> Answer:
    """Return the result of ask(). An interrupt first ends the Spark jobs that `ask` has started, and is then raised.

    `what` is shown in Spark's UI. As long as `ask` runs, `say` reports progress at growing intervals. If `ask` takes
    longer than `limit_s`, its jobs are ended, too, and TimeoutError is raised.
    """
    group = f"sparkring-{uuid.uuid4().hex[:12]}"
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            cluster.begin_group(group, what)
            answer.set_result(ask())
        except Exception as error:  # raised again by result()
            answer.set_exception(error)

    thread = cluster.thread(run, "sparkring-job")
    started, pause_s = time.monotonic(), _FIRST_WORD_S
    next_word, deadline = started + pause_s, started + limit_s
    try:
        with held_back():  # an interrupt inside start() would leave jobs that nobody cancels
            thread.start()
        while True:
            try:
                return answer.result(max(0.0, min(_LOOK_S, deadline - time.monotonic())))
            except NotYet:
                if answer.done():  # `ask` itself raised a TimeoutError
                    raise
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{what} took longer than {limit_s:.0f} s") from None
                if not cluster.is_reachable(SERVER_LOST_S):
                    raise ConnectionError(f"{what}: the server of Spark Connect does not answer") from None
                if time.monotonic() < next_word:
                    continue
                if say:
                    say(f"{what}: {time.monotonic() - started:.0f} s{_tasks(cluster, group)} …")
                pause_s = min(2 * pause_s, _RAREST_WORD_S)
                next_word = time.monotonic() + pause_s
    except (KeyboardInterrupt, TimeoutError):
        # Cancel repeatedly: a cancellation misses jobs that have not begun yet.
        while thread.is_alive() and cluster.is_reachable() and not cluster.is_stopped():
            cluster.cancel(group)
            thread.join(_CANCEL_AGAIN_S)
        raise
    finally:
        thread.join(_CANCEL_AGAIN_S)  # for minutes, pyspark calls a server of Spark Connect that has gone


def _tasks(cluster: Cluster, group: str) -> str:
    """Return the progress of the group's jobs, such as ", 3 of 8 tasks"; '' if Spark does not know."""
    stages = [stage for number in cluster.stage_ids(group) if (stage := cluster.stage(number)) is not None]
    if not stages:
        return ""
    return f", {sum(stage.completed for stage in stages)} of {sum(stage.tasks for stage in stages)} tasks"
