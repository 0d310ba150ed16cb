"""The `__main__` that multiprocessing runs in a process that a rank has started with `spawn` or `forkserver`."""

from sparkring.worker.rank import children

children.load(globals())
