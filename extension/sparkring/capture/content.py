"""Computes digests of the content of values, with the code and settings that the values use.

The same content has the same digest in every kernel. A digest does not depend on the hash seed, on the order of
definitions, or on the file names and line numbers of cells. Functions and classes of the notebook, and of the user's
own modules, count by their code, other functions and classes by their names. Objects count by what pickle would save.
The order of a dict counts; docstrings, and annotations of functions, do not. The environment and the global random
number generators belong to the process, and do not count.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import inspect
import itertools
import marshal
import pathlib
import re
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import cloudpickle

from sparkring.capture.names import global_names, names_in_commands
from sparkring.capture.picklability import FOUND_BY_NAME, by_reference
from sparkring.capture.reducers import comparable, reducers_for
from sparkring.capture.versions import installed

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"  # another version may compile the same code differently
_OBJECTS = 1_000_000  # at most this many objects are examined in one value
_MODULES = 100  # at most this many of the user's own modules are examined

# marshal writes values of these types, and of lists and tuples of them, in the same way in every process.
_ATOMS = frozenset({type(None), type(...), bool, int, float, complex, str, bytes})
_MARSHAL = 2  # later versions of the format also depend on which objects are shared
_LOCKS = ("lock", "RLock")
# What Python or a library derives from the rest of a class. Some of it differs from process to process.
_DERIVED = frozenset(
    ("__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__", "_abc_impl")
    + ("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__signature__")
    + ("__slotnames__",)  # pickle stores it in the class of an object
    + ("_backward_cls",)  # of a function for torch.autograd: it has the number of a counter
)
# What libraries derive from the rest of an object: SciPy when a matrix is used, scikit-learn from an address in memory.
_DERIVED_STATE = ("_has_sorted_indices", "_has_canonical_format", "_stop_words_id")
# State of the process that functions and objects refer to, by the names of its types. It counts only by its name.
_OF_PROCESS = {
    "Random": ("random", "_inst"),
    "RandomState": ("numpy.random.mtrand", "_rand"),
    "Generator": ("torch", "default_generator"),
    "_Environ": ("os", "environ"),
}
_OF_PYDANTIC = ("__pydantic_fields__", "__pydantic_decorators__")  # the others are derived from these
_HAS_DOCSTRING = 0x4000000  # in `code.co_flags`, from Python 3.14 on
_HEAP_TYPE = 1 << 9  # in `type.__flags__`: the type is not built in


class Contents:
    """Computes digests of values. `namespace` has the notebook's names and values.

    A digest covers everything in `namespace` that functions use, except for the names in `hidden`. Without `weights`,
    the arrays in models and optimizers count only by their shapes and types, and `training` of a torch module does not
    count. Without `modes`, only the latter does not count.
    """

    def __init__(
        self,
        namespace: Mapping[str, Any],
        hidden: Container[str] = (),
        *,
        weights: bool = True,
        modes: bool = True,
    ) -> None:
        self._namespace, self._hidden = namespace, hidden
        self._weights, self._modes = weights, modes and weights

    def parts(self, used: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
        """Return the digests of the values in `used`, and of the notebook's values that these values use, by name.

        Also return the names of values that cannot be compared completely.
        """
        digests: dict[str, str] = {}
        incomparable: list[str] = []
        waiting = dict(used)
        while waiting:
            name, value = waiting.popitem()
            walk = _DigestWalk(self._namespace, weights=self._weights, modes=self._modes)
            try:
                digests[name] = walk.of(value).hex()
            except Exception:  # of any type: comparing runs code of the values' classes
                digests[name] = ""
            if not walk.complete or not digests[name]:
                incomparable.append(name)
            for read in walk.reads - digests.keys():
                if read in self._namespace and read not in self._hidden and read not in used:
                    waiting[read] = self._namespace[read]
        return dict(sorted(digests.items())), sorted(incomparable)

    def digest(self, *values: Any) -> str | None:
        """Return the digest of `values` and of what they use; None if a value cannot be compared completely."""
        parts, incomparable = self.parts({"": values})
        return None if incomparable else digest(parts)


def digest(*values: Any) -> str:
    """Return the digest of plain `values`, such as settings, without what functions among them use."""
    return _DigestWalk({}, weights=True, modes=True).of(values).hex()


class _DigestWalk:
    """The digests of the objects of one value.

    An object that is reached again while it is being examined, as in a list that contains itself, counts by how far
    back it is. The digest of such a group of objects is known when its first object has been examined.
    """

    def __init__(self, namespace: Mapping[str, Any], *, weights: bool, modes: bool) -> None:
        self.reads: set[str] = set()  # the names that functions read from the namespace
        self.complete = True
        self._namespace, self._weights, self._modes = namespace, weights, modes
        self._main = getattr(sys.modules.get("__main__"), "__dict__", None)
        self._shapes_only = False
        self._left = _OBJECTS
        self._known: dict[int, tuple[Any, bytes]] = {}  # with the objects, because ids must not be used again
        self._open: dict[int, int] = {}  # for each object that is examined, how many were examined before it
        self._lowest = 0  # the earliest object that the current one refers to
        self._alive: list[Any] = []
        self._reducers: dict[type, tuple[Callable[[Any], Any], ...]] = {}
        self._names: dict[str, str] = {}  # of the layers of the current Keras model: other names for them

    def of(self, value: Any) -> bytes:
        """Return the digest of a value. Raises an error if it has too many objects, or is nested too deeply."""
        cls = type(value)
        if cls in _ATOMS:
            if self._names and cls is str:  # the names of variables are paths
                value = "/".join(self._names.get(part, part) for part in value.split("/"))
            return _hash(marshal.dumps(value, _MARSHAL))
        key = id(value)
        if key in self._known:
            return self._known[key][1]
        if key in self._open:
            self._lowest = min(self._lowest, self._open[key])
            return _hash(b"back", len(self._open) - self._open[key])
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {_OBJECTS:,} objects")
        at = len(self._open)
        self._open[key] = at
        self._alive.append(value)
        outer, self._lowest = self._lowest, at
        hashed = self._examined(value, cls)
        if self._lowest < at:  # it belongs to a group whose first object is still being examined
            self._lowest = min(outer, self._lowest)
            return hashed
        while len(self._open) > at:
            self._open.popitem()
        self._lowest = outer
        if not self._shapes_only:
            self._known[key] = value, hashed
        return hashed

    def _examined(self, value: Any, cls: type) -> bytes:
        if cls is list or cls is tuple:
            return _hash(cls.__name__.encode(), self._sequence(value))
        if cls is dict:
            if value is self._namespace or value is self._main:  # only the names that functions read count
                return _hash(b"notebook")
            return _hash(b"dict", self._items(value))
        if issubclass(cls, set | frozenset):
            return _hash(b"set", self.of(cls), *sorted(map(self.of, value)), self.of(getattr(value, "__dict__", None)))
        if issubclass(cls, types.FunctionType | type):
            return self._code(value, cls)
        if issubclass(cls, types.ModuleType):
            return self._module(value)
        if issubclass(cls, enum.Enum):
            return _hash(b"enum", *map(self.of, (cls, value._name_, value._value_)))
        if cls is types.CodeType:
            return self._bytecode(value)
        if cls is types.CellType:
            try:
                return _hash(b"cell", self.of(value.cell_contents))
            except ValueError:  # the variable has no value yet
                return _hash(b"empty cell")
        if cls in (staticmethod, classmethod):
            return _hash(cls.__name__.encode(), self.of(value.__func__))
        if issubclass(cls, property):
            return _hash(b"property", *map(self.of, (cls, value.fget, value.fset, value.fdel)))
        if cls is types.MethodType:
            return _hash(b"method", self.of(value.__self__), self.of(value.__func__))
        if cls is types.MappingProxyType:
            return _hash(b"mappingproxy", self.of(dict(value)))
        if issubclass(cls, weakref.ref):
            return _hash(b"weakref", self.of(value()))
        if issubclass(cls, bytearray | memoryview):
            return _hash(b"memory", self.of(cls), bytes(value))
        if issubclass(cls, pathlib.PurePath):
            return _hash(b"path", self.of(cls), str(value).encode(errors="surrogateescape"))
        if cls.__module__ == "_thread" and cls.__name__ in _LOCKS:
            return _hash(b"lock")
        if hasattr(cls, "__sparkring_content__"):
            return _hash(b"content", self.of(cls), self.of(value.__sparkring_content__()))
        if cls in FOUND_BY_NAME and value.__module__ == "__main__" and hasattr(value, "__dict__"):
            settings: Any = getattr(value, "cache_parameters", dict)()
            return _hash(b"found by name", value.__name__.encode(), self.of(vars(value)), self.of(settings))
        return self._array(value, cls) or self._object(value, cls)

    def _sequence(self, values: Any) -> bytes:
        if self._names:
            return b"".join(map(self.of, values))
        kinds = set(map(type, values))
        if kinds <= _ATOMS:
            return _hash(marshal.dumps(values, _MARSHAL))
        # Rows of plain values are many times as fast this way.
        if kinds <= {list, tuple} and _ATOMS.issuperset(map(type, itertools.chain.from_iterable(values))):
            return _hash(b"rows", marshal.dumps(values, _MARSHAL))
        if kinds == {dict} and all(map(_is_record, values)):
            return _hash(b"records", marshal.dumps([list(row.items()) for row in values], _MARSHAL))
        return b"".join(map(self.of, values))

    def _items(self, pairs: Mapping[Any, Any]) -> bytes:
        """Return the digest of a dict's keys and values in their order, on which code may depend."""
        if _is_record(pairs) and not self._names:
            return _hash(b"record", marshal.dumps(list(pairs.items()), _MARSHAL))
        return b"".join(self.of(part) for pair in pairs.items() for part in pair)

    def _attributes(self, attributes: Mapping[Any, Any]) -> bytes:
        """Return the digest of the attributes of an object, whatever their order."""
        if all(type(name) is str for name in attributes):
            attributes = dict(sorted(attributes.items(), key=lambda item: item[0]))
        return self._items(attributes)

    # ── Code ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _code(self, value: Any, cls: type) -> bytes:
        if by_reference(value):
            return _hash(b"name", f"{value.__module__}.{value.__qualname__}", _source(value.__module__))
        if issubclass(cls, types.FunctionType):
            reduced = self._reduced(value, cls)
            return self._function(value) if reduced is None else self._rebuilt(reduced)
        if not value.__flags__ & _HEAP_TYPE:
            return _hash(b"name", f"{value.__module__}.{value.__qualname__}")
        return self._class(value)

    def _function(self, function: types.FunctionType) -> bytes:
        code, defined_in = function.__code__, function.__globals__
        reads = {*global_names(code).reads, *names_in_commands(code)}
        used: dict[str, Any] = {}
        if defined_in is self._namespace:
            self.reads |= reads
        elif vars(sys.modules.get(str(defined_in.get("__name__")), types)) is not defined_in:
            used = {name: defined_in[name] for name in reads if name in defined_in}  # a namespace of exec()
        own = _source(str(defined_in.get("__name__"))) if not used else b""
        settings = function.__defaults__, function.__kwdefaults__, vars(function)
        parts = map(self.of, (code, *settings, *(function.__closure__ or ())))
        return _hash(b"function", function.__qualname__, own, *parts, self._attributes(used))

    def _bytecode(self, code: types.CodeType) -> bytes:
        if "__firstlineno__" in code.co_names:  # the body of a class has its line among its constants
            body = [
                instruction for instruction in dis.get_instructions(code) if instruction.opname not in ("RESUME", "NOP")
            ]
            plain = [
                (instruction.opname, instruction.argval)
                for instruction, after in zip(body, [*body[1:], body[-1]], strict=True)
                if after.argval not in ("__firstlineno__", "__static_attributes__")
            ]
            return _hash(b"class body", self.of(plain))
        flags, constants = code.co_flags, code.co_consts
        if _has_docstring(code):
            flags, constants = flags & ~_HAS_DOCSTRING, (None, *constants[1:])
        if code.co_filename.startswith("<attrs generated"):  # `__hash__` has a number that depends on the hash seed
            constants = tuple(constant for constant in constants if type(constant) is not int)
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, flags
        names = code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        handlers = getattr(code, "co_exceptiontable", b"")  # new in Python 3.11
        return _hash(b"code", code.co_code, handlers, *map(self.of, (counts, names, constants)))

    def _class(self, cls: type) -> bytes:
        attributes = {
            name: member
            for name, member in vars(cls).items()
            if name not in _DERIVED
            and not (name.startswith("__pydantic_") and name not in _OF_PYDANTIC)
            and not isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType)
        }
        if issubclass(cls, enum.Enum):
            attributes = {name: member for name, member in attributes.items() if not name.startswith("_value2member")}
        made_of = type(cls), *cls.__bases__, _annotations(cls)
        return _hash(b"class", cls.__qualname__, *map(self.of, made_of), self._attributes(attributes))

    def _module(self, module: types.ModuleType) -> bytes:
        name = str(getattr(module, "__name__", ""))
        if by_reference(module):
            return _hash(b"module", name, _source(name))
        attributes = {name: member for name, member in vars(module).items() if not name.startswith("__")}
        return _hash(b"new module", name, self._attributes(attributes))

    # ── Arrays and other objects ──────────────────────────────────────────────────────────────────────────────────────

    def _array(self, value: Any, cls: type) -> bytes | None:
        """Return the digest of an array, a tensor or a table; None for other objects."""
        numpy: Any = sys.modules.get("numpy")
        torch: Any = sys.modules.get("torch")
        pandas: Any = sys.modules.get("pandas")
        if numpy is not None and cls is numpy.ndarray:
            about = _hash(b"array", repr(value.dtype), repr(value.shape))
            if self._shapes_only:
                return about
            if value.dtype.names:  # there may be undefined bytes between the fields
                return _hash(about, *(self.of(value[name]) for name in value.dtype.names))
            if value.dtype.hasobject:
                return _hash(about, self._sequence(value.ravel().tolist()))
            if value.dtype.char in "gG":  # a long double has undefined bytes, too
                return _hash(about, *map(repr, value.ravel()))
            return _hash(about, numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8).data)
        if numpy is not None and issubclass(cls, numpy.generic) and cls is not numpy.object_:
            return _hash(b"scalar", self.of(cls), self.of(numpy.asarray(value)))
        if hasattr(torch, "Tensor") and isinstance(value, torch.Tensor):
            if torch.nn.parameter.is_lazy(value):
                return None
            plain = value.layout is torch.strided and not value.is_quantized and value.device.type != "meta"
            if not plain and not self._shapes_only:
                return None
            about = _hash(f"{value.dtype}{tuple(value.shape)}{value.requires_grad}{value.device.type}", self.of(cls))
            if self._shapes_only:
                return about
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            memory = flat.view(torch.uint8).numpy().data
            gradient = value.grad if value.is_leaf else None
            return _hash(about, memory, self.of(gradient), self.of(getattr(value, "__dict__", None)))
        if hasattr(torch, "TypedStorage") and cls is torch.TypedStorage:
            storage = value._untyped_storage.cpu()  # untyped() warns
            return _hash(f"storage {value.dtype}", torch.tensor([], dtype=torch.uint8).set_(storage).numpy().data)
        if hasattr(pandas, "DataFrame") and cls is pandas.DataFrame:
            # The columns one by one: how pandas arranges them in blocks depends on how the table was made and shown.
            columns = [value.iloc[:, at].array for at in range(value.shape[1])]
            columns = [column.to_numpy() if isinstance(column.dtype, numpy.dtype) else column for column in columns]
            unique = value.flags.allows_duplicate_labels
            return _hash(b"table", *map(self.of, (value.columns, value.index, value.attrs, unique, columns)))
        return None

    def _object(self, value: Any, cls: type) -> bytes:
        """Return the digest of what pickle would save of an object."""
        if cls.__module__ == "builtins" and by_reference(value):
            return self._code(value, cls)  # a function that is built in
        if cls.__module__ == "torch.utils.hooks" and cls.__name__ == "RemovableHandle":  # it has a counter's number
            return _hash(b"hook", self.of((value.hooks_dict_ref() or {}).get(value.id)))
        home, name = _OF_PROCESS.get(cls.__name__, ("", ""))
        if home and getattr(sys.modules.get(home), name, None) is value:
            return _hash(b"of the process", home, name)
        if cls.__module__ == "pydantic._internal._decorators" and hasattr(value, "info"):
            return _hash(b"decorator", self.of(value.info))  # the rest names the class by its address
        is_model = not self._weights and not self._shapes_only and _is_model(cls)
        names = self._names
        try:
            self._shapes_only |= is_model
            if not names and hasattr(cls, "_flatten_layers"):
                self._names = _numbered(layer.name for layer in value._flatten_layers())
            reduced = self._reduced(value, cls)
            if reduced is None:
                reduce = cloudpickle.Pickler.dispatch_table.get(cls)
                reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except RecursionError:
            raise
        except Exception:  # of any type: the value's class has code of its own for pickle
            self.complete = False
            return _hash(b"opaque", self.of(cls))
        else:
            if isinstance(reduced, str):
                return _hash(b"global", self.of(cls), str(getattr(value, "__module__", "")), reduced)
            return self._rebuilt(self._settled(reduced, cls))
        finally:
            self._shapes_only &= not is_model
            self._names = names

    def _reduced(self, value: Any, cls: type) -> Any:
        """Return how the value is packed for ranks if it is not packed as pickle or cloudpickle would; otherwise None.

        Raises Refused if it cannot be packed.
        """
        if cls not in self._reducers:
            self._reducers[cls] = reducers_for(cls)
        return next((reduced for reducer in self._reducers[cls] if (reduced := reducer(value)) is not None), None)

    def _settled(self, reduced: tuple[Any, ...], cls: type) -> tuple[Any, ...]:
        """Return the reduced object without what differs from process to process, or does not count."""
        torch_nn: Any = sys.modules.get("torch.nn")
        if not isinstance(reduced[2] if len(reduced) > 2 else None, dict):
            return reduced
        made, arguments, state, *more = reduced
        if not state.keys().isdisjoint(_DERIVED_STATE):
            state = {name: value for name, value in state.items() if name not in _DERIVED_STATE}
        if hasattr(torch_nn, "Module") and issubclass(cls, torch_nn.Module):
            # Hooks have the numbers of a counter of the process.
            state = {
                name: list(value.values()) if _holds_hooks(name, value) else value for name, value in state.items()
            }
            state = state if self._modes else {name: value for name, value in state.items() if name != "training"}
        elif self._shapes_only and "param_groups" in state:  # an optimizer, whose state depends on the steps taken
            state = {name: value for name, value in state.items() if name != "state"}
        return made, arguments, state, *more

    def _rebuilt(self, reduced: tuple[Any, ...]) -> bytes:
        made, arguments, state, items, pairs, set_state = (*reduced, None, None, None, None)[:6]
        hasheds = [self.of(made), self.of(comparable(made, arguments)), self.of(set_state)]
        hasheds.append(_hash(b"state", self._attributes(state)) if type(state) is dict else self.of(state))
        hasheds.append(b"" if items is None else _hash(self._sequence(list(items))))
        hasheds.append(b"" if pairs is None else _hash(self._items(dict(pairs))))
        return _hash(b"object", *hasheds)


