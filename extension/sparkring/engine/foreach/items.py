"""Takes items from an iterable, one at a time, and packs their values for the ranks."""

from __future__ import annotations

import ast
import collections
import itertools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from sparkring.capture.packing import Packed, PackedObjects, pack
from sparkring.capture.picklability import Namespace
from sparkring.capture.snapshots import ATOMS, ValueSnapshot
from sparkring.capture.versions import modules_of
from sparkring.engine.foreach.schedule import Item
from sparkring.engine.foreach.steering import Steering
from sparkring.errors import CaptureError, OptionsError
from sparkring.history import describe
from sparkring.history.events import Failure
from sparkring.runtime.parameters import Parameters, as_text
from sparkring.runtime.report import short_repr
from sparkring.wire.messages import Script

NAME_CHARACTERS = 100
_SCRIPTS = "%run"  # the name under which an item's scripts are included in its key
# Iterators that run no code of the user.
_STILL: tuple[Any, ...] = (
    *((), [], {}, {}.values(), {}.items(), set(), "", range(0), collections.deque(), collections.OrderedDict()),
    *(reversed([]), reversed(()), reversed({}), reversed({}.values()), reversed({}.items())),
    # These copy their arguments before they yield anything.
    *(itertools.product(), itertools.permutations(()), itertools.combinations((), 0)),
    itertools.combinations_with_replacement((), 0),
)
_QUIET = tuple(type(iter(still)) for still in _STILL)
_DATA = (list, tuple, dict, set, frozenset, bytearray, collections.deque)
ITEM = "item"  # if a function is run instead of a cell, tables give its argument this name


class Targets:
    """The targets of a for clause, such as `store, (lr, *rest)`. bind() binds them to an item as a for loop does.

    `names` are the names that the targets bind, and `only` is the name if the target is a single name, otherwise "".
    Raises OptionsError if the targets contain anything but names.
    """

    def __init__(self, written: str) -> None:
        self.written = written.strip()
        clause = f"for {self.written} in _: pass"
        target = _target(clause)
        if target is None or any(isinstance(node, ast.Attribute | ast.Subscript) for node in ast.walk(target)):
            raise OptionsError(f"`{self.written}` cannot be bound to items: write only names, as in `store, lr in …`.")
        self.names = tuple(node.id for node in ast.walk(target) if isinstance(node, ast.Name))
        self.only = target.id if isinstance(target, ast.Name) else ""
        self._code = compile(clause, "<targets>", "exec")

    def bind(self, value: Any) -> dict[str, Any]:
        """Assign `value` to the targets, and return the value of each name. Raises whatever the assignment raises."""
        namespace = {"_": [value]}
        exec(self._code, {"__builtins__": {}}, namespace)
        return {name: namespace[name] for name in self.names}


def _target(clause: str) -> ast.expr | None:
    """Return the syntax tree of the targets of a for statement; None unless `clause` is exactly one such statement."""
    try:
        match ast.parse(clause).body:
            case [ast.For(target=target, iter=ast.Name("_"), body=[ast.Pass()])]:
                return target
    except SyntaxError:
        pass
    return None


class ItemProblem(NamedTuple):
    """An item that cannot run: its number, its name, and the reason as a Failure."""

    number: int
    name: str
    failure: Failure


