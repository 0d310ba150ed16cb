"""Ends the process of a rank.

Python's own exit takes all modules apart. After a framework has been imported, this takes a second, although the system
frees the memory anyway, and every launch would have to wait for it.
"""

from __future__ import annotations

import _io
import atexit
import contextlib
import ctypes
import gc
import os
import sys
import threading
from typing import Any

from sparkring.worker.member import streams
from sparkring.worker.rank.own_modules import own_modules


def leave(code: int) -> int:
    """Do what Python does at its exit, and exit with `code`, but take apart only `__main__` and the user's own modules.

    The user's threads end, the functions that were registered with atexit run, the user's objects are deleted, and
    buffers are written to files. If only Python's own exit is safe, return `code`.
    """
    if "tensorflow" in sys.modules and "TF_CONFIG" in os.environ:  # TensorFlow leaves the other ranks in an orderly way
        gc.freeze()  # skips the collection of garbage, which would take most of the time
        return code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    threading.excepthook = _ignore  # the user's daemon threads go on, and may miss what is deleted now
    for module in (sys.modules.get("__main__"), *own_modules()):
        _delete_all(getattr(module, "__dict__", {}))
    summaries = sys.modules.get("tensorflow.python.ops.summary_ops_v2")
    if summaries is not None:
        summaries.flush()  # the default writer, which belongs to TensorFlow
    _write_buffers()
    os._exit(code)


def _delete_all(namespace: dict[str, Any]) -> None:
    """Delete the newest objects first, since the code that runs when they are deleted may need the older ones."""
    for name in reversed([name for name in namespace if not name.startswith("__")]):
        namespace.pop(name, None)


def _write_buffers() -> None:
    """Write what Python's files and C's streams have buffered."""
    for value in gc.get_objects():
        if issubclass(type(value), _io._IOBase):
            with contextlib.suppress(Exception):  # it is closed, or its class is the user's
                value.flush()
    streams.flush()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


def _ignore(_: object) -> None:
    pass