def _has_docstring(code: types.CodeType) -> bool:
    """Whether the first constant of a function's code is its docstring, and nothing else."""
    if not code.co_consts or type(code.co_consts[0]) is not str:
        return False
    if sys.version_info >= (3, 14):
        has = bool(code.co_flags & _HAS_DOCSTRING)
    else:
        has = bool(code.co_flags & inspect.CO_NEWLOCALS) and not code.co_name.startswith("<")
    return has and not any(
        instruction.opcode in dis.hasconst and instruction.arg == 0 for instruction in dis.get_instructions(code)
    )


def _is_record(pairs: Mapping[Any, Any]) -> bool:
    """Whether a dict maps strings to plain values."""
    return {str}.issuperset(map(type, pairs)) and _ATOMS.issuperset(map(type, pairs.values()))


def _numbered(names: Iterable[str]) -> dict[str, str]:
    """Return new names for Keras layers. Keras numbers the layers of a kernel: `dense`, `dense_1`, `dense_2`, …"""
    numbers: dict[str, dict[str, int]] = {}
    for name in names:
        same = numbers.setdefault(re.sub(r"_\d+(?=_|$)", "", name), {})
        same.setdefault(name, len(same))
    return {name: f"layer {base} {at}" for base, same in numbers.items() for name, at in same.items()}