class Items:
    """The items of a run, in order.

    Each item is bound to `targets`; without targets, it is passed to a function, as its parameter `argument`. If a
    search has a single parameter, and the only target or `argument` has the parameter's name, an item is the
    parameter's value. `total` is the number of items, or
    None if the iterable has no length and not all items have been taken yet. If the globals of a function in an item
    are `namespace`, the function is sent without its globals, and uses those of the rank. Names for which `stays`
    returns True are not sent with the function. `key_of` maps an item's values to the key under which the item's result
    is kept; set this attribute if results are kept. `scripts_of` maps an item's values to the scripts that only this
    item runs, and the notebook's names that these scripts read. `steering` is the iterator if it follows the progress
    of its items; otherwise None.

    Raises OptionsError if `iterable` cannot be iterated over, or if it is a search that does not fit the targets.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        targets: Targets | None = None,
        namespace: Namespace | None = None,
        stays: Callable[[str], bool] = lambda name: False,
        scripts_of: Callable[[Mapping[str, Any]], tuple[tuple[Script, ...], list[str]]] = lambda values: ((), []),
        argument: str = "",
    ) -> None:
        self._scripts_of = scripts_of
        self.key_of: Callable[[Mapping[str, Any]], str] = lambda values: ""
        # Whether items can be taken at once. The code of any other iterable may wait, even for the results of items.
        self.at_hand = type(iterable) in (list, tuple, range)
        self.total = _length(iterable)
        self.taken = 0
        try:
            self._iterator: Iterator[Any] = iter(iterable)
        except TypeError:
            raise OptionsError(f"foreach() needs something to iterate over, not {type(iterable).__name__}.") from None
        self.steering = self._iterator if isinstance(self._iterator, Steering) else None
        self._is_value = False  # whether a trial of the search is bound as its only value
        if self.steering is not None:
            name = argument if targets is None else targets.only
            self._is_value = self.steering.names == (name,)
            if targets is not None:
                _check_targets(targets, self.steering.names)
            if name in self.steering.names and not self._is_value:
                several = "" if targets is None else f"`{', '.join(self.steering.names)}`, or "
                raise OptionsError(
                    f"`{name}` is the name of one parameter of the search, but would get all of them: write {several}"
                    "another name, such as `trial`."
                )
        self._targets = targets
        self._namespace = namespace
        self._objects: PackedObjects | None = None
        self._captured: dict[str, tuple[Any, ValueSnapshot]] = {}
        self._stays = stays
        self.shown: dict[int, dict[str, Any]] = {}  # what the table shows for each item, by number

    @property
    def left(self) -> int | None:
        """How many items have not been taken yet; None if that is unknown."""
        return None if self.total is None else self.total - self.taken

    @property
    def names(self) -> tuple[str, ...]:
        """The names of an item's values."""
        if self.steering is not None:
            return self.steering.names
        return (ITEM,) if self._targets is None else self._targets.names

    def only_the_first(self) -> None:
        """Drop all items except the first one."""
        self._iterator = itertools.islice(self._iterator, 1)
        self.total = None if self.total is None else min(1, self.total)

    def take(self) -> Item | ItemProblem | None:
        """Take the next item and pack it; return None if there are no more. Raises what the user's iterable raises."""
        try:
            value = next(self._iterator)
        except StopIteration:
            self.total = self.taken
            return None
        number, self.taken = self.taken, self.taken + 1
        parameters = value if isinstance(value, Parameters) else None
        if self._is_value:
            (value,) = value
        values = {ITEM: value}
        if self._targets is not None:
            try:
                values = self._targets.bind(value)
            except Exception as error:  # of any type: unpacking runs the user's code
                summary = f"cannot be unpacked into `{self._targets.written}`: {error}"
                self.shown[number] = {}
                return ItemProblem(number, short_repr(value, NAME_CHARACTERS), Failure("code", summary))
        named = values if parameters is None else parameters._asdict()
        self.shown[number] = {name: _shown(content) for name, content in named.items()}
        name = _name(named) if parameters is None else _described(named)
        try:
            scripts, read = self._scripts_of(values)
        except CaptureError as error:
            return ItemProblem(number, name, Failure("code", str(error)))
        key = self.key_of({**values, _SCRIPTS: [script.source for script in scripts]} if scripts else values)
        values |= {name: self._namespace[name] for name in read} if self._namespace else {}
        packed = self._pack(values)
        if packed.problems:
            problem = next(iter(packed.problems.values()))
            advice = f"{problem.advice[:1].upper()}{problem.advice[1:]}."
            failure = Failure("code", f"cannot be sent to a process: {problem.what}", advice=advice)
            return ItemProblem(number, name, failure)
        # Copy the buffers: the iterable may reuse an array for the next item before this item has been sent.
        parts = (packed.payload, *map(bytes, packed.buffers))
        modules = modules_of(value for value in values.values() if not _is_atom(value))
        return Item(number, name, parts, key, scripts, {} if parameters is None else _recorded(named), modules)

    def share(self, objects: PackedObjects | None, captured: Mapping[str, Any]) -> None:
        """Let items share the objects that are packed with the work, whose values are `captured`.

        The iterable may change such an object between two items. Then the item gets the object as it is now, not as it
        was packed with the work.
        """
        self._objects = objects
        if objects is None or _is_quiet(self._iterator) or self.steering is not None:
            return
        self._objects = objects.only(lambda value: type(value) not in _DATA and not _is_array(value))
        self._captured = {name: (value, snapshot) for name, value in captured.items()
                          if not (snapshot := ValueSnapshot(value)).is_data}  # fmt: skip

    def _pack(self, values: Mapping[str, Any]) -> Packed:
        if all(map(_is_atom, values.values())):
            return pack({**values}, self._namespace, self._stays)
        packed = pack({**values}, self._namespace, self._stays, after=self._objects)
        if self._captured and not all(map(_is_code, packed.shared)):
            assert self._objects is not None
            if not all(before.equals(ValueSnapshot(value)) for value, before in self._captured.values()):
                self._objects, self._captured = self._objects.only(_is_code), {}
                packed = pack({**values}, self._namespace, self._stays, after=self._objects)
        return packed

    def forget_from(self, number: int) -> None:
        """Forget the items from `number` on: they were taken, but the run ended before any of them began."""
        for item_number in range(number, self.taken):
            self.shown.pop(item_number, None)


