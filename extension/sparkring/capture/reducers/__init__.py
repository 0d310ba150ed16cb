"""Reducers for objects that pickle and cloudpickle cannot pack, or pack incompletely.

A reducer, in the sense of `pickle`, is a function that says how to rebuild a value. The reducers for a type are looked
up once. The functions that rebuild values are called on the ranks, and import what they need when they are called.
"""

from __future__ import annotations

from typing import Any

from sparkring.capture.reducers import accelerate, standard, tensorflow, torch
from sparkring.capture.reducers.base import Reducer


def reducers_for(cls: type) -> tuple[Reducer, ...]:
    """Return the reducers to try for values of a type. If none of them packs a value, pickle and cloudpickle do."""
    candidates = (module.reducer_for(cls) for module in (torch, accelerate, tensorflow, standard))
    return tuple(reducer for reducer in candidates if reducer)


def comparable(made: Any, arguments: Any) -> Any:
    """Return the arguments with which `made` rebuilds an object, without what differs from process to process."""
    form = torch.COMPARABLE.get(made) or tensorflow.COMPARABLE.get(made)
    return form(*arguments) if form else arguments