def _holds_hooks(name: str, value: Any) -> bool:
    return "_hooks" in name and isinstance(value, dict)


def _annotations(value: Any) -> dict[str, Any]:
    with contextlib.suppress(Exception):  # from Python 3.14 on, annotations are evaluated only now
        return dict(inspect.get_annotations(value))
    return {}


def _is_model(cls: type) -> bool:
    """Whether the values of a type are models, layers or optimizers, whose arrays training changes."""
    known = {("torch", "Module"), ("torch", "Optimizer"), ("keras", "Layer"), ("keras", "Optimizer")}
    known |= {("tf_keras", "Layer"), ("tf_keras", "Optimizer")}
    return any((str(base.__module__).partition(".")[0], base.__name__) in known for base in cls.__mro__)


def _hash(*parts: Any) -> bytes:
    import xxhash  # only if something is kept

    hasher = xxhash.xxh3_128()
    for part in parts:
        piece = part if isinstance(part, bytes | memoryview) else str(part).encode(errors="surrogatepass")
        # The length comes first, so that two parts differ from one part that consists of both.
        hasher.update(len(piece).to_bytes(8, "little"))
        hasher.update(piece)
    digest: bytes = hasher.digest()
    return digest


# ── The user's own modules ───────────────────────────────────────────────────────────────────────────────────────────