def _check_targets(targets: Targets, names: tuple[str, ...]) -> None:
    """Raise OptionsError if the targets do not fit the parameters of a search, or are in another order."""
    written = ", ".join(names)
    try:
        bound = targets.bind(Parameters(names, names))
    except (TypeError, ValueError):
        raise OptionsError(
            f"`{targets.written}` cannot be bound to the parameters of the search: write `{written}`, or one name."
        ) from None
    mixed = [name for name, value in bound.items() if value in names and value != name and name in names]
    if mixed:
        raise OptionsError(f"`{targets.written}`: the search has its parameters in another order: write `{written}`.")


def _is_atom(value: Any) -> bool:
    return type(value) in ATOMS or (type(value) is tuple and all(map(_is_atom, value)))


def _is_quiet(iterator: Any) -> bool:
    """Return whether an iterator runs no code of the user."""
    if type(iterator) in (enumerate, zip):
        return all(_is_quiet(inner) for inner in iterator.__reduce__()[1] if isinstance(inner, Iterator))
    return type(iterator) in _QUIET


def _is_code(value: object) -> bool:
    return isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType)


def _is_array(value: object) -> bool:
    return type(value).__module__.partition(".")[0] in ("numpy", "pandas", "polars", "pyarrow", "torch")


def _recorded(parameters: Mapping[str, Any]) -> dict[str, float | str]:
    """Return a trial's parameters as the record keeps them: finite numbers unchanged, other values as short strings."""
    return {
        name: value if type(value) in (int, float) and math.isfinite(value) else as_text(value)
        for name, value in parameters.items()
    }


def _length(iterable: Any) -> int | None:
    """Return the number of items; None if len() does not work on the iterable."""
    try:
        return len(iterable)
    except Exception:  # it has no length, or its __len__() raises an error
        return None


def _name(values: Mapping[str, Any]) -> str:
    """Describe an item's values in a short string, such as `store='a', lr=0.1`.

    For a function's argument, the string is only the value. DataFrames and their rows are left out if the item also has
    other values.
    """
    values = {name: value for name, value in values.items() if not _is_rows(value)} or values
    if list(values) == [ITEM]:
        match values[ITEM]:
            case (key, rows) if _is_rows(rows):
                return _text(key, NAME_CHARACTERS)
        return _text(values[ITEM], NAME_CHARACTERS)
    characters = NAME_CHARACTERS // max(1, len(values))
    return ", ".join(f"{name}={_text(value, characters)}" for name, value in values.items())


def _text(value: Any, most: int) -> str:
    return short_repr(str(value) if isinstance(value, PurePath) else value, most) or "None"


def _described(parameters: Mapping[str, Any]) -> str:
    """Describe a trial's parameters in a short string, such as `lr=0.001, width=64`. Floats are rounded as in views."""
    texts = {
        name: describe.number(value) if isinstance(value, float) else as_text(value)
        for name, value in parameters.items()
    }
    return ", ".join(f"{name}={text}" for name, text in texts.items())


def _is_rows(value: Any) -> bool:
    """Return whether a value is a table, or stands for rows of a DataFrame, as an item of partitions() does."""
    kind = type(value)
    is_table = kind.__module__.partition(".")[0] in ("pandas", "polars") and kind.__name__ in ("DataFrame", "Series")
    return is_table or hasattr(kind, "__sparkring_content__")


def _shown(value: Any) -> Any:
    """Return what the table shows for a value: the value itself if it is small, otherwise a short string."""
    is_small = isinstance(value, bool | int | float | complex | types.NoneType | PurePath)
    is_small = is_small or type(value).__module__ == "datetime"
    if is_small or (isinstance(value, str | bytes) and len(value) <= 1_000):
        return value
    if isinstance(value, tuple) and len(value) <= 10:
        return tuple(map(_shown, value))
    is_numpy_scalar = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value if is_numpy_scalar else short_repr(value)
