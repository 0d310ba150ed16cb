"""The state of a stream on a rank: which variables a checkpoint saves, together with the position of the stream."""

from __future__ import annotations

import ast
import contextlib
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import cloudpickle

from sparkring.capture.names import global_names, names_read
from sparkring.capture.syntax import parsed
from sparkring.checkpointing import parts, tree
from sparkring.checkpointing.entries import INITIAL
from sparkring.checkpointing.store import Store, checkpoints, restore_shards, save_batch
from sparkring.data.keys import as_key, owner_of
from sparkring.errors import CheckpointError
from sparkring.runtime import world
from sparkring.runtime.resume_point import here


class StreamState:
    """Chooses, restores and saves the state. The driver makes this object, and each rank has a copy.

    `names` are the names of the variables that the user has given; if there are none, begin() chooses them. `keep` and
    `sharded` have the same meanings as in checkpoints(). If `saves` is false, nothing is saved. The step of a
    checkpoint is the number of the last micro-batch that the checkpoint includes, or INITIAL if it includes none.

    If there is a model for each key, the values of the columns `by` (--by), of_key() gives the variables the values for
    a key. Each key begins with copies of the values that the variables had when the stream began. Checkpoints have
    these values, so that they are also used by runs that continue.
    """

    def __init__(
        self, names: tuple[str, ...], keep: int | None, *, sharded: bool, saves: bool, by: tuple[str, ...]
    ) -> None:
        self.names = names
        self._keep = keep
        self._sharded = sharded
        self._saves = saves
        self._by = by
        self._namespace: dict[str, Any] = {}
        self._store: Store | None = None
        self._first: dict[str, Any] = {}  # the values with which each key begins
        self._pickled = b""  # the same values
        self._of_keys: dict[Any, dict[str, Any]] = {}

    def begin(self, source: str, namespace: dict[str, Any], bound: Collection[str]) -> tuple[int, str]:
        """Choose the state of a cell, and restore the checkpoint that the run continues from, if there is one.

        `bound` are the names that a rank binds before the cell runs; they are never part of the state. Return the step
        of the checkpoint, or INITIAL, and the position of the stream. Raises CheckpointError if there is no state, or
        if it cannot be saved or restored.
        """
        self._namespace = namespace
        self.names = self.names or tuple(_state_of(source, namespace, bound))
        if self._by:
            self._begin_keys_with(self._values())
        if not self._saves:
            return INITIAL, ""
        if not self.names:
            raise CheckpointError(
                "the cell uses no model, optimizer or other value that a checkpoint could save: name the variables "
                "that the cell changes, as in --state weights, or leave --checkpoint-dir out."
            )
        self._store = checkpoints(keep=self._keep, sharded=self._sharded, background=False)
        if not here().resume:
            self._check()
            return INITIAL, ""
        return self._restore(self._store)

    def _restore(self, store: Store) -> tuple[int, str]:
        """Restore the state or, if there is one for each key, the states of the keys that belong to this rank."""
        rank, size = world.world()[:2]
        state: dict[str, Any] = {"position": ""} if self._by else self._state("")

        def put(saved: Any) -> None:
            self._check_by(tuple(saved.get("by", ())))
            if not self._by:
                parts.put_back(state, saved, "state")
                parts.check_shared(state, saved)
                return
            state["position"] = saved["position"]
            if "first" in saved:  # earlier versions did not save it
                self._begin_keys_with(self._of_key(saved["first"], "the state of new keys"))
            for number, key in enumerate(map(as_key, parts.plain(saved["keys"]))):
                if owner_of(key, size) == rank:
                    self._of_keys[key] = self._of_key(saved["state"][str(number)], f"the state of {key!r}")

        step = restore_shards(store, put, {} if self._by else parts.memory_of(state))
        restored = state.get("state", {})  # it also has the names that are no longer part of the state
        self._namespace.update((name, restored[name]) for name in self.names if name in restored)
        return step, state["position"]

    def _begin_keys_with(self, values: dict[str, Any]) -> None:
        """Let each new key begin with copies of these values. Other cells may change the values themselves later."""
        self._pickled = cloudpickle.dumps(values)
        self._first = self._copies()

    def _copies(self) -> dict[str, Any]:
        # Unpickling is safe: this process has pickled the values itself.
        copies: dict[str, Any] = cloudpickle.loads(self._pickled)
        return copies

    def _of_key(self, saved: dict[str, Any], called: str) -> dict[str, Any]:
        """Return the saved values for a key. Names that are not in the checkpoint have the values of `_first`."""
        values = self._copies()
        restored = parts.put_back(dict(values), saved, called)
        parts.check_shared(restored, saved)
        return {name: restored[name] if name in restored else values[name] for name in self.names}

    def _check_by(self, by: tuple[str, ...]) -> None:
        """Raise CheckpointError if a checkpoint has the state of a stream with other columns in --by."""
        if by != self._by:
            had = f"a state for each value of {','.join(by)}" if by else "a single state"
            now = f"with --by {','.join(self._by)}" if self._by else "without --by"
            again = f"with --by {','.join(by)}" if by else "without --by"
            raise CheckpointError(
                f"the checkpoint has {had}, so a stream {now} cannot continue from it: run the cell {again}, or with "
                "--fresh to start over."
            )

    @contextlib.contextmanager
    def of_key(self, key: Any) -> Iterator[None]:
        """In this block, the variables have the values for `key`, if there is a model for each key."""
        if not self._by:
            yield
            return
        others = self._values()
        self._namespace.update(self._of_keys.get(key) or self._copies())
        try:
            yield
            self._of_keys[key] = self._values()
        finally:
            self._namespace.update(others)  # if the gang is used for another stream, its keys begin with these values

    def save(self, step: int, position: str) -> None:
        """Save the state as the checkpoint of `step`, if there is a directory of checkpoints. All ranks call this."""
        if self._store is not None:
            save_batch(self._store, step, self._state(position))

    def _state(self, position: str) -> dict[str, Any]:
        if not self._by:
            return {"state": self._values(), "position": position}
        values = {str(number): state for number, state in enumerate(self._of_keys.values())}
        keys = {"by": list(self._by), "keys": list(self._of_keys), "first": self._first}
        return {"state": values, **keys, "position": position}

    def _values(self) -> dict[str, Any]:
        missing = [name for name in self.names if name not in self._namespace]
        if missing:
            raise CheckpointError(
                f"the ranks have no variable `{missing[0]}`, which is part of the stream's state: run the cell that "
                "defines it on the gang, or name the state with --state."
            )
        return {name: self._namespace[name] for name in self.names}

    def _check(self) -> None:
        """Raise CheckpointError if the state cannot be saved, before the first batch changes it."""
        for name, value in self._values().items():
            try:
                tree.flatten(parts.tree_of(value, name), name)
            except CheckpointError as error:
                raise CheckpointError(f"{error} Name the variables to save, as in --state model,optimizer.") from None


