"""The types of the keywords that the overloads of public functions share. Only type checkers read this module."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from sparkring.data.layout import Columns, Transform
from sparkring.inference.destination import Mode
from sparkring.inference.predictors import Autocast
from sparkring.inference.scorer import OnError

if TYPE_CHECKING:
    import torch
    from pyspark.sql.types import DataType
    from typing_extensions import Required

    from sparkring.checkpointing.store import Which


class ForeachKeywords(TypedDict, total=False):
    """The keywords of foreach(), without `background` and `plan`."""

    np: int | None
    retries: int | None
    timeout_each_s: float | None
    fail_fast: bool
    fresh_process: bool
    fresh_after: int | None
    np_each: int
    framework: str
    gpus: float | None
    checkpoint_dir: str | os.PathLike[str]
    fresh: bool
    keep_results: bool
    seed: int
    env: Mapping[str, str] | None
    name: str
    quiet: bool


class PredictKeywords(TypedDict, total=False):
    """The keywords of predict() for DataFrames and files, without those that are only for DataFrames or files."""

    inputs: Required[Columns]
    returns: str | DataType | Mapping[str, str | DataType] | None
    which: Which
    key: str | None
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
