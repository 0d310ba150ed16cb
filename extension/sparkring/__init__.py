"""sparkring runs a notebook cell as a ring of ranks.

    %load_ext sparkring

    %%horovod -n -2
    import horovod.tensorflow.keras as hvd
    hvd.init()

Each public name is imported from its module when it is first used. This keeps `import sparkring` fast on the driver and
on the ranks.
"""

from __future__ import annotations

import sys
from typing import Any

if sys.platform == "win32":
    raise ImportError("sparkring runs on Linux and macOS: on Windows, install it in WSL2 and run the notebook there.")

# isort: off
# The products; each is one line, which can be removed. Type checkers see here the names that a product brings. When
# Python runs the line, it imports no names: the product's __init__ only says which there are.
from sparkring.engine.run import *
from sparkring.engine.foreach import *
from sparkring.engine.search import *
from sparkring.engine.stream import *
from sparkring.engine.predictions import *
from sparkring.engine.doctor import *

# isort: on
from sparkring.products import HOMES as _HOMES

__version__ = "0.2.0"
__all__ = sorted([*_HOMES.keys() - {"last_result"}, "load_ipython_extension"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sparkring.runtime.packages import require

    return getattr(require(_HOMES[name], f"{__name__}.{name}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def load_ipython_extension(ipython: Any) -> None:
    """Register the magics and their completion, and make `import sparkdl` work. `%load_ext sparkring` calls this."""
    from sparkring.notebook import extension

    extension.load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Remove the magics, and end the runs and gangs that they have started. `%unload_ext sparkring` calls this."""
    from sparkring.notebook import extension

    extension.unload(ipython)
