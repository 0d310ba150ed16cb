"""How objects are packed that pickle and cloudpickle cannot pack, or of which they lose something.

A reducer, as `pickle` has it, is a function that says how a value is made again. Those for a type are looked up once.
The functions that make values again are called on the ranks; there they import what they need.
"""

from __future__ import annotations

from sparkring.reducers import standard, tensorflow, torch
from sparkring.reducers.base import Reducer


def reducers_for(cls: type) -> tuple[Reducer, ...]:
    """Return the reducers to try for the values of a type; pickle and cloudpickle take what they leave."""
    found = (module.reducer_for(cls) for module in (torch, tensorflow, standard))
    return tuple(reducer for reducer in found if reducer)
