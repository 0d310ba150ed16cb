"""Becomes `__main__` in a process that a rank has started with multiprocessing's `spawn` or `forkserver`."""

from sparkring.worker.rank import children

children.load(globals())
