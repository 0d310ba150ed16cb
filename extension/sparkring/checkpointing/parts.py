"""Converts the objects in a state to the values that a checkpoint keeps, and restores these values into the objects.

A state is what a training run needs to continue: dicts, lists and tuples of models, optimizers, data, numbers. The tree
of a state has the same structure, but in place of each object, it has a dict with the saved values of the object. Under
the key MARK, this dict has the name of the object's kind. Trees contain only values that `tree.flatten()` accepts.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sparkring.checkpointing import keras_3_state, tensorflow_state, torch_state
from sparkring.checkpointing import tree as tree_module
from sparkring.checkpointing.tree import Raw
from sparkring.checkpointing.variables import Variables
from sparkring.errors import CheckpointError, SparkringError

# NumPy 2 has moved byte_bounds().
_byte_bounds: Callable[[npt.NDArray[Any]], tuple[int, int]] = (
    np.lib.array_utils.byte_bounds if hasattr(np.lib, "array_utils") else np.byte_bounds
)

MARK = "·kind"
_ESCAPED = "dict"  # a user's dict that itself has the key MARK
_PIECE, _WHOLE = "piece", "torch"  # the kinds of torch's tensors: spread over the ranks (FSDP), or not
_STATE_DICT = "state_dict"
_DATACLASS = "dataclass"
_CALLED = "state"  # what error messages call the whole state

_AtTensor = Callable[[dict[str, Any], tuple[Any, ...], str], Any]

# Classes whose instances are saved in another way even if the class is a dataclass, too.
_NOT_DATACLASSES = (type, dict, list, tuple, str, bytes, int, float)
_AT_ONCE = (type(None), bool, int, float, str, bytes, np.ndarray, Raw)


class StateKind(NamedTuple):
    """How objects of one kind are saved.

    `take(value, path)` returns what is saved, a dict. `put(value, tree, path)` restores it into the object, and may
    return a replacement for the object. `plain(tree)` returns a form that can be used without the object. A
    `replaceable` object is treated like a number: if the saved values do not fit, a new object replaces it.
    """

    owns: Callable[[Any], bool]
    take: Callable[[Any, str], dict[str, Any]]
    put: Callable[[Any, dict[str, Any], str], Any]
    plain: Callable[[dict[str, Any]], Any]
    replaceable: bool = False


def tree_of(value: Any, path: str = _CALLED, within: tuple[int, ...] = ()) -> Any:
    """Return the tree of a state. Its arrays share the memory of the state's objects wherever possible.

    `within` are the ids of the containers around the value. Raises CheckpointError, with the path, for an object whose
    state cannot be read.
    """
    if isinstance(value, _AT_ONCE):
        return value
    name = _kind_of(value)
    if name and name != _DATACLASS:
        return {MARK: name, "class": type(value).__name__, **_KINDS[name].take(value, path)}
    if not (name or isinstance(value, dict | list | tuple)):
        return value
    if id(value) in within:
        raise CheckpointError(f"{path} contains itself, so a checkpoint cannot hold it: leave it out.")
    if len(within) > tree_module.DEPTH:
        return value  # flatten() refuses a state with so many levels
    within = (*within, id(value))
    if name:
        attributes = _attributes(value).items()
        return {
            MARK: name,
            "class": type(value).__name__,
            "home": (type(value).__module__, type(value).__qualname__),
            "fields": [field.name for field in dataclasses.fields(value)],
            "value": {key: tree_of(item, f"{path}.{key}", within) for key, item in attributes},
        }
    if isinstance(value, dict):
        children = {key: tree_of(item, f"{path}[{key!r}]", within) for key, item in value.items()}
        return {MARK: _ESCAPED, "value": children} if MARK in children else children
    items = [tree_of(item, f"{path}[{index}]", within) for index, item in enumerate(value)]
    return tuple(items) if isinstance(value, tuple) else items


def refuse_pieces(tree: Any) -> None:
    """Raise CheckpointError, with the path, if the tree has only this rank's piece of a tensor."""
    _with_pieces(tree, lambda piece, keys, path: torch_state.refuse_piece(path), _CALLED)


