"""Petastorm under its own names, with this rank's shard by default.

    from sparkring.data.petastorm import make_reader, make_batch_reader, make_spark_converter, SparkDatasetConverter

is all that a notebook has to change. What these do beside what Petastorm's own do:

- `cur_shard` and `shard_count` are this rank's and the number of ranks unless they are given; in the notebook's
  process nothing is shared out. A rank that is to read everything says cur_shard=0, shard_count=1.
- Paths are written as elsewhere in sparkring: `dbfs:/x`, `/dbfs/x`, a folder on this machine, any URL.
- The footers are read before a worker starts: a path that is not there, too few row groups, a TransformSpec that does
  not give what it declares are a DataError then; ranks with unequal numbers of steps are told in a warning.
- A reader whose worker dies raises, and goes on raising, where Petastorm's own waits for ever.
- How far each rank has read is told to the notebook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkring.data.petastorm.converter import SparkDatasetConverter as SparkDatasetConverter
    from sparkring.data.petastorm.converter import make_spark_converter as make_spark_converter
    from sparkring.data.petastorm.plan import row_group_shard as row_group_shard
    from sparkring.data.petastorm.readers import check_transform as check_transform
    from sparkring.data.petastorm.readers import make_batch_reader as make_batch_reader
    from sparkring.data.petastorm.readers import make_reader as make_reader

# By name, and only when asked for: every rank imports the module of this package that keeps Petastorm quiet.
_HOMES = {
    "SparkDatasetConverter": "sparkring.data.petastorm.converter",
    "make_spark_converter": "sparkring.data.petastorm.converter",
    "row_group_shard": "sparkring.data.petastorm.plan",
    "check_transform": "sparkring.data.petastorm.readers",
    "make_batch_reader": "sparkring.data.petastorm.readers",
    "make_reader": "sparkring.data.petastorm.readers",
    # Petastorm's own, for code that takes all its names from one place.
    "NoDataAvailableError": "petastorm.errors",
    "TransformSpec": "petastorm.transform",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
