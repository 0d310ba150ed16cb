"""The rows of a fit: a DataFrame that is written once and divided among the ranks, and the rows for validation."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow.compute as pc
from pyarrow import parquet
from pyspark.sql import functions

from sparkring.data.dataset import null_counts
from sparkring.data.frames import cluster_behind, for_arrays, name_of, quoted, version_of
from sparkring.data.materialise import Copy, Form, in_form
from sparkring.data.shards import Shards, shards
from sparkring.errors import DataError
from sparkring.runtime.kernel import tell

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkring.data.layout import Transform
    from sparkring.ml.params import Fitting
    from sparkring.runtime.storage import Location

_SPLIT = "sparkring_validation"  # the column of a copy that says which rows are for validation
_SEED = 42  # the split must not change between two fits, so that the second fit finds the copy
_ITEMS = ".list.element"  # the suffix that Parquet adds to the name of a column of arrays

# Several fits in threads may need the same copy, which should be written only once.
_writing = threading.Lock()


class FitRows(NamedTuple):
    """The rows for training and, if there are any, those for validation. `version` identifies the rows."""

    train: Shards
    validation: Shards | None
    version: str


def rows_of(frame: DataFrame, fitting: Fitting, transform: Transform | None) -> FitRows:
    """Write the columns that a fit needs, unless the cache has them, and return the rows divided among the ranks.

    Raise DataError if there are too few rows for the ranks, or if a column has nulls.
    """
    cluster_behind(frame)
    names, validation = _names(fitting), fitting.value("validation")
    if frame.isStreaming:
        raise DataError("the DataFrame is a stream: fit() needs a DataFrame whose rows do not change.")
    with _writing:
        copy = _written(frame, names, validation, fitting.value("random_seed"))
    for name, count in copy.facts["nulls"].items():
        column = quoted(name)
        advice = f"df.dropna(subset=['{name}']), or fill the nulls, for example with df.fillna() or Imputer"
        if frame.schema[name].dataType.typeName() == "array":  # dropna() does not see the nulls inside arrays
            advice = f'df.where("size({column}) > 0 AND forall({column}, item -> item IS NOT NULL)")'
        raise DataError(
            f"column `{name}` has {count:,} nulls or empty arrays (the DataFrame has {copy.rows:,} rows): drop these "
            f"rows with {advice}."
        )
    seed = fitting.value("random_seed")

    def open_it(where: Any, condition: str, size: int, remainder: Any, shuffle: bool) -> Shards:
        data = shards(
            copy.location.written,
            size,
            columns=names,
            where=where,
            transform=transform,
            shuffle=shuffle,
            seed=seed or 0,
            remainder=remainder,
            dtype="float32",
        )
        data.layout.data = name_of(names)
        data.layout.making = replace(data.layout.making, caller="estimator")
        return replace(data, dataset=replace(data.dataset, name=data.layout.data, where=condition))

    batch_size = fitting.value("batch_size")
    rows, chosen = copy.facts["rows"], pc.field(_SPLIT)
    ranks = abs(fitting.value("num_proc"))
    if rows["train"] // ranks < batch_size:
        raise DataError(
            f"the DataFrame has too few rows for training: {rows['train']:,}. With {ranks} ranks, each rank gets "
            f"{rows['train'] // ranks:,} of them, which do not fill a batch of {batch_size:,}: use a smaller "
            "batch_size or fewer ranks."
        )
    if not validation:
        return FitRows(open_it(None, "", batch_size, "drop", fitting.value("shuffle")), None, copy.version)
    if rows["validation"] < ranks:
        raise DataError(
            f"validation={validation!r} leaves {rows['validation']:,} rows for validation, but each of the {ranks} "
            "ranks needs one: use more rows or fewer ranks."
        )
    val_size = min(fitting.value("val_batch_size") or batch_size, rows["validation"] // ranks)
    split = validation if isinstance(validation, str) else "validation"
    train = open_it(~chosen, f"not {split}", batch_size, "drop", fitting.value("shuffle"))
    return FitRows(train, open_it(chosen, split, val_size, "join", False), copy.version)


def _names(fitting: Fitting) -> list[str]:
    weight = fitting.value("sample_weight_col")
    names = [*fitting.value("feature_cols"), *fitting.value("label_cols"), *([weight] if weight else [])]
    return list(dict.fromkeys(names))


def _written(frame: DataFrame, names: Sequence[str], validation: str | float | None, seed: int | None) -> Copy:
    """Return the copy of these columns, with the column _SPLIT if some of the rows are for validation."""
    columns = [functions.col(quoted(name)) for name in names]
    kind, share = "fit", None
    if isinstance(validation, str):
        chosen = functions.col(quoted(validation)).cast("double") > 0
        columns.append(functions.coalesce(chosen, functions.lit(False)).alias(_SPLIT))
    elif validation:
        share, seed = validation, _SEED if seed is None else seed
        kind = f"fit {share!r} {seed}"

    def written(selected: DataFrame) -> DataFrame:
        arrays = for_arrays(selected)
        return arrays if share is None else arrays.withColumn(_SPLIT, functions.rand(seed) < share)

    form = Form(kind, version_of, written, lambda _, copy: _facts(copy))
    return in_form(frame.select(*columns), form, say=tell)


def _facts(copy: Location) -> dict[str, Any]:
    """Return how many rows are for training and for validation, and the number of nulls in each column that has any."""
    nulls: Counter[str] = Counter()
    total = chosen = 0
    for path in (path for path in copy.fs.ls(copy.path, detail=False) if path.endswith(".parquet")):
        with copy.fs.open(path, "rb") as opened:
            file = parquet.ParquetFile(opened)
            total += file.metadata.num_rows
            for name, count in null_counts(file.metadata).items():
                nulls[name.partition(_ITEMS)[0]] += count
            if _SPLIT in file.schema_arrow.names:
                chosen += pc.sum(file.read([_SPLIT]).column(0).cast("int64")).as_py() or 0
    return {"nulls": {name: count for name, count in nulls.items() if count},
            "rows": {"train": total - chosen, "validation": chosen}}  # fmt: skip
