"""Saves a whole record among a run's events, so that the record no longer depends on the events before it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from sparkring.history import events
from sparkring.history.record import RunRecord

KIND = "Snapshot"
BEGIN = f'{{"type": "{KIND}", '.encode()  # of its line
BEGIN_OF_CUT = BEGIN + b'"is_cut": true, '


class Snapshot(NamedTuple):
    """The record of the events so far. `is_cut` says whether some of these events are no longer saved."""

    record: RunRecord
    is_cut: bool


def to_json(snapshot: Snapshot) -> str:
    """Return the snapshot as a line of JSON, without the data of displays, which is in files."""
    displays = tuple(display._replace(data=b"") for display in snapshot.record.displays)
    record = events.plain(snapshot.record._replace(displays=displays))
    return json.dumps({"type": KIND, "is_cut": snapshot.is_cut, "record": record})


def from_json(fields: dict[str, Any]) -> Snapshot:
    """Return the snapshot that to_json() wrote; unknown fields are ignored, and missing ones have their defaults."""
    return Snapshot(events.converter(RunRecord)(fields["record"]), fields["is_cut"])
