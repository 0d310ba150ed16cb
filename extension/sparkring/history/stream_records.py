"""What a record says about a stream: counts and times of its micro-batches, which do not grow with their number."""

from __future__ import annotations

from typing import NamedTuple

from sparkring.history import events

RECENT = 120  # the number of micro-batches that are kept one by one


class StreamRecord(NamedTuple):
    """The micro-batches of a stream so far.

    `recent` are the last micro-batches. `batches` and `rows` count the micro-batches and the rows that have been
    trained, and `replayed`, `passed_over` and `empty` count the other endings. The times are sums over all
    micro-batches, in seconds. `first` is when the first micro-batch ended. `backlog_rows` is the last known backlog.
    """

    began: events.StreamBegan
    recent: tuple[events.BatchEnded, ...] = ()
    batches: int = 0
    rows: int = 0
    replayed: int = 0
    passed_over: int = 0
    empty: int = 0
    waiting_s: float = 0.0
    moving_s: float = 0.0
    reading_s: float = 0.0
    training_s: float = 0.0
    saving_s: float = 0.0
    others_s: float = 0.0
    first: float = 0.0
    saved: int | None = None
    backlog_rows: int | None = None

    @property
    def last(self) -> events.BatchEnded | None:
        return self.recent[-1] if self.recent else None

    @property
    def busy_s(self) -> float:
        """The time that was spent neither waiting for rows nor waiting for other cells."""
        return self.moving_s + self.reading_s + self.training_s + self.saving_s

    @property
    def recent_rows_per_s(self) -> float:
        """The rows per second that the ranks train on while they are not waiting, over the recent micro-batches."""
        trained = [batch for batch in self.recent if batch.how in ("trained", "replayed")]
        busy_s = sum(batch.moving_s + batch.reading_s + batch.training_s + batch.saving_s for batch in trained)
        return sum(batch.rows for batch in trained) / busy_s if busy_s else 0.0

    @property
    def backlog_s(self) -> float | None:
        """How long the ranks need for the backlog; None if this is not known."""
        rate = self.recent_rows_per_s
        return self.backlog_rows / rate if self.backlog_rows is not None and rate else None


def after(stream: StreamRecord | None, event: events.StreamBegan | events.BatchEnded) -> StreamRecord:
    """Return the record of a stream after an event."""
    if isinstance(event, events.StreamBegan):
        return StreamRecord(event, saved=event.saved) if stream is None else stream._replace(began=event)
    assert stream is not None
    known = stream.backlog_rows if event.backlog_rows is None else event.backlog_rows
    return stream._replace(
        recent=(*stream.recent, event)[-RECENT:],
        batches=stream.batches + (event.how == "trained"),
        rows=stream.rows + (event.rows if event.how == "trained" else 0),
        replayed=stream.replayed + (event.how == "replayed"),
        passed_over=stream.passed_over + (event.how == "passed over"),
        empty=stream.empty + (event.how == "empty"),
        waiting_s=stream.waiting_s + event.waiting_s,
        moving_s=stream.moving_s + event.moving_s,
        reading_s=stream.reading_s + event.reading_s,
        training_s=stream.training_s + event.training_s,
        saving_s=stream.saving_s + event.saving_s,
        others_s=stream.others_s + event.others_s,
        first=stream.first or event.time,
        saved=event.batch_id if event.saved else stream.saved,
        backlog_rows=known,
    )
