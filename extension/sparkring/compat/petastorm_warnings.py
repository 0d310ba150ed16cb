"""Hides warnings about deprecated functions that Petastorm calls. Otherwise each reader would show some forty lines.

These warnings are not about the user's code, and the user cannot do anything about them. Petastorm's own warnings
(UserWarning) are shown. This module does not import Petastorm, because every rank imports this module.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from typing import Any

# The modules of a reader's workers. If the workers are processes, they inherit filters only from PYTHONWARNINGS.
_WORKERS = ("petastorm.arrow_reader_worker", "petastorm.py_dict_reader_worker", "petastorm.fs_utils", "petastorm.utils")
# Messages of Petastorm's Spark converter that begin with one of these strings are hidden.
_TOLD_ANYWAY = ("Converting floating-point columns to", "The median size ")


def silence() -> None:
    """Hide the warnings in this process and in the processes that it starts. A second call changes nothing."""
    for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"(sparkring\.data\.)?petastorm")
    warnings.filterwarnings("ignore", message="The given NumPy array is not writ", module=r"petastorm\.pytorch")
    # The next two filters hide warnings about modules of other packages that Petastorm 0.12 imports.
    warnings.filterwarnings("ignore", message=r"pkg_resources is deprecated", category=UserWarning)
    warnings.filterwarnings("ignore", message=r"pyarrow\.\w+ (is|was) deprecated", category=FutureWarning)
    entries = [entry for entry in os.environ.get("PYTHONWARNINGS", "").split(",") if entry]
    ours = [f"ignore::FutureWarning:{module}" for module in _WORKERS]
    os.environ["PYTHONWARNINGS"] = ",".join(entries + [entry for entry in ours if entry not in entries])
    import logging  # not at the top, since every rank imports this module; Petastorm imports logging anyway

    atexit.unregister(_let_functions_go)
    atexit.register(_let_functions_go)
    logging.getLogger("tensorflow").addFilter(_not_of_petastorm)
    logging.getLogger("petastorm.spark.spark_dataset_converter").addFilter(_not_told_anyway)


def silence_when_imported() -> None:
    """Call silence() when this process imports Petastorm. Until then, this costs nothing."""
    if not any(isinstance(finder, _PetastormFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PetastormFinder())


class _PetastormFinder:
    """A finder that finds nothing, but notices an import of Petastorm, since Python asks it first."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "petastorm":
            silence()


def _let_functions_go() -> None:
    """Remove the destructor of TensorFlow's functions, which may need modules that are gone while Python exits."""
    module: Any = sys.modules.get("tensorflow.python.eager.polymorphic_function.atomic_function")
    if hasattr(getattr(module, "AtomicFunction", None), "__del__"):
        del module.AtomicFunction.__del__


def _not_of_petastorm(record: Any) -> bool:
    """Return false for a warning from TensorFlow about a deprecated call in Petastorm's code."""
    return "petastorm" not in str(record.args[0] if record.args else "")


def _not_told_anyway(record: Any) -> bool:
    # If a reader has no shard, Petastorm cannot format its warning about it; sparkring has a notice of its own.
    no_shard = None in (record.args or ()) and str(record.msg).startswith("The petastorm reader arguments cur_shard")
    return not no_shard and not str(record.msg).startswith(_TOLD_ANYWAY)