_sources: dict[tuple[str, int, int], bytes] = {}


def _source(name: str) -> bytes:
    """Return a digest of the source of a module that the user writes, and of such modules that it imports.

    Return b'' for an installed module.
    """
    waiting, seen, digests = [name], {name}, list[bytes]()
    while waiting and len(seen) <= _MODULES:
        module = sys.modules.get(waiting.pop())
        path = getattr(module, "__file__", None)
        if module is None or not isinstance(path, str) or not _is_own(module.__name__, path):
            continue
        digests.append(_compiled(path))
        names = {_home(member) for member in list(vars(module).values())} - seen
        waiting += sorted(names)
        seen |= names
    return _hash(*sorted(digests)) if digests else b""


def _home(value: Any) -> str:
    named = isinstance(value, type | types.FunctionType)
    return str(value.__name__ if isinstance(value, types.ModuleType) else value.__module__ if named else "")


def _is_own(name: str, path: str) -> bool:
    root = name.partition(".")[0]
    if name == "__main__" or root in _OTHERS or root in sys.stdlib_module_names or not path.endswith(".py"):
        return False
    folders = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    inside = any(path.startswith(f"{folder}/") for folder in folders)
    return not inside and "-packages/" not in path and root not in installed()


_OTHERS = ("sparkring", "pyspark", "py4j", "cloudpickle", "dbruntime", "IPython")


def _compiled(path: str) -> bytes:
    """Return a digest of a file's code, without its comments."""
    with contextlib.suppress(OSError):
        at = pathlib.Path(path).stat()
        key = path, at.st_mtime_ns, at.st_size
        if key not in _sources:
            text = pathlib.Path(path).read_bytes()
            try:
                code = compile(text, "", "exec", dont_inherit=True)
                _sources[key] = _DigestWalk({}, weights=True, modes=True).of(code)
            except (SyntaxError, ValueError):
                _sources[key] = _hash(text)
        return _sources[key]
    return b""
