"""The states that %%stream with --by has saved: one for each key. Each rank has saved those of its own keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from sparkring.checkpointing import parts
from sparkring.errors import CheckpointError

_NAMED = 8  # how many keys an error names
_FIELDS = {"state", "by", "keys", "position"}  # what stream_state.py saves, beside the values of new keys


class AllKeys:
    """Stands for all keys, because None is a key, too."""

    def __repr__(self) -> str:
        return "<all>"


ALL: Final = AllKeys()


class StatesByKey(NamedTuple):
    """The trees of the variables of each key, and the columns whose values are the keys. `name` is for messages."""

    name: str
    by: tuple[str, ...]
    trees: Mapping[Any, Any]

    def tree(self, key: Any) -> dict[str, Any]:
        """Return the tree of a key's variables. Raise CheckpointError if the key has no state."""
        from sparkring.data.keys import as_key  # not at the top, because it needs pyarrow

        key = as_key(key)
        if key not in self.trees:
            keys = in_order(self.trees)
            more = f" and {len(keys) - _NAMED:,} more" if len(keys) > _NAMED else ""
            there = f"it has those of {', '.join(map(repr, keys[:_NAMED]))}{more}" if keys else "it has none yet"
            raise CheckpointError(f"{self.name} has no state for {', '.join(self.by)} = {key!r}: {there}.")
        variables: dict[str, Any] = self.trees[key]
        return variables

    def whole(self) -> dict[Any, Any]:
        """Return the variables of all keys as new objects."""
        return {key: parts.plain(self.trees[key]) for key in in_order(self.trees)}


def columns_and_count(skeleton: Any) -> tuple[tuple[str, ...], int] | None:
    """Return the columns of --by, and the number of keys, in what a rank has saved; None if it has a single state."""
    fields = skeleton.get("dict") if isinstance(skeleton, dict) else None
    if not isinstance(fields, dict) or not fields.keys() >= _FIELDS or not isinstance(fields["by"], list):
        return None
    return (tuple(fields["by"]), len(fields["keys"])) if fields["by"] else None


def joined(name: str, saved: Iterable[dict[str, Any]]) -> StatesByKey:
    """Return the states that all ranks have saved."""
    from sparkring.data.keys import as_key

    trees: dict[Any, Any] = {}
    by: tuple[str, ...] = ()
    for of_rank in saved:
        by = tuple(of_rank["by"])
        for number, key in enumerate(parts.plain(of_rank["keys"])):
            trees[as_key(key)] = of_rank["state"][str(number)]
    return StatesByKey(name, by, trees)


def in_order(keys: Iterable[Any]) -> list[Any]:
    """Return keys in their order or, if they cannot be compared, in that of their texts."""
    try:
        return sorted(keys)
    except TypeError:
        return sorted(keys, key=repr)