def put_back(value: Any, tree: Any, path: str = _CALLED) -> Any:
    """Restore a tree into the objects of a state, in place, and return the state or its replacement.

    Plain values are replaced by the saved values; arrays and tensors that fit are overwritten. The caller must not use
    the tree's arrays afterwards, because new objects may share their memory. Raises CheckpointError, with the path, for
    a value that does not fit. Some of the objects may then already have been restored.
    """
    name, saved = _kind_of(value), _saved_kind(tree)
    if name and (saved == name or not _KINDS[name].replaceable):
        if saved != name:
            raise CheckpointError(
                f"{path} is a {type(value).__name__}, but the checkpoint has {_described(tree)} there. Make the state "
                "the same as when it was saved, or start over with --fresh."
            )
        made = _KINDS[name].put(value, tree, path)
        return value if made is None else made
    inner = tree["value"] if saved == _ESCAPED else None if saved else tree
    if isinstance(value, dict) and isinstance(inner, dict):
        return _put_dict(value, inner, path)
    if isinstance(value, list | tuple) and isinstance(inner, list | tuple):
        return _put_items(value, inner, path)
    if _holds_objects(value):
        raise CheckpointError(
            f"{path} contains objects, but the checkpoint has {_described(tree)} there. Make the state the same as "
            "when it was saved, or start over with --fresh."
        )
    if _fits(value, inner):
        if value is not inner:  # if the file was read into `value`, `inner` is the same array
            value[...] = inner
        return value
    return _made_anew(tree, path)


def plain(tree: Any, make_dataclass: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the contents of a tree in a form that can be used without the objects of a state.

    Dataclasses become dicts, unless `make_dataclass` makes them from their trees. Saved tensors become tensors again
    (only this rank's piece, if they are spread over the ranks). Objects with a state_dict() become that dict, and Keras
    models are rebuilt if possible. The caller must not use the tree's arrays afterwards.
    """
    kind = _saved_kind(tree)
    if kind == _DATACLASS and make_dataclass is not None:
        return make_dataclass(tree)
    if kind and kind != _ESCAPED:
        return _KINDS[kind].plain(tree)
    if isinstance(tree, dict):
        return {key: plain(item, make_dataclass) for key, item in (tree["value"] if kind else tree).items()}
    if isinstance(tree, list | tuple):
        return type(tree)(plain(item, make_dataclass) for item in tree)
    return tree


def memory_of(value: Any) -> dict[str, npt.NDArray[Any]]:
    """Return those arrays of a state that a file can be read into directly, keyed by their names in flatten().

    There are no such arrays if the state cannot be saved; put_back() then reports the error.
    """
    try:
        _, leaves = tree_module.flatten(tree_of(value), _CALLED)
    except CheckpointError:
        return {}
    return in_place(leaves)


def in_place(leaves: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Return those leaves of a state's tree into which a file can be read directly.

    There are none if TensorFlow is imported, because the tree's arrays for TensorFlow variables are copies.
    """
    if "tensorflow" in sys.modules:
        return {}
    arrays = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, np.ndarray)}
    shared = _sharing(arrays)  # reading into one of these arrays would overwrite another
    return {
        name: array
        for name, array in arrays.items()
        if array.flags.c_contiguous and array.flags.writeable and name not in shared
    }


def check_shared(value: Any, tree: Any) -> None:
    """Raise CheckpointError if arrays of a restored state share memory although their saved values differ."""
    pairs = dict(_array_pairs(value, tree, _CALLED))
    for path in sorted(_sharing({path: array for path, (array, _) in pairs.items()})):
        array, saved = pairs[path]
        if array.tobytes() != saved.tobytes():
            raise CheckpointError(
                f"{path} shares its memory with another array of the state, but the checkpoint has different values "
                "for them: make one of them a copy()."
            )


def versions(value: Any) -> dict[str, str]:
    """Return the versions of the data sets in a state, by the names of the data sets."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return {name: version for item in value for name, version in versions(item).items()}
    dataset = getattr(value, "dataset", None) if _has_state_dict(value) else None
    name, version = getattr(dataset, "name", None), getattr(dataset, "version", None)
    return {name: version} if isinstance(name, str) and isinstance(version, str) else {}


def _array_pairs(value: Any, tree: Any, path: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield (path, (array, saved array)) for each array in the dicts, lists and tuples of a restored state."""
    if isinstance(value, np.ndarray) and isinstance(tree, np.ndarray):
        yield path, (value, tree)
    elif isinstance(value, dict) and isinstance(tree, dict):
        for key in value.keys() & tree.keys():
            yield from _array_pairs(value[key], tree[key], f"{path}[{key!r}]")
    elif _saved_kind(tree) == _DATACLASS and _is_dataclass(value):
        yield from _array_pairs(_attributes(value), tree["value"], path)
    elif isinstance(value, list | tuple) and isinstance(tree, list | tuple):
        for index, (item, saved) in enumerate(zip(value, tree, strict=False)):
            yield from _array_pairs(item, saved, f"{path}[{index}]")


