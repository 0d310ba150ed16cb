"""`make docs` runs this script. It writes docs/reference.md from the magics' help and the docstrings.

With the path of a file as its argument, it writes the page to that file.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sparkring
from sparkring import errors, ml
from sparkring.checkpointing.store import Store
from sparkring.data import petastorm, tfrecord
from sparkring.data.petastorm import converter, readers
from sparkring.data.shards import Shards

FILE = Path(__file__).with_name("reference.md")
HEAD = """# Reference

`make docs` generates this page from the docstrings and the magics' help (`%%horovod?`). Make any changes there.

[Magics](#magics) · [Python](#python) · [Shards](#shards) · [Checkpoints](#checkpoints) · [Petastorm](#petastorm) ·
[TFRecord](#tfrecord) · [Estimators](#estimators) · [Errors](#errors) · [Settings](#settings)
"""
# These are taken from the modules that define them, which can be imported even if Petastorm is not installed.
PETASTORM = (
    readers.make_reader,
    readers.make_batch_reader,
    converter.make_spark_converter,
    converter.SparkDatasetConverter,
    readers.check_transform,
)
# Users create objects of these classes, so the page shows what the classes take as arguments. Objects of the other
# classes are returned by functions.
MADE_BY_USERS = {
    "HorovodRunner",
    "KerasEstimator",
    "MirroredStrategyRunner",
    "TorchDistributor",
    "TorchEstimator",
}
# Methods that the page leaves out: their names have no underscore, but only other modules of the package call them.
INSIDE = {"check", "taking", "batches", "chunks", "ended", "handed_out", "read", "saves_in"}
SETTINGS = {
    "SPARKRING_HOME": "The folder for runs, which are saved in its subfolder `runs`. Default: `sparkring` in your data "
    "folder.",
    "SPARKRING_CACHE": "The folder for the cache of Spark DataFrames, which `shards(…)` writes to its subfolder "
    "`dataframes`. Default: `sparkring` in your cache folder; on Databricks, `dbfs:/tmp/sparkring/<you>`.",
    "SPARKRING_DBFS_ROOT": "The folder that `dbfs:/` refers to. Default: the mount `/dbfs` if it exists, otherwise "
    "`sparkring/dbfs` in your data folder.",
    "SPARKRING_PANEL": "`0` means the same as `SPARKRING_VIEW=static`.",
    "SPARKRING_VIEW": "How a run is shown: `live` (the panel), `static` (HTML, redrawn during the run) or `text`.",
    "SPARKRING_KEEP_RUNS": "How many [runs are kept](panel.md#what-is-kept-and-where). Default: 100.",
    "SPARKRING_KEEP_RUN_MB": "How many megabytes the logs of one run may have before their middle is left out. "
    "Default: 200.",
    "SPARKRING_KEEP_GB": "How many gigabytes all runs together may have before the oldest are removed. Default: 10.",
    "SPARKRING_SPARE": "`0` turns [spare processes](cells.md#spare-processes) off.",
    "SPARKRING_RANK": 'The rank. Set on the ranks of `%%barrier` and of `framework="plain"`.',
    "SPARKRING_SIZE": "The number of ranks. Set on the same ranks.",
    "spark.sparkring.driver.port": "A setting of the SparkSession: the port on which the driver listens, "
    "for all gangs, predictions and `%doctor`. Default: any free port.",
    "spark.sparkring.driver.host": "A setting of a session of Spark Connect, also by `spark.conf.set()`: the address "
    "at which executors reach the notebook. Default: this machine's address on the way to the server.",
}


def reference() -> str:
    """Return the text of the whole page."""
    settings = "\n".join(f"| `{name}` | {what} |" for name, what in SETTINGS.items())
    parts = [
        HEAD,
        "## Magics\n",
        *(_entry(f"{mark}{name}", "", function) for mark, name, function in _magics()),
        "## Python\n",
        *(_described(f"sparkring.{name}", getattr(sparkring, name)) for name in _public()),
        "## Shards\n\nThe object that `sparkring.shards(…)` returns.\n",
        *_members(Shards),
        "## Checkpoints\n\nThe object that `sparkring.checkpoints(…)` returns.\n",
        *_members(Store),
        f"## Petastorm\n\n{_text(petastorm)}",
        *(_described(each.__name__, each) for each in PETASTORM),
        f"## TFRecord\n\n{_text(tfrecord)}",
        *(_described(name, getattr(tfrecord, name)) for name in ("write_tfrecord", "tfrecords", "Records")),
        f"## Estimators\n\n{_text(ml)}",
        *(_described(f"sparkring.ml.{name}", getattr(ml, name)) for name in ml.__all__),
        f"## Errors\n\n{_text(errors)}",
        f"## Settings\n\nEnvironment variables, and one setting of the SparkSession.\n\n| | |\n|---|---|\n{settings}\n",
    ]
    return "\n".join(parts)


def _magics() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield the magics that `%load_ext sparkring` adds: cell magics, then line magics, each kind sorted by name."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    with tempfile.TemporaryDirectory() as folder:
        shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}), ipython_dir=folder)
        before = {kind: set(known) for kind, known in shell.magics_manager.magics.items()}
        sparkring.load_ipython_extension(shell)
        for kind, mark in (("cell", "%%"), ("line", "%")):
            found = shell.magics_manager.magics[kind]
            yield from ((mark, name, found[name]) for name in sorted(set(found) - before[kind]))


def _public() -> list[str]:
    return [name for name in sparkring.__all__ if name != "load_ipython_extension"]


def _described(name: str, thing: Any) -> str:
    """Return the entry of a function, or the entries of a class and of its members."""
    if not inspect.isclass(thing):
        return _entry(name, _signature(thing), thing)
    takes = _signature(thing) if thing.__name__ in MADE_BY_USERS else ""
    return "\n".join([_entry(name, takes, thing), *_members(thing)])


def _members(owner: type) -> list[str]:
    """Return the entries of those methods and properties of a class that have a docstring."""
    found = []
    for name, member in vars(owner).items():
        told = inspect.getdoc(member)
        if name.startswith("_") or name in INSIDE or not told:
            continue
        if not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        takes = _signature(member) if inspect.isfunction(member) else ""
        found.append(_entry(f".{name}", takes, member, level=4))
    return found


def _signature(function: Any) -> str:
    """Return the parameters with their defaults, but without types: the docstrings describe the types."""
    found = inspect.signature(function)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    bare = bare[1:] if bare and bare[0].name == "self" else bare
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _entry(name: str, takes: str, thing: Any, level: int = 3) -> str:
    called = f"{name.lstrip('.')}{takes}\n\n" if takes else ""
    return f"{'#' * level} `{name}`\n\n{_text(thing, called)}"


def _text(thing: Any, first: str = "") -> str:
    return f"```text\n{first}{inspect.getdoc(thing) or ''}\n```\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else FILE).write_text(reference(), encoding="utf-8")
