"""The `__main__` of a process that a rank has started with `spawn` or `forkserver`: run by multiprocessing."""

from sparkring.worker import children

children.load(globals())