def _sharing(arrays: Mapping[str, npt.NDArray[Any]]) -> set[str]:
    """Return the names of the arrays whose ranges of memory overlap."""
    names: set[str] = set()
    last, end = "", 0
    for start, stop, name in sorted((*_byte_bounds(array), name) for name, array in arrays.items() if array.size):
        if start < end:
            names |= {last, name}
        if stop > end:
            last, end = name, stop
    return names


# ── containers ────────────────────────────────────────────────────────────────


def _put_dict(value: dict[Any, Any], tree: dict[Any, Any], path: str) -> Any:
    for key in list(value):
        if key in tree:
            value[key] = put_back(value[key], tree[key], f"{path}[{key!r}]")
        elif path == _CALLED or _holds_objects(value[key]):
            raise CheckpointError(
                f"{path}[{key!r}]: the checkpoint has no value for this key; for {path} it has "
                f"{', '.join(map(repr, tree)) or 'nothing'}. Leave the key out of the state that you pass to "
                "restore(), or start over with --fresh."
            )
        else:
            del value[key]
    for key in tree:
        if key not in value:
            value[key] = _made_anew(tree[key], f"{path}[{key!r}]")
    return value


def _put_items(value: list[Any] | tuple[Any, ...], tree: list[Any] | tuple[Any, ...], path: str) -> Any:
    if len(value) != len(tree) and _holds_objects(value):
        raise CheckpointError(
            f"{path} has {len(value):,} items, but {len(tree):,} in the checkpoint. Make the state the same as when it "
            "was saved, or start over with --fresh."
        )
    both = min(len(value), len(tree))
    items = [put_back(value[index], tree[index], f"{path}[{index}]") for index in range(both)]
    items += [_made_anew(tree[index], f"{path}[{index}]") for index in range(both, len(tree))]
    if isinstance(value, list):
        value[:] = items
        return value
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def _made_anew(tree: Any, path: str) -> Any:
    """Return plain(tree), for a tree that cannot be restored into an object of the state.

    Raises CheckpointError for a piece of a tensor, since only a tensor that is spread in the same way can receive it,
    and for a dataclass that this process does not have.
    """
    whole = _with_pieces(tree, lambda piece, keys, path: torch_state.joined(piece, None, path), path)
    return plain(whole, partial(_new_dataclass, path=path))


def _with_pieces(
    tree: Any, put: _AtTensor, path: str, keys: tuple[Any, ...] = (), whole: _AtTensor = lambda whole, keys, path: whole
) -> Any:
    """Replace each piece in a tree by put(piece, keys, path), and each other tensor by whole(tensor, keys, path)."""
    kind = _saved_kind(tree)
    if kind in (_PIECE, _WHOLE):
        return (put if kind == _PIECE else whole)(tree, keys, path)
    if kind in (_STATE_DICT, _DATACLASS):
        return {**tree, "value": _with_pieces(tree["value"], put, path, keys, whole)}
    if kind and kind != _ESCAPED:
        return tree
    if isinstance(tree, dict):
        items = {
            key: _with_pieces(item, put, f"{path}[{key!r}]", (*keys, key), whole)
            for key, item in (tree["value"] if kind else tree).items()
        }
        return {**tree, "value": items} if kind else items
    if isinstance(tree, list | tuple):
        children = [
            _with_pieces(item, put, f"{path}[{index}]", (*keys, index), whole) for index, item in enumerate(tree)
        ]
        return tuple(children) if isinstance(tree, tuple) else children
    return tree


def _holds_objects(value: Any) -> bool:
    """Return whether a value is, or contains, an object that a saved value cannot replace."""
    if isinstance(value, _AT_ONCE):
        return False
    name = _kind_of(value)
    if name == _DATACLASS:
        value = _attributes(value)
    elif name:
        return not _KINDS[name].replaceable
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return False
    return any(_holds_objects(item) for item in value)


def _fits(value: Any, saved: Any) -> bool:
    return (
        isinstance(value, np.ndarray)
        and isinstance(saved, np.ndarray)
        and (value.shape, value.dtype) == (saved.shape, saved.dtype)
        and value.flags.writeable
    )


def _described(tree: Any) -> str:
    if _saved_kind(tree) not in ("", _ESCAPED):
        return f"the state of a {tree['class']}"
    return f"a value of type {type(tree).__name__}"


