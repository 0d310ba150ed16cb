"""A placeholder for an object that is made only when the pickle is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StandIn:
    """An object that is unpickled as the result of `make(*arguments)`, which is called once for each stand-in."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = make, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced
