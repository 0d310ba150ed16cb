"""Repeats on a rank what the notebook has changed in place, and finds the rank's copies of the notebook's objects.

The rank's object stays the same object. Only the parts that the notebook has changed get the notebook's values, so a
model keeps the weights that earlier cells have trained when the notebook changes the rate of its dropout layer.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sparkring.capture.reducers import torch
from sparkring.capture.snapshots import Change, Path
from sparkring.errors import CaptureError


def part_at(value: Any, path: Path) -> Any:
    """Return the part of `value` at `path`. Raises an error of some type if `value` has no such part."""
    for step, label in path:
        if step == "type":
            value = type(value)
        elif step == "[":
            value = value[label]
        else:
            own = vars(value) if hasattr(value, "__dict__") else {}
            value = own[label] if label in own else object.__getattribute__(value, label)
    return value


def words(name: str, path: Path) -> str:
    """Return the path as users write it, such as `model.layers[0].p`."""
    text = name
    for step, label in path:
        if step == "type":
            text = f"type({text})"
        elif step == "[":
            is_inside = text.endswith(("._modules", "._parameters", "._buffers"))
            text = f"{text.rpartition('.')[0]}.{label}" if is_inside else f"{text}[{label!r}]"
        else:
            text = f"{text}.{label}"
    return text


class ValuePlace(NamedTuple):
    """Where a rank has a part of a value: the name of the value, and the path of the part.

    In a payload, it stands for this part.
    """

    name: str
    path: Path

    def part(self, namespace: Mapping[str, Any]) -> Any:
        """Return the part, on a rank. Raises CaptureError if the rank's value has no such part."""
        try:
            return part_at(namespace[self.name], self.path)
        except Exception as error:  # code of the notebook's classes may raise anything
            raise CaptureError(
                f"it shares {words(*self)} with `{self.name}`, but the `{self.name}` of this rank has no such part "
                f"({type(error).__name__}: {error}). Send `{self.name}`, too, with `--push`"
            ) from error


def _new(value: Any, path: Path, what: str) -> Any:
    if what == "deleted":
        return None
    part: Any = part_at(value, path)
    if what != "in place":
        return part
    # As another object: the object itself would be sent as the place where the ranks have their copy of it.
    return part.detach() if torch.is_tensor(part) else part[...]


class Changed:
    """The notebook's changes of `value`. It is unpickled as the rank's value of `name`, with these changes made."""

    def __init__(self, name: str, value: Any, changes: Sequence[Change]) -> None:
        # Parts that are the same as others come last, when the others are up to date.
        ordered = sorted(changes, key=lambda change: change.same_as is not None)
        self._parts = [
            (path, what, _new(value, path, what) if same_as is None else None, same_as)
            for path, what, same_as in ordered
        ]
        self._name, self._kind = name, type(value).__qualname__

    def __reduce__(self) -> tuple[Any, ...]:
        return _changed, (ValuePlace(self._name, ()), self._name, self._kind, self._parts)


def _changed(value: Any, name: str, kind: str, parts: Sequence[tuple[Path, str, Any, Path | None]]) -> Any:
    inner = _unwrapped(value, kind)
    for path, what, new, same_as in parts:
        try:
            if same_as is not None:
                new = part_at(inner, same_as)
            if what == "in place" and _copied(part_at(inner, path), new):
                continue
            if not path:
                value = new  # for example, an array of another shape
            else:
                _set(part_at(inner, path[:-1]), *path[-1], what, new)
        except Exception as error:  # code of the notebook's classes may raise anything
            if what == "deleted" and isinstance(error, (LookupError, AttributeError)):
                continue  # cells have deleted it, too
            raise CaptureError(
                f"the notebook has changed {words(name, path)}, which the `{name}` of this rank does not have "
                f"({type(error).__name__}: {error}). Send the notebook's `{name}` with `--push {name}`"
            ) from error
    return value


def _unwrapped(value: Any, kind: str) -> Any:
    """Return the model inside a wrapper such as DistributedDataParallel, if the notebook has sent this model."""
    while type(value).__qualname__ != kind:
        inner = getattr(value, "module", None)
        inner = getattr(value, "_orig_mod", None) if inner is None else inner
        if inner is None:
            break
        value = inner
    return value


def _copied(old: Any, new: Any) -> bool:
    """Copy the content of an array or tensor into another one. Return False if that is not possible."""
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return False
    if torch.is_tensor(old):
        old.data.copy_(new)
        return True
    if old.flags.writeable:
        old[...] = new
    return bool(old.flags.writeable)


def _set(owner: Any, step: str, label: Any, what: str, new: Any) -> None:
    if step == "[":
        if what == "deleted":
            del owner[label]
        elif what == "added" and isinstance(owner, (list, collections.deque)) and label >= len(owner):
            owner.append(new)
        else:
            owner[label] = new
    elif isinstance(owner, type):
        if what == "deleted":
            delattr(owner, label)
        else:
            setattr(owner, label, new)
    elif label in getattr(owner, "__dict__", {}) or not hasattr(type(owner), label):
        # Not with setattr(): `__setattr__` of the class may refuse the change, or do more than the notebook did.
        vars(owner).pop(label, None)
        if what != "deleted":
            vars(owner)[label] = new
    elif what == "deleted":
        object.__delattr__(owner, label)
    else:
        object.__setattr__(owner, label, new)