def _saved_kind(tree: Any) -> str:
    """Return the kind of a saved object; '' for a plain value. Raises CheckpointError for an unknown kind."""
    kind = tree.get(MARK, "") if isinstance(tree, dict) else ""
    if kind and kind != _ESCAPED and kind not in _KINDS:
        raise CheckpointError(
            f"the checkpoint contains a `{kind}`, which this version of sparkring does not know: read it with the "
            "version that wrote it, or a newer one."
        )
    return str(kind)


def has_state(value: Any) -> bool:
    """Return whether the value is an object with a state, such as a model, an optimizer, a tensor or a generator."""
    return not isinstance(value, _AT_ONCE) and _kind_of(value) not in ("", _DATACLASS)


def is_like(value: Any, tree: Any) -> bool:
    """Return whether a tree is what an object of the same kind as `value`, such as another torch module, has saved."""
    kind = _kind_of(value)
    if not kind or _saved_kind(tree) != kind:
        return False
    # The state_dict() of a torch module, unlike that of an optimizer, has metadata.
    return kind != _STATE_DICT or bool(tree["metadata"]) == bool(getattr(value.state_dict(), "_metadata", None))


def _kind_of(value: Any) -> str:
    return next((name for name, kind in _KINDS.items() if kind.owns(value)), "")


# ── state_dict() and load_state_dict() ────────────────────────────────────────


def _has_state_dict(value: Any) -> bool:
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def _take_state_dict(value: Any, path: str) -> dict[str, Any]:
    torch_state.refuse_flattened(value, path)
    state = value.state_dict()
    kept = tree_of(state, path)
    if torch_state.has_pieces(value):
        counterpart = torch_state.counterparts(value)
        _with_pieces(kept, lambda piece, keys, path: torch_state.refuse_unlike(piece, counterpart(keys), path), path)
    return {"value": kept, "metadata": tree_of(dict(getattr(state, "_metadata", None) or {}), path)}


