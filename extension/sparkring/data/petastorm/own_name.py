"""Accompanies the readers that a rank makes with Petastorm's own functions: `from petastorm import make_reader`.

They read what Petastorm reads: all rows, unless a shard is given. In a ring, a notice at the first batch says so. As
with the functions of sparkring.data.petastorm, a TransformSpec is checked before the workers start, the notebook is
told how far a rank has read, and a worker that has died is an error. Petastorm's Spark converter makes its readers with
these functions, too.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from sparkring.data.petastorm import transform
from sparkring.data.petastorm.plan import ReaderPlan, bound
from sparkring.data.petastorm.source import open_source
from sparkring.data.petastorm.watching import watch
from sparkring.runtime import report
from sparkring.runtime.world import world

_CONVERTER = "petastorm.spark.spark_dataset_converter"
_alone: ContextVar[bool] = ContextVar("alone", default=False)
_sharded = False  # whether a reader has had a shard in this request
_noticed: set[str] = set()  # the data sets that a notice in this request was about


def prepare(module: types.ModuleType) -> None:
    """Accompany the readers that the functions of `module`, petastorm.reader, will make."""
    # These modules have the functions, too, if they were imported before.
    others = [sys.modules[name] for name in ("petastorm", _CONVERTER) if name in sys.modules]
    for name in ("make_reader", "make_batch_reader"):
        original = getattr(module, name)
        accompanied = _accompanied(name, original)
        for place in (module, *others):
            if getattr(place, name, None) is original:
                setattr(place, name, accompanied)


def begin() -> None:
    """Begin a request."""
    global _sharded
    _sharded = False
    _noticed.clear()


@contextlib.contextmanager
def unaccompanied() -> Iterator[None]:
    """In this block, leave the readers alone, because the caller does what is to be done."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def _accompanied(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*arguments: Any, **given: Any) -> Any:
        global _sharded
        if _alone.get():
            return original(*arguments, **given)
        plan = _plan(name, arguments, given)
        if plan is None:
            return original(*arguments, **given)
        spec = plan.options["transform_spec"]
        if spec is not None:
            fields = plan.options["schema_fields"]
            transform.check(spec, plan.source, fields, batched=plan.batched, every_change=False)
        reader = original(*arguments, **given)
        _sharded |= plan.options["cur_shard"] is not None
        watch(reader, plan, functools.partial(_notice, plan))
        return reader

    return make


def _plan(name: str, arguments: tuple[Any, ...], given: dict[str, Any]) -> ReaderPlan | None:
    """Return what the reader will read, or None if that cannot be found out: Petastorm then raises its own error."""
    try:
        options = bound(name, arguments, given)
        source = open_source(options)
        columns = list(transform.view(source.schema, options["schema_fields"]).fields)
    except Exception:  # whatever is wrong with the arguments or the files
        return None
    return ReaderPlan(source, options, name == "make_batch_reader", None, columns)


def _notice(plan: ReaderPlan) -> None:
    """Say that all ranks read the same rows, unless a shard was given to this reader or to an earlier one.

    If another reader has a shard, the ranks probably read all of this data set to evaluate the model.
    """
    ring, name = world(), plan.source.name
    if ring.size == 1 or ring.rank or plan.options["cur_shard"] is not None or _sharded or name in _noticed:
        return
    _noticed.add(name)
    report.log_to_driver(
        f"{name}: each of {ring.size} ranks reads all rows. To read a part on each rank, pass "
        "cur_shard=sparkring.world().rank, shard_count=sparkring.world().size, or use sparkring.shards(…), which "
        "divides rows evenly. To read all rows without this notice, pass cur_shard=0, shard_count=1."
    )
