"""Checks the arguments and the shard of a Petastorm reader, before the reader starts its workers."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

from sparkring.compat.petastorm_warnings import silence
from sparkring.data.petastorm import transform
from sparkring.data.petastorm.source import ReaderSource, open_source
from sparkring.errors import DataError, OptionsError, PathError
from sparkring.history.describe import counted
from sparkring.runtime.storage import locate
from sparkring.runtime.world import world

Path = str | os.PathLike[str]


def row_group_shard(row_group_rows: Sequence[int], shard_count: int) -> list[int]:
    """Return the number of rows of each of Petastorm's shards. Row group i is in shard i modulo `shard_count`."""
    return [sum(row_group_rows[shard::shard_count]) for shard in range(shard_count)]


class ReaderPlan(NamedTuple):
    """A reader that has passed the checks: the arguments of Petastorm's function, and a description of the data."""

    source: ReaderSource
    options: dict[str, Any]
    batched: bool
    batch_size: int | None
    columns: list[str]

    @property
    def groups(self) -> list[int]:
        """The indexes of this shard's row groups that have rows, in the order of the files."""
        shard = range(self.options["cur_shard"] or 0, len(self.source.rows), self.options["shard_count"] or 1)
        return [index for index in shard if self.source.rows[index]]

    @property
    def in_order(self) -> bool:
        """Whether the reader is known to return the rows of `groups` in their order."""
        options = self.options
        alone = options["workers_count"] == 1 or options["reader_pool_type"] == "dummy"
        # With a seed, Petastorm shuffles the row groups of a shard even if they are not to be shuffled.
        seeded = options["shard_count"] and (options["seed"] is not None or options["shard_seed"])
        return self.counted and alone and not (options["shuffle_row_groups"] or seeded)

    @property
    def counted(self) -> bool:
        """Whether the number of rows that the reader will return is known from the files' footers alone."""
        options = self.options
        chosen = options["predicate"] is not None or options["rowgroup_selector"] is not None
        spec = options["transform_spec"]
        changed = self.batched and spec is not None and spec.func is not None  # func may drop or add rows
        parts = options["shuffle_row_drop_partitions"] > 1
        return not (chosen or changed or parts or transform.is_ngram(options["schema_fields"]))

    def chosen(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the options for a method of Petastorm's converter: the options `given`, and this rank's shard."""
        return {**given, **{name: self.options[name] for name in ("cur_shard", "shard_count")}}


def plan_reader(
    function: str,
    arguments: tuple[Any, ...],
    given: dict[str, Any],
    batch_size: int | None,
    *,
    name: str = "",
    shard_one: bool = False,
    every_change: bool = False,
) -> ReaderPlan:
    """Check a call of Petastorm's `function`, as far as possible before a worker starts, and return the ReaderPlan.

    `arguments` and `given` are the positional and the keyword arguments of the call. `name` is the data's name in
    messages. With `shard_one`, the shard is set even if there is only one rank. `every_change` is passed to
    transform.check(). Raise DataError, OptionsError or PathError if a check fails.
    """
    silence()
    if batch_size is not None and not (_is_whole(batch_size) and batch_size >= 1):
        raise OptionsError(f"batch_size is {batch_size!r}; it must be a whole number, at least 1.")
    options = bound(function, arguments, given)
    _share_out(options, shard_one)
    source = open_source(options, name)
    batched = function == "make_batch_reader"
    if not batched and not source.has_unischema:
        raise DataError(
            f"{source.name} was not written with Petastorm's materialize_dataset: its files have no Unischema. Read it "
            "with make_batch_reader."
        )
    columns = list(transform.view(source.schema, options["schema_fields"]).fields)
    spec = options["transform_spec"]
    if spec is not None:
        transform.check(spec, source, options["schema_fields"], batched=batched, every_change=every_change)
    plan = ReaderPlan(source, options, batched, batch_size, columns)
    if options["shard_count"]:
        _check_shards(plan)
    return plan


def bound(function: str, arguments: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of Petastorm's `function` by name, including the defaults. Paths become Petastorm's URLs."""
    import petastorm

    bound = inspect.signature(getattr(petastorm, function)).bind(*arguments, **given)
    bound.apply_defaults()
    options = dict(bound.arguments)
    url = next(iter(options))
    if options["filesystem"] is None and not options["storage_options"]:
        many = isinstance(options[url], list)
        options[url] = [_url(path) for path in options[url]] if many else _url(options[url])
    return options


def _url(path: Path) -> str:
    written = os.fspath(path)
    if written.startswith("hdfs:"):  # Petastorm parses these URLs itself, to connect to HDFS
        return written
    location = locate(written)
    if not location.local:
        return location.url
    if set("?#") & set(location.path):
        raise PathError(f"{written}: Petastorm ignores the part of a path after a ? or #. Rename the folder.")
    return f"file://{location.path}"


def _share_out(options: dict[str, Any], shard_one: bool) -> None:
    """Set the options to this rank's shard if no shard is given. Raise OptionsError if the given shard is invalid."""
    here = world()
    shard, count = options["cur_shard"], options["shard_count"]
    if shard is None and count is None:
        if here.size > 1 or shard_one:
            options.update(cur_shard=here.rank, shard_count=here.size)
    elif shard is None or count is None:
        raise OptionsError("cur_shard and shard_count must be given together; to read this rank's shard, give neither.")
    elif not (_is_whole(shard) and _is_whole(count)):
        raise OptionsError(f"cur_shard={shard!r} and shard_count={count!r} must be whole numbers.")
    elif not 0 <= shard < count:
        raise OptionsError(f"cur_shard={shard} is out of range for shard_count={count}: shards are numbered from 0.")
    else:
        options.update(cur_shard=int(shard), shard_count=int(count))


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral)  # NumPy's integers, too


