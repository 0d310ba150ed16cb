"""Decides whether a run sends the notebook's packages to its ranks, and says what is sent."""

from __future__ import annotations

from collections.abc import Callable

from sparkring.capture import environment
from sparkring.capture.environment import PackedEnvironment
from sparkring.history import describe, events
from sparkring.launchers.base import Place
from sparkring.runtime.kernel import tell


def packed_environment(place: Place, say: Callable[[str], None] = tell) -> PackedEnvironment | None:
    """Return the archive of this Python's packages for ranks at `place`; None if the ranks run this Python.

    `say` reports progress. Raise LaunchError if the archive cannot be made.
    """
    return environment.pack(say) if place.may_lack_packages() else None


def environment_rows(pack: PackedEnvironment | None) -> tuple[events.CapturedName, ...]:
    """Return the row of the archive in the table of what is sent."""
    if pack is None:
        return ()
    return (
        events.CapturedName("environment", describe.counted(pack.packages, "package"), pack.size_bytes, "by value"),
    )


def environment_notices(pack: PackedEnvironment | None) -> list[str]:
    """Return a notice with the archive's size, and with the packages that are left out."""
    if pack is None:
        return []
    packages, sizes = describe.counted(pack.packages, "package"), describe.size(pack.size_bytes)
    text = f"the environment is sent to the executors: {packages}, {sizes} ({describe.size(pack.unpacked_bytes)} there)"
    editable = f"; without the editable {', '.join(pack.left_out)}: such modules are sent with the cell"
    return [text + (editable if pack.left_out else "")]


def environment_estimate(place: Place) -> tuple[events.CapturedName, ...]:
    """Return the row of the archive for a dry run, which does not make it."""
    if not place.may_lack_packages():
        return ()
    there = environment.known()
    kind = f"{describe.counted(there.packages, 'package')}, before compression"
    return (events.CapturedName("environment", kind, there.size_bytes, "by value"),)
