"""Records which names have a value on the ranks of a warm gang, and tells whether the notebook's value is newer.

A cell uses the ranks' value of a name if an earlier cell assigned this value on the ranks, or if the value was sent to
the ranks earlier. But if the notebook has bound the name anew since then, the notebook's value is sent. So a cell can
use the model that an earlier cell has trained, and `lr = 0.01` in the notebook takes effect in the next cell.

If the notebook has changed an object in place, only the parts that have changed are sent, and put into the ranks'
object (changes.py). Data such as lists and arrays is sent as a whole. Objects that are sent share their parts with the
objects that ranks have, as in the notebook: a new optimizer gets the ranks' own parameters.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any

from sparkring.capture.changes import Changed, ValuePlace, part_at, words
from sparkring.capture.snapshots import ATOMS, Change, Path, ValueSnapshot

# If it takes longer than this to compare an object with what it was, its changes in place are no longer looked for.
SLOW_S = 0.5
_SHOWN = 3  # at most this many parts are named in a notice


class RemoteNames:
    """The names that ranks have bound or received, each with a snapshot of the notebook's value at that moment.

    `notices` is what the user should know about the names that have been looked up since the last call of beside().
    """

    def __init__(self) -> None:
        self._ranks_with: dict[str, set[int]] = {}  # for each name, the ranks that have the newest value
        self._on_rank: dict[int, set[str]] = {}  # the names that each rank has
        self._notebook: Mapping[str, Any] = {}
        self._seen: dict[str, ValueSnapshot] = {}
        self._bound_there: set[str] = set()  # names whose values on the ranks are not copies of the notebook's
        self._slow: set[str] = set()  # names whose values are compared by identity only
        # What was found out since the last call of beside(). To find it out again would take a while for large values.
        self._now: dict[str, ValueSnapshot] = {}
        self._changes: dict[str, list[Change] | None] = {}
        self._places: dict[int, list[tuple[object, ValuePlace]]] | None = None
        self._stale: set[int] = set()  # the ids of objects that ranks get anew, although they have a copy
        self._asked_for: frozenset[int] = frozenset()
        self.notices: list[str] = []

    @property
    def names(self) -> set[str]:
        """Return the names that have a value on at least one rank."""
        return set().union(*self._on_rank.values())

    def beside(self, notebook: Mapping[str, Any], ranks: Iterable[int]) -> RemoteNames:
        """Return this container, which then contains the names whose values on `ranks` should be used.

        The values of other names have to be sent, and the ranks have to repeat changes().
        """
        self._notebook, self._asked_for = notebook, frozenset(ranks)
        self._now.clear()
        self._changes.clear()
        self._places = None
        self._stale.clear()
        self.notices = []
        return self

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or not self._ranks_with.get(name, set()) >= self._asked_for:
            return False
        if name not in self._notebook:
            return True
        if name not in self._seen or not self._seen[name].is_of(self._notebook[name]):
            return False
        if name not in self._changes:
            self._changes[name] = self._find_changes(name)
        return self._changes[name] is not None

    def copies(self, names: Iterable[str]) -> set[str]:
        """Return those of the names whose values on the ranks are copies of the notebook's values."""
        return {name for name in names if name in self and name in self._notebook and name not in self._bound_there}

    def changes(self) -> dict[str, Changed]:
        """Return what the notebook has changed in place in the values of the names that have been looked up.

        Names whose values share what has changed are looked up, too. Otherwise, the change would be repeated when a
        later cell reads them, and replace what cells have made of it in the meantime.
        """
        waiting = [name for name, changes in self._changes.items() if changes]
        while waiting:
            name = waiting.pop()
            owners = (_owner(self._notebook[name], path) for path, _, _ in self._changes[name] or ())
            sharing = {place.name for owner in owners for part, place in self._of(owner) if part is owner}
            for other in sharing - self._changes.keys():
                notices = len(self.notices)
                if other in self:
                    waiting.append(other)
                else:  # it has to be sent as a whole, which is for a cell that reads it
                    self._changes.pop(other, None)
                    del self.notices[notices:]
        return {
            name: Changed(name, self._notebook[name], changes) for name, changes in self._changes.items() if changes
        }

    def send_whole(self, name: str) -> None:
        """Let the value of `name` count as one that has to be sent as a whole, until the next call of beside()."""
        self._changes[name] = None

    def place_of(self, value: object, without: Container[str] = ()) -> ValuePlace | None:
        """Return where the ranks have their copy of an object of the notebook; None if they have none.

        The copy must be part of a name that is up to date on the ranks, and not one of the names in `without`.
        """
        for part, place in self._of(value):
            if part is value and place.name not in without and place.name in self and id(value) not in self._stale:
                return place
        return None

    def _of(self, value: object) -> list[tuple[object, ValuePlace]]:
        """Return the places that ranks have for the object with the id of `value`, each with the object."""
        if self._places is None:
            self._places = {}
            for name, seen in self._seen.items():
                if name not in self._bound_there and self._ranks_with[name] >= self._asked_for:
                    root = self._notebook.get(name)
                    # Python itself shares equal numbers, strings and tuples between unrelated values.
                    has_identity = type(root) not in ATOMS and not isinstance(root, tuple | frozenset)
                    parts = [(root, ())] if has_identity and seen.is_of(root) else []
                    for part, path in (*parts, *seen.places()):
                        self._places.setdefault(id(part), []).append((part, ValuePlace(name, path)))
        return self._places.get(id(value), [])

    def update(self, bound: Mapping[int, Collection[str]], gone: Mapping[int, Collection[str]]) -> None:
        """Record the names that are new on each rank, and those that are no longer there."""
        for rank, names in gone.items():
            for name in names:
                self._on_rank.get(rank, set()).discard(name)
                self._ranks_with.get(name, set()).discard(rank)
        for rank, names in bound.items():
            self._on_rank.setdefault(rank, set()).update(names)
        for name in set().union(*bound.values()):
            self.kept([name], [rank for rank, names in bound.items() if name in names], sent=False)

    def kept(self, names: Iterable[str], ranks: Iterable[int], *, sent: bool) -> None:
        """Record that `ranks` may have received `names` if they were `sent`, or else may have bound them.

        A rank that lacks a name has neither bound nor received it. After this call, the notebook's current values do
        not count as newer.
        """
        ranks = list(ranks)
        for name in names:
            having = [rank for rank in ranks if name in self._on_rank.get(rank, ())]
            if not having:
                continue
            there, seen = self._ranks_with.setdefault(name, set()), self._seen.pop(name, None)
            if name in self._notebook:
                self._seen[name] = now = self._snapshot(name, seen)
                if seen is None or not seen.equals(now):
                    there.clear()  # the other ranks have an older value
            elif seen is not None:
                there.clear()
            there.update(having)
            (self._bound_there.discard if sent else self._bound_there.add)(name)

    def _snapshot(self, name: str, seen: ValueSnapshot | None) -> ValueSnapshot:
        value = self._notebook[name]
        if name in self._slow and seen is not None and seen.is_of(value):
            return seen
        if name not in self._now or not self._now[name].is_of(value):
            self._now[name] = ValueSnapshot(value)
        return self._now[name]

    def _find_changes(self, name: str) -> list[Change] | None:
        """Return the changes in place that ranks can repeat; None if the notebook's value has to be sent as a whole."""
        seen = self._seen[name]
        now = self._snapshot(name, seen)
        changes = seen.changes(now)
        if now.seconds > SLOW_S and not now.is_data and name not in self._slow:
            self._slow.add(name)
            self.notices.append(
                f"`{name}` takes {now.seconds:.1f} s to compare with the value that the ranks have, so later changes "
                f"in place are not noticed: send it again with `--push {name}`"
            )
        if changes and name in self._bound_there:
            changes = None
        if changes is None and now.holds_arrays:
            self.notices.append(
                f"the notebook has changed `{name}`, so it is sent again: it replaces the `{name}` of the ranks, with "
                "all that cells have changed in it. Other objects of the ranks may still hold the earlier one"
            )
        elif parts := [words(name, path) for path, what, _ in changes or () if what == "in place"]:
            more = f", and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
            self.notices.append(
                f"the notebook has changed {', '.join(parts[:_SHOWN])}{more}: the notebook's values replace those of "
                "the ranks"
            )
        self._stale |= {
            id(part_at(self._notebook[name], path))
            for path, what, _ in changes or ()
            if what == "changed" or (what == "another" and not path)
        }
        return changes


def _owner(value: object, path: Path) -> object:
    """Return the innermost object that contains the part at `path`, or is the part, and that has an identity."""
    for length in range(len(path), 0, -1):
        with contextlib.suppress(Exception):  # the part has been deleted, or the code of a class raises something
            part = part_at(value, path[:length])
            weakref.ref(part)
            return part
    return value
