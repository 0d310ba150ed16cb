"""The parameter values of one trial of a search, as an item sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sparkring.runtime.report import short_repr


def as_text(value: Any) -> str:
    """Return a choice as views show it: a string unchanged, and any other value as a short repr."""
    return value if isinstance(value, str) else short_repr(value) or "None"


class Parameters(tuple[Any, ...]):
    """The values of named parameters, in the order in which they were passed to search().

    for lr, width in …          # unpack the values
    trial.lr, trial["lr"]       # or look them up by name
    train(**trial)              # or pass them as keywords
    """

    _fields: tuple[str, ...]

    def __new__(cls, names: Iterable[str], values: Iterable[Any]) -> Parameters:
        parameters = super().__new__(cls, values)
        parameters._fields = tuple(names)
        return parameters

    def __reduce__(self) -> tuple[Any, ...]:
        return Parameters, (self._fields, tuple(self))

    def keys(self) -> Iterator[str]:
        return iter(self._fields)

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self._fields:
            raise KeyError(key)
        return super().__getitem__(self._fields.index(key))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._fields:
            raise AttributeError(f"the search has no parameter {name!r}; its parameters are {', '.join(self._fields)}")
        return self[name]

    def __mul__(self, other: Any) -> Any:
        """Refuse to multiply, since a tuple would repeat its values, but the user takes the parameters for a number."""
        raise TypeError(f"unsupported operand type(s) for *: {type(self).__name__!r} and {type(other).__name__!r}")

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"Parameters({', '.join(f'{name}={value!r}' for name, value in self._asdict().items())})"
