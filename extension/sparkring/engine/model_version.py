"""Computes a digest of a model and of the code that it uses. The digest is the same in every kernel."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from sparkring.capture.picklability import ipython_names, walk
from sparkring.engine.foreach.content import digest
from sparkring.engine.foreach.meaning import all_used, is_setting, meaning_of
from sparkring.inference import predictors
from sparkring.inference.outputs import as_array

_OBJECTS = 2_000  # the largest number of objects that are looked at in one value
_HOLDERS = (types.FunctionType, types.MethodType, types.ModuleType, functools.partial, type, list, tuple, dict, set)


def version_of(value: Any, *more: str) -> str:
    """Return a digest of a model or a function, of everything that it uses from the notebook, and of `more`.

    The digest covers code, settings, weights, arrays, and the pickles of other objects, such as scikit-learn models.
    """
    namespace = getattr(sys.modules.get("__main__"), "__dict__", {})
    hidden, used = ipython_names(namespace), {"": value}
    found = {name: list(_content(each)) for name, each in all_used(used, namespace, hidden)}
    return digest(meaning_of([], used, namespace, hidden), found, more)


def settings_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that are settings, such as numbers and strings, by name."""
    attributes = getattr(value, "__dict__", {})
    return {name: each for name, each in attributes.items() if name != "training" and is_setting(each)}


def _content(root: Any) -> Iterator[Any]:
    for step in walk(root, limit=_OBJECTS, enters=_is_holder):
        value: Any = step.value
        if predictors.is_torch(value):
            yield repr(value), {name: as_array(each) for name, each in value.state_dict().items()}
            yield [settings_of(module) for module in value.modules()]  # repr() leaves many settings out
        elif predictors.is_keras(value):
            yield [type(value).__qualname__, *value.get_weights()]
        elif not _is_holder(value):
            try:
                yield digest(value)
            except Exception:  # it cannot be pickled
                yield type(value).__qualname__


def _is_holder(value: Any) -> bool:
    """Whether the digest covers the objects that a value holds, and not its pickle. meaning_of() covers its code."""
    if predictors.is_model(value):
        return False
    return isinstance(value, _HOLDERS) or type(value).__module__ == "__main__"
