"""Processes that a rank starts can use the functions and classes of the notebook and of the cell."""

from __future__ import annotations

import builtins
from typing import Any


def test_processes_of_a_rank_see_its_functions_and_classes(local):
    """Child processes know the definitions of the notebook and of the cell, under spawn and under forkserver.

    If a function cannot be sent, an error is raised, and no Pool hangs.
    """
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    source = """
import threading
factor = 10
lock = threading.Lock()
class Point:
    def __init__(self, x): self.x = x
def scaled(point): return Point(factor * point.x)
"""
    exec(source, namespace)
    result = local.run(
        """
        import multiprocessing, threading

        mine = threading.Lock()
        def here(x): return scaled(Point(x)).x + 1
        def locked(x): return mine
        def nested(x):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                return pool.map(here, [x])

        found = []
        for method, function in (("spawn", nested), ("forkserver", here)):
            context = multiprocessing.get_context(method)
            with context.Pool(1) as pool:
                (made,) = pool.map(scaled, [Point(2)])
                found.append((type(made) is Point, made.x, pool.map(here, [3])))
                try:
                    pool.map(locked, [1])
                except Exception as error:
                    found.append(str(error))
            class Process(context.Process):  # its children have children, so it must not be a daemon
                def run(self): self._args[0].put(function(4))
            queue = context.SimpleQueue()
            process = Process(args=(queue,))
            process.start()
            found.append(queue.get())
            process.join()
        found
        """,
        n=1,
        namespace=namespace,
    )
    told = "`locked` cannot be used in a process that a rank starts: `locked` uses the notebook's `mine`, a"
    spawned, problem, nested, forked, problem_again, one = result.value
    assert spawned == forked == (True, 20, [31])
    assert problem.startswith(told)
    assert problem == problem_again
    assert (nested, one) == ([41], 41)
