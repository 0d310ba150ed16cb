"""Wraps Petastorm's functions, under the same names. On a rank, they read that rank's shard by default.

    from sparkring.data.petastorm import make_reader, make_batch_reader, make_spark_converter, SparkDatasetConverter

This import is the only change that a notebook needs. The differences from Petastorm's own functions are:

- `cur_shard` and `shard_count` default to this rank and the number of ranks. In the notebook's process, the whole data
  set is read. To read everything on a rank, pass cur_shard=0, shard_count=1.
- A path may have any form that sparkring accepts: `dbfs:/x`, `/dbfs/x`, a folder on this machine, any URL.
- Before a reader starts its workers, the footers of the Parquet files are read, to find errors early. A DataError is
  raised if a path is missing, if there are too few row groups, or if a TransformSpec does not return what it declares.
  A warning is shown if ranks would get unequal numbers of steps.
- If a worker dies, the reader raises an error on every subsequent read. Petastorm's own reader would wait forever.
- The progress of each rank is reported to the notebook.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from sparkring.errors import DataError

if TYPE_CHECKING:
    from sparkring.data.petastorm.converter import SparkDatasetConverter as SparkDatasetConverter
    from sparkring.data.petastorm.converter import make_spark_converter as make_spark_converter
    from sparkring.data.petastorm.plan import row_group_shard as row_group_shard
    from sparkring.data.petastorm.readers import check_transform as check_transform
    from sparkring.data.petastorm.readers import make_batch_reader as make_batch_reader
    from sparkring.data.petastorm.readers import make_reader as make_reader

# The module that defines each name. It is imported only when the name is first used, because every rank imports this
# package to get the module `quiet`, and most ranks do not need Petastorm.
_HOMES = {
    "SparkDatasetConverter": "sparkring.data.petastorm.converter",
    "make_spark_converter": "sparkring.data.petastorm.converter",
    "row_group_shard": "sparkring.data.petastorm.plan",
    "check_transform": "sparkring.data.petastorm.readers",
    "make_batch_reader": "sparkring.data.petastorm.readers",
    "make_reader": "sparkring.data.petastorm.readers",
    # These two are Petastorm's own, for notebooks that import all of Petastorm's names from this package.
    "NoDataAvailableError": "petastorm.errors",
    "TransformSpec": "petastorm.transform",
}

_FIRST_REFUSED_PYTHON = (3, 13)
_ABSENT = (
    "Petastorm is not installed: run `pip install 'sparkring[petastorm]'`, or read the data with sparkring.shards()."
)
_ABSENT_ON_NEW_PYTHON = (
    f"Petastorm cannot be installed for Python {sys.version_info[0]}.{sys.version_info[1]}, since it needs pyarrow "
    "below 15 and NumPy below 2: read the data with sparkring.shards(), or use Python 3.11."
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib
    import importlib.util

    if importlib.util.find_spec("petastorm") is None:
        raise DataError(_ABSENT_ON_NEW_PYTHON if sys.version_info >= _FIRST_REFUSED_PYTHON else _ABSENT)
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
