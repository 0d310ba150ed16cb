"""`%shards`: which rank will read which rows of a data set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sparkring.notebook.magic import Magic
from sparkring.notebook.option_types import columns, number_of_ranks, positive_count
from sparkring.notebook.options_table import Option, OptionsTable
from sparkring.notebook.sources import suggest_sources, value_of

_HELP = """Show which rank reads which rows of a data set, before anything is launched.

    %shards /dbfs/data/digits -n 4 --batch-size 256
    %shards "s3://bucket/events/day=*/" -n 8 --columns speed,label --where "speed > 3" --epochs 100
    %shards frame -n 4          a Spark DataFrame of the notebook, which is written to the cache first
    %shards train               what sparkring.shards(…) gave

Only the files' footers are read, and the columns of a filter. Two splits stand side by side: the even one that
sparkring.shards() reads by, in which ranks differ by one row at most and all take as many steps; and Petastorm's,
in which row group i goes to rank i % n, so that a rank may get more than another, or nothing, and the others wait
for it in allreduce. Shown are rows, bytes, files, row groups and steps of each rank, for object stores the GET
requests and their price, and what to change about the files, in numbers.

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
        help="Parquet files: a path, a folder, a glob, a URL; or a variable of the notebook",
        suggest=_suggest,
    ),
    Option(
        "-n",
        "--np",
        type=number_of_ranks,
        metavar="NP",
        dest="size",
        default=0,
        help="ranks; default: the warm gang's, or one",
    ),
    Option("--batch-size", type=positive_count, metavar="B", help="rows in a rank's batch; default 32"),
    Option("--columns", type=columns, metavar="A,B,…", help="the columns that will be read; default: all"),
    Option("--where", default="", metavar="FILTER", help='the rows that will be read: --where "x > 3"'),
    Option(
        "--remainder",
        choices=("drop", "pad", "join"),  # not imported from data.plan, which would bring NumPy along
        help="rows that fill no batch on every rank: left out (drop), padded, or in smaller batches (join)",
    ),
    Option(
        "--epochs",
        type=positive_count,
        metavar="E",
        default=1,
        help="for the price of an object store's requests",
    ),
)


def _shards(shell: Any, line: str) -> None:
    from sparkring.data.preview import preview
    from sparkring.engine import gang_selection
    from sparkring.views.shards import show_shards

    given = OPTIONS.parse(line)
    source, size = given.pop("source"), given.pop("size") or gang_selection.default_np()
    show_shards(preview(value_of(shell, source), source, abs(size), **given))


MAGICS = (Magic("shards", "line", _HELP.format(options=OPTIONS.help()), _shards, OPTIONS.complete),)
