"""Takes items from an iterable, one at a time, and packs their values for the ranks."""

from __future__ import annotations

import ast
import hashlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sparkring.capture.packing import pack
from sparkring.capture.picklability import Namespace
from sparkring.engine.foreach.schedule import Item
from sparkring.errors import OptionsError
from sparkring.history.events import Failure
from sparkring.runtime.report import short_repr

NAME_CHARACTERS = 100
ITEM = "item"  # what a function's argument is called in tables


class Targets:
    """The targets of a for clause, such as `store, (lr, *rest)`. They are bound as Python's for binds them.

    `names` are the names that they bind. OptionsError if they bind something other than names.
    """

    def __init__(self, written: str) -> None:
        self.written = written.strip()
        target = _target(self.written)
        if target is None or any(isinstance(node, ast.Attribute | ast.Subscript) for node in ast.walk(target)):
            raise OptionsError(f"`{self.written}` cannot be bound to items: write names, as in `store, lr in …`.")
        self.names = tuple(node.id for node in ast.walk(target) if isinstance(node, ast.Name))
        assignment = ast.Module([ast.Assign([target], ast.Name("_", ast.Load()))], [])
        self._code = compile(ast.fix_missing_locations(assignment), "<targets>", "exec")

    def bind(self, value: Any) -> dict[str, Any]:
        """The value of each name for an item. Raises what Python's assignment raises."""
        found = {"_": value}
        exec(self._code, {"__builtins__": {}}, found)
        return {name: found[name] for name in self.names}


def _target(written: str) -> ast.expr | None:
    """What is written between `for` and `in`; None if it is something else."""
    try:
        match ast.parse(f"for {written} in _: pass").body:
            case [ast.For(target=target, iter=ast.Name("_"))]:
                return target
    except SyntaxError:
        pass
    return None


class Problem(NamedTuple):
    """An item that cannot run: its number, its name, and why."""

    number: int
    name: str
    failure: Failure


class Items:
    """The items of a run, in their order.

    Each is bound to `targets`; without targets, it is the argument of a function. `total` is their number, None if it
    is not known before the last one has been taken. Functions whose globals are `namespace` get the rank's; names for
    which `stays` is true stay behind. `key_of`, which may be set, makes the key of an item's result from its values.

    OptionsError: the iterable is none.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        targets: Targets | None = None,
        namespace: Namespace | None = None,
        stays: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.key_of: Callable[[Mapping[str, Any]], str] = lambda values: ""
        self.total = _length(iterable)
        self.taken = 0
        try:
            self._iterator: Iterator[Any] = iter(iterable)
        except TypeError:
            raise OptionsError(f"foreach() needs something to iterate over, not {type(iterable).__name__}.") from None
        self._targets = targets
        self._namespace = namespace
        self._stays = stays
        self.shown: dict[int, dict[str, Any]] = {}  # the short values of each item, by number, for the table

    @property
    def names(self) -> tuple[str, ...]:
        """The names that an item has values for."""
        return (ITEM,) if self._targets is None else self._targets.names

    def take(self) -> Item | Problem | None:
        """Take and pack the next item; None if there is none. Raises what the user's iterable raises."""
        try:
            value = next(self._iterator)
        except StopIteration:
            self.total = self.taken
            return None
        number, self.taken = self.taken, self.taken + 1
        values = {ITEM: value}
        if self._targets is not None:
            try:
                values = self._targets.bind(value)
            except Exception as error:  # whatever unpacking the user's object raises
                summary = f"cannot be unpacked into `{self._targets.written}`: {error}"
                self.shown[number] = {}
                return Problem(number, short_repr(value, NAME_CHARACTERS), Failure("code", summary))
        self.shown[number] = {name: _shown(value) for name, value in values.items()}
        name = _name(values)
        packed = pack(values, self._namespace, self._stays)
        if packed.problems:
            problem = next(iter(packed.problems.values()))
            advice = f"{problem.advice[:1].upper()}{problem.advice[1:]}."
            failure = Failure("code", f"cannot be sent to a process: {problem.what}", advice=advice)
            return Problem(number, name, failure)
        # Copies, since the iterable may use an array again for the next item.
        return Item(number, name, (packed.payload, *map(bytes, packed.buffers)), self.key_of(values))


def _length(iterable: Any) -> int | None:
    """How many items there are; None if only their end will tell."""
    try:
        return len(iterable)
    except Exception:  # it has no length, or its class's __len__() refuses
        return None


def seed_of(run_seed: int, number: int) -> int:
    """The seed of an item, which does not depend on where and when it runs."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}:{number}".encode()).digest()[:4], "big")


def _name(values: Mapping[str, Any]) -> str:
    """A short text of an item's values: `store='a', lr=0.1`; that of a function's argument has no name."""
    if list(values) == [ITEM]:
        return short_repr(values[ITEM], NAME_CHARACTERS) or "None"
    each = NAME_CHARACTERS // max(1, len(values))
    return ", ".join(f"{name}={short_repr(value, each) or 'None'}" for name, value in values.items())


def _shown(value: Any) -> Any:
    """The value for the table: itself if it is small, otherwise a short text, so that it need not be kept."""
    is_small = isinstance(value, bool | int | float | complex | types.NoneType) or type(value).__module__ == "datetime"
    if is_small or (isinstance(value, str | bytes) and len(value) <= 1_000):
        return value
    if isinstance(value, tuple) and len(value) <= 10:
        return tuple(map(_shown, value))
    number = getattr(value, "item", None)  # NumPy's scalars
    if type(value).__module__ == "numpy" and number is not None and getattr(value, "shape", None) == ():
        return value
    return short_repr(value)
