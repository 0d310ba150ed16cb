"""What `%load_ext sparkring` adds to the start of IPython."""

from __future__ import annotations

import functools
import subprocess
import sys
import time

from harness import US, Effort, Goal, Measured, Row, Series, Turns

BARE = "from IPython.core.interactiveshell import InteractiveShell; shell = InteractiveShell.instance()"
LOADED = BARE + "; shell.run_line_magic('load_ext', 'sparkring')"


def extension(effort: Effort) -> list[Row]:
    turns = Turns(
        2 * effort.runs,
        {US: functools.partial(_seconds, LOADED), "IPython alone": functools.partial(_seconds, BARE)},
    )
    pairs = zip(turns.series("total").values, turns.series("total", "IPython alone").values, strict=True)
    added = Series(tuple(loaded - bare for loaded, bare in pairs))
    return [
        turns.row("IPython with the extension loaded: start to end", "s", "total", "IPython alone"),
        Row("what %load_ext sparkring adds to that", "s", added, goal=Goal(0.3)),
    ]


def _seconds(code: str) -> Measured:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return {"total": time.perf_counter() - begun}