def _put_state_dict(value: Any, tree: dict[str, Any], path: str) -> None:
    saved, metadata = tree["value"], plain(tree["metadata"])
    if metadata and torch_state.is_module(value):
        saved, metadata = torch_state.fitted(value, saved, metadata)
    state: Any = plain(_for_object(value, saved, path))
    if metadata:  # this tells torch's modules which version of their class saved the state
        state = OrderedDict(state)
        state._metadata = OrderedDict(metadata)
    try:
        value.load_state_dict(state if metadata else _with_classes_of(value.state_dict(), state))
    except SparkringError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # a user's class can raise any exception
        reason = (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
        raise CheckpointError(
            f"{path}: the saved state of a {tree['class']} does not fit this {type(value).__name__}: {reason}. Make "
            "the object the same as when it was saved, or start over with --fresh."
        ) from error


def _for_object(value: Any, tree: Any, path: str) -> Any:
    """Prepare a saved state_dict() for loading into `value`: turn each piece of a tensor into a spread tensor."""
    counterpart, spread = torch_state.counterparts(value), torch_state.has_pieces(value)

    def leave(whole: dict[str, Any], keys: tuple[Any, ...], path: str) -> Any:
        if spread:
            torch_state.refuse_whole(whole["value"], counterpart(keys), path)
        return whole

    return _with_pieces(
        tree, lambda piece, keys, path: torch_state.joined(piece, counterpart(keys), path), path, whole=leave
    )


def _with_classes_of(like: Any, state: Any) -> Any:
    """Return a saved state whose dicts have the classes that the dicts in `like` have.

    A checkpoint does not keep subclasses of dict, but an object may need one: MultiStepLR has a Counter.
    """
    if isinstance(like, dict) and isinstance(state, dict):
        items = {key: _with_classes_of(like.get(key), item) for key, item in state.items()}
        if type(like) is dict:
            return items
        made = copy.copy(like)
        made.clear()
        made.update(items)
        return made
    if isinstance(like, list) and isinstance(state, list):
        return [_with_classes_of(one, item) for one, item in zip_longest(like[: len(state)], state)]
    return state


# ── dataclasses ───────────────────────────────────────────────────────────────


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, _NOT_DATACLASSES)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that have a value, and its other attributes, such as cached properties."""
    fields = {field.name for field in dataclasses.fields(value)}
    names = [*(name for name in fields if hasattr(value, name)), *getattr(value, "__dict__", {})]
    return {name: getattr(value, name) for name in sorted(set(names))}


def _put_dataclass(value: Any, tree: dict[str, Any], path: str) -> None:
    _check_fields(type(value), tree, path)
    for name in getattr(value, "__dict__", {}).keys() - tree["value"].keys():
        del value.__dict__[name]  # for example a cached property, which would not fit the restored fields
    for name, saved in tree["value"].items():
        # Not setattr(), because the dataclass may be frozen.
        object.__setattr__(value, name, put_back(getattr(value, name, None), saved, f"{path}.{name}"))


def _check_fields(cls: Any, tree: dict[str, Any], path: str) -> None:
    fields = {field.name for field in dataclasses.fields(cls)}
    if fields != set(tree["fields"]):
        more, fewer = sorted(fields.difference(tree["fields"])), sorted(set(tree["fields"]) - fields)
        changed = [f"{', '.join(names)} {what}" for names, what in ((more, "added"), (fewer, "removed")) if names]
        raise CheckpointError(
            f"{path}: the fields of the dataclass {cls.__name__} have changed since the checkpoint was saved: "
            f"{'; '.join(changed)}. Make them the same as when it was saved, or start over."
        )


def _new_dataclass(tree: dict[str, Any], path: str) -> Any:
    """Make a dataclass from what was saved, without calling its code. Its class must exist in this process."""
    module, name = tree["home"]
    cls: Any = sys.modules.get(module)
    for part in name.split("."):
        cls = getattr(cls, part, None)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise CheckpointError(
            f"{path} was saved from the dataclass {tree['class']}, which does not exist here: define it, or import "
            "its module, before restore()."
        )
    _check_fields(cls, tree, path)
    made = object.__new__(cls)
    for key, saved in tree["value"].items():
        object.__setattr__(made, key, _made_anew(saved, f"{path}.{key}"))
    return made


# ── random numbers ────────────────────────────────────────────────────────────


def random_states() -> Any:
    """Return the states of the global random generators of Python, NumPy and, if imported, torch, TensorFlow and Keras.

    If a tf.function uses TensorFlow's random operations without a generator, their state cannot be read, and they draw
    different numbers after a restore. tensorflow_state.keep_random() prevents this for Keras' layers.
    """
    states: dict[str, Any] = {"python": _of_random(random._inst), "numpy": np.random.get_state(legacy=False)}
    torch = sys.modules.get("torch")
    if torch is not None:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        states["torch"] = {"cpu": torch.get_rng_state().numpy(), "cuda": [state.numpy() for state in cuda]}
    states |= tensorflow_state.random_states(_of_random)
    return states


def set_random_states(tree: Any) -> None:
    """Restore the states that random_states() returned, for the packages that are imported now."""
    _set_random(random._inst, tree["python"])
    np.random.set_state(tree["numpy"])
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in tree:
        torch.set_rng_state(torch_state.tensor(tree["torch"]["cpu"]))
        if torch.cuda.is_available() and len(tree["torch"]["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([torch_state.tensor(state) for state in tree["torch"]["cuda"]])
    tensorflow_state.set_random_states(tree, _set_random)


def seed_from(*what: object) -> None:
    """Seed the generators of Python and of imported packages with a number that depends only on `what`."""
    number = int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:4], "big")
    random.seed(number)
    numpy, torch, tensorflow, keras = (sys.modules.get(name) for name in ("numpy", "torch", "tensorflow", "keras"))
    if numpy is not None:
        numpy.random.seed(number)
    if torch is not None:
        torch.manual_seed(number)
    if tensorflow is not None:
        tensorflow.random.set_seed(number)
    if keras is not None:
        keras.utils.set_random_seed(number)  # Keras has its own generator for the seeds of its layers


def _of_random(generator: random.Random) -> dict[str, Any]:
    version, words, gauss = generator.getstate()
    return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}


def _set_random(generator: random.Random, tree: Any) -> None:
    generator.setstate((tree["version"], tuple(map(int, tree["words"])), tree["gauss"]))


class _Source(NamedTuple):
    owns: Callable[[Any], bool]
    state: Callable[[Any], Any]
    set_state: Callable[[Any, Any], Any]


_SOURCES = {
    "python": _Source(lambda value: isinstance(value, random.Random), _of_random, _set_random),
    "numpy": _Source(
        lambda value: isinstance(value, np.random.Generator),
        lambda value: value.bit_generator.state,
        lambda value, state: setattr(value.bit_generator, "state", state),
    ),
    "numpy legacy": _Source(
        lambda value: isinstance(value, np.random.RandomState),
        lambda value: value.get_state(legacy=False),
        lambda value, state: value.set_state(state),
    ),
    "torch": _Source(
        lambda value: isinstance(value, getattr(sys.modules.get("torch"), "Generator", ())),
        lambda value: value.get_state().numpy(),
        lambda value, state: value.set_state(torch_state.tensor(state)),
    ),
    "tensorflow": _Source(
        partial(tensorflow_state.is_of_tf, "random.Generator"),
        lambda value: tensorflow_state.leaf(value.state),
        lambda value, state: value.reset(tensorflow_state.array(state)),
    ),
}


def _take_source(value: Any, path: str) -> dict[str, Any]:
    name = next(name for name, source in _SOURCES.items() if source.owns(value))
    return {"source": name, "value": _SOURCES[name].state(value)}


def _put_source(value: Any, tree: dict[str, Any], path: str) -> None:
    source = _SOURCES.get(tree["source"])
    try:
        if source is None or not source.owns(value):
            raise ValueError(f"it is the state of a {tree['class']}")
        source.set_state(value, tree["value"])
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: this {type(value).__name__} cannot load the saved state: {error}. Make it the same as when it "
            "was saved, or start over with --fresh."
        ) from error


# ── all kinds ─────────────────────────────────────────────────────────────────


def _variables(owns: Callable[[Any], bool], variables: Variables) -> StateKind:
    """Return the kind of a framework's variables."""
    return StateKind(
        owns,
        lambda value, path: {"value": variables.leaf(value)},
        lambda value, tree, path: variables.assign([(value, tree["value"])], path, "the state"),
        lambda tree: variables.array(tree["value"]),
    )


