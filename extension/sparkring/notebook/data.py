"""`%shards`, which shows the rows of a data set that each rank will read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sparkring.engine.run.option_types import columns, number_of_ranks, positive_count
from sparkring.errors import OptionsError
from sparkring.notebook.magic import Magic
from sparkring.notebook.options_table import Option, OptionsTable
from sparkring.notebook.sources import suggest_sources, value_of

_HELP = """Preview which rows of a data set each rank will read, before you start a run.

    %shards /dbfs/data/digits -n 4 --batch-size 256
    %shards "s3://bucket/events/day=*/" -n 8 --columns speed,label --where "speed > 3" --epochs 100
    %shards frame -n 4          a Spark DataFrame in the notebook; it is first written to the cache
    %shards train               a variable that holds the result of sparkring.shards(…)
    %shards sales --version 17  a Delta table by its name or path
    %shards --find sales        the saved runs that have read it

The preview reads only the footers of the files, and the columns that a filter names. It compares two ways to divide
the rows. sparkring.shards() divides them evenly: ranks differ by at most one row and take the same number of steps.
Petastorm gives row group i to rank i % n, so some ranks may read more than others, or nothing. Ranks then wait for
each other in allreduce. For each rank, the preview shows its rows, bytes, files, row groups and steps. For object
stores, it also shows the number of GET requests and their price. Finally, the preview says how the files could be
improved.

Options:
{options}
"""


def _suggest(current: str) -> Iterable[str]:
    from sparkring.data.preview import can_be_previewed

    return suggest_sources(current, can_be_previewed)


OPTIONS = OptionsTable(
    "%shards",
    Option(
        "source",
        metavar="PATH|DF",
        help="Parquet files (a path, a folder, a glob or a URL), a Delta table, or a variable in the notebook",
        suggest=_suggest,
    ),
    Option(
        "-n",
        "--np",
        type=number_of_ranks,
        metavar="NP",
        dest="size",
        default=0,
        help="number of ranks; default: as many as the warm gang has, or 1 without a gang",
    ),
    Option("--batch-size", type=positive_count, metavar="B", help="number of rows in a rank's batch; default: 32"),
    Option("--columns", type=columns, metavar="A,B,…", help="the columns to read; default: all"),
    Option("--where", default="", metavar="FILTER", help='the rows to read: --where "x > 3"'),
    Option("--version", type=int, metavar="V", help="the version of a Delta table; default: the newest"),
    Option("--timestamp", metavar="TIME", help="a time: the version of a Delta table that was the newest then"),
    Option(
        "--remainder",
        choices=("drop", "pad", "join"),  # written out, because importing data.plan imports NumPy, which is slow
        help="what to do with the last rows: leave them out (drop), pad their batches, or make smaller batches (join)",
    ),
    Option("--find", action="store_true", help="list the saved runs that have read the data or table, by its version"),
    Option(
        "--epochs",
        type=positive_count,
        metavar="E",
        default=1,
        help="number of epochs, used to estimate the price of requests to an object store",
    ),
)


def readers(name: str) -> list[tuple[str, Any, Any]]:
    """Return the saved runs that have read a data set, by its version, newest first; see show_readers()."""
    from sparkring.history import run_store

    def order(version: str) -> tuple[int, str]:
        """Return what sorts versions: those of tables by their numbers."""
        number = version.partition(" ")[0]
        return int(number) if number.isdecimal() and " " in version else -1, version

    wanted = name.rstrip("/")
    runs = [
        (path.name, run_store.first(path), opened)
        for path in run_store.saved()
        for opened in run_store.opened_data(path)
        if (known := opened.name.rstrip("/")) == wanted or known.endswith((f"/{wanted}", f".{wanted}"))
    ]
    if not runs:
        raise OptionsError(f"%shards --find {name}: no saved run has read data of this name; %runs lists the runs.")
    return sorted(runs, key=lambda run: order(run[2].version), reverse=True)


def _shards(shell: Any, line: str) -> None:
    from sparkring.data.preview import preview
    from sparkring.engine.run import gang_selection
    from sparkring.views.shards import show_readers, show_shards

    given = OPTIONS.parse(line)
    if given.pop("find"):
        show_readers(given["source"], readers(given["source"]))
        return
    source, size = given.pop("source"), given.pop("size") or gang_selection.default_np()
    show_shards(preview(value_of(shell, source), source, abs(size), **given))


MAGICS = (Magic("shards", "line", _HELP.format(options=OPTIONS.help()), _shards, OPTIONS.complete),)
