"""Where ranks run: PLACES has them all. A place opens launchers, which start members there and end them.

A new place is one module with a Place and its Launcher, and one entry in PLACES.
"""

from __future__ import annotations

from collections.abc import Callable

from sparkring.launchers.base import Launcher, LaunchRequest, Place
from sparkring.launchers.local import ThisMachine
from sparkring.launchers.spark_place import SparkTasks

PLACES: dict[str, Place] = {place.name: place for place in (ThisMachine(), SparkTasks())}


def place_of(np: int, name: str = "") -> Place:
    """Return the place with this name or, if the name is '', the place that `np` means to users.

    Only this function knows what the sign of `np` means.
    """
    return PLACES[name or ("local" if np < 0 else "spark")]


def open_launcher(request: LaunchRequest, say: Callable[[str], None], *, patient: bool = True) -> Launcher:
    """Return a launcher for the request. Raise LaunchError if a launcher could not start the members.

    `patient` says whether to wait for executors if Spark has just lost one.
    """
    return request.place.launcher(request, say, patient=patient)


def slots_table() -> list[tuple[str, ...]]:
    """Return a table of where ranks can run: place, slots, busy slots and details. This starts no SparkSession."""
    return [row for place in PLACES.values() for row in place.table()]