# The order matters, because the first kind that owns an object is used: for example, a Keras model is also a tf.Module,
# and an optimizer may also have a state_dict().
_KINDS = {
    _PIECE: StateKind(
        torch_state.is_spread,
        torch_state.piece,
        torch_state.put_piece,
        lambda tree: torch_state.tensor(tree["value"]),
    ),
    _WHOLE: StateKind(
        torch_state.is_tensor,
        lambda value, path: {"value": torch_state.leaf(value, path)},
        lambda value, tree, path: torch_state.put(value, tree["value"], path),
        lambda tree: torch_state.tensor(tree["value"]),
        replaceable=True,
    ),
    "variable": _variables(partial(tensorflow_state.is_of_tf, "Variable"), tensorflow_state.VARIABLES),
    "tensor": StateKind(
        partial(tensorflow_state.is_of_tf, "Tensor"),
        lambda value, path: {"value": tensorflow_state.leaf(value)},
        lambda value, tree, path: tensorflow_state.tensor(tree["value"]),
        lambda tree: tensorflow_state.tensor(tree["value"]),
        replaceable=True,
    ),
    "keras 3": StateKind(
        keras_3_state.is_layer, keras_3_state.take_layer, keras_3_state.put_layer, keras_3_state.plain_layer
    ),
    "keras 3 optimizer": StateKind(
        keras_3_state.is_optimizer,
        lambda value, path: keras_3_state.take_optimizer(value),
        keras_3_state.put_optimizer,
        keras_3_state.VARIABLES.by_name,
    ),
    "keras 3 variable": _variables(keras_3_state.is_variable, keras_3_state.VARIABLES),
    "keras": StateKind(
        tensorflow_state.is_model, tensorflow_state.take_model, tensorflow_state.put_model, tensorflow_state.plain_model
    ),
    "optimizer": StateKind(
        tensorflow_state.is_optimizer,
        lambda value, path: tensorflow_state.take_optimizer(value),
        tensorflow_state.put_optimizer,
        tensorflow_state.VARIABLES.by_name,
    ),
    "module": StateKind(
        partial(tensorflow_state.is_of_tf, "Module"),  # Keras' layers and metrics, too
        lambda value, path: tensorflow_state.VARIABLES.take(list(value.variables)),
        tensorflow_state.put_module,
        tensorflow_state.VARIABLES.by_name,
    ),
    "random": StateKind(
        lambda value: any(source.owns(value) for source in _SOURCES.values()),
        _take_source,
        _put_source,
        lambda tree: tree["value"],
    ),
    _STATE_DICT: StateKind(_has_state_dict, _take_state_dict, _put_state_dict, lambda tree: plain(tree["value"])),
    _DATACLASS: StateKind(
        _is_dataclass,
        lambda value, path: {},  # tree_of() takes a dataclass apart itself, as it does with dicts
        _put_dataclass,
        lambda tree: plain(tree["value"]),
    ),
}
