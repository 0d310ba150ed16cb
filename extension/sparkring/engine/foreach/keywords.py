"""The types of the keywords that the overloads of foreach() share. Only type checkers read this module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypedDict


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
    env_pack: bool
    name: str
    quiet: bool