def _check_shards(plan: ReaderPlan) -> None:
    """Raise DataError if some shard would have no rows. Warn if shards have unequal numbers of steps."""
    source, count = plan.source, plan.options["shard_count"]
    if len(source.rows) < count:
        smaller = max(1, sum(source.sizes_bytes) // (2 * count))
        raise DataError(
            f"{source.name} has {counted(len(source.rows), 'row group')} in {counted(len(source.groups_in), 'file')}, "
            f"too few for {count} ranks: Petastorm assigns whole row groups. Write the data with smaller row groups "
            f"(make_spark_converter(df.repartition({2 * count}), …) or parquet_row_group_size_bytes={smaller}), or use "
            "sparkring.shards, which splits row groups."
        )
    shards = row_group_shard(source.rows, count)
    if 0 in shards:  # without a limit of epochs, Petastorm would look for a row forever
        raise DataError(
            f"{source.name}: shard {shards.index(0)} of {count} (counted from 0) would get only row groups without "
            "rows, because Petastorm assigns whole row groups in turn. Remove the empty files, or use "
            "sparkring.shards, which divides rows evenly."
        )
    epochs = plan.options["num_epochs"]
    # Only the first rank warns, and only if the numbers of steps are known and finite.
    if plan.options["cur_shard"] or not plan.batch_size or not plan.counted or epochs is None:
        return
    steps = [math.ceil(rows * epochs / plan.batch_size) for rows in shards]
    most, least = max(steps), min(steps)
    if most != least:
        last = "the last step" if most - least == 1 else f"the last {most - least} steps"
        warnings.warn(
            f"{source.name}: rank {steps.index(most)} gets {most} steps of {plan.batch_size} rows, but rank "
            f"{steps.index(least)} gets {least}: an allreduce in {last} hangs or fails. Petastorm assigns whole row "
            "groups; sparkring.shards divides rows evenly.",
            stacklevel=_level_of_user(),
        )


def _level_of_user() -> int:
    """Return the `stacklevel` with which warnings.warn() shows the line that called this package."""
    level, frame = 1, inspect.currentframe()
    frame = frame.f_back if frame else None
    # File names cannot be compared: on Spark, sparkring is imported from a zip file, and the names of its code files
    # are relative.
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("sparkring.data.petastorm", "contextlib")
    ):
        level, frame = level + 1, frame.f_back
    return level
