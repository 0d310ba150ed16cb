"""The types of the keywords that the overloads of public functions share. Only type checkers read this module."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from sparkring.data.layout import Columns, Transform
from sparkring.engine.predictions.destination import Mode
from sparkring.worker.model.predictors import Autocast
from sparkring.worker.model.scorer import OnError

if TYPE_CHECKING:
    import torch
    from pyspark.sql.types import DataType
    from typing_extensions import Required

    from sparkring.checkpointing.store import Which


class PredictKeywords(TypedDict, total=False):
    """The keywords of predict() for DataFrames and files, without those that are only for DataFrames or files."""

    inputs: Required[Columns]
    returns: str | DataType | Mapping[str, str | DataType] | None
    which: Which
    key: str | Sequence[str] | None
    version: str | None
    batch_size: int
    transform: Transform | None
    fill: Mapping[str, Any] | None
    raw: Mapping[str, tuple[Any, Sequence[int]]] | None
    dtype: Any
    on_error: OnError
    probe: bool
    autocast: Autocast | torch.dtype | None


class FilesKeywords(PredictKeywords, total=False):
    """The keywords of predict() for files, without `background`."""

    to: Required[str | os.PathLike[str]]
    np: int | None
    columns: Sequence[str] | None
    mode: Mode