def _state_of(source: str, namespace: dict[str, Any], bound: Collection[str]) -> Iterator[str]:
    """Yield the names of the state of a cell, sorted.

    The state consists of the models, optimizers and other objects with a state that the cell, or a function that the
    cell uses, reads, and of the names that the cell both reads and changes by an assignment.
    """
    cell = names_read(source)
    read, written = _reached({*cell.required, *cell.optional}, namespace)
    changed = read & {*cell.bound, *_changed_items(source), *written}
    for name in sorted(read):
        if name in namespace and name not in bound and (name in changed or parts.has_state(namespace[name])):
            yield name


def _changed_items(source: str) -> Iterator[str]:
    """Yield the names in assignments to an item or an attribute, such as `counts` in `counts[key] += 1`."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
            inner: ast.expr = node
            while isinstance(inner, ast.Subscript | ast.Attribute):
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield inner.id


def _reached(names: Iterable[str], namespace: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Return the names that exist, with those that functions and classes of `__main__` among their values read.

    The second set has the names to which these functions assign values.
    """
    reached: set[str] = set()
    written: set[str] = set()
    waiting = [name for name in names if name in namespace]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            for code in _codes(namespace[name]):
                used = global_names(code)
                written |= used.writes
                waiting += [global_name for global_name in used.reads if global_name in namespace]
    return reached, written


def _codes(value: Any) -> Iterator[types.CodeType]:
    """Yield the code of a function, of a tf.function, or of the methods of a class; nothing for other values."""
    function = getattr(value, "python_function", value)
    function = getattr(function, "__wrapped__", function)
    if isinstance(function, types.FunctionType) and function.__module__ == "__main__":
        yield function.__code__
    elif isinstance(value, type) and value.__module__ == "__main__":
        yield from (member.__code__ for member in vars(value).values() if isinstance(member, types.FunctionType))
