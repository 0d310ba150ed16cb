"""What the record of a stream says about the model processes that take up new checkpoints. Each is an item."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparkring.history import describe, events
from sparkring.wire.messages import CheckpointUsed, ModelUsed

# A stream may run for months, and use a new checkpoint every few seconds. So its record has the numbers of a process
# only now and then, and after the first changes of the checkpoint, a notice about a change only once a minute.
_NUMBERS_EVERY_S = 10.0
_CHANGES_NOTED, _CHANGE_NOTED_EVERY_S = 100, 60.0


@dataclass
class _Process:
    """A model process. `slot` is None if the record shows no item for it, because all slots are taken."""

    item: int
    slot: int | None
    host: str
    began: float
    used: CheckpointUsed
    change_noted: float = 0.0
    numbers_noted: float = 0.0
    rows_noted: int = 0
    is_over: bool = False


class Serving:
    """The model processes of a stream. At most `at_once` of them are running at the same time.

    Times are in Unix seconds.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._processes: dict[tuple[str, int], _Process] = {}

    @property
    def changes(self) -> int:
        """How many newer checkpoints a process has used; the largest number if there are several processes."""
        return max((process.used.earlier for process in self._processes.values()), default=0)

    @property
    def stream(self) -> str:
        """Spark's id of the streaming query that has used a process last; '' before the first one."""
        return next((process.used.stream for process in reversed(self._processes.values()) if process.used.stream), "")

    def rows(self) -> Iterator[tuple[str, int, int]]:
        """Yield the host, the scored rows and the rows without a prediction of each process."""
        for process in self._processes.values():
            yield process.host, process.used.rows, process.used.nulls

    def add(self, report: ModelUsed, used: CheckpointUsed, now: float) -> Iterator[events.Event]:
        """Yield the events for a report about the checkpoint that a process uses."""
        key, who = (report.host, report.pid), f"(process {report.pid})"
        before = self._processes.get(key)
        process = before or _Process(len(self._processes), self._free_slot(), report.host, now, used)
        problem_before, earlier_before = process.used.problem, process.used.earlier
        process.used = used
        if before is None:
            self._processes[key] = process
            yield from self._begin(process, report, now)
        if used.problem and (before is None or used.problem != problem_before):
            text = f"{report.host} still predicts with step {used.step:,} {who}: {used.problem}"
            yield events.Notice(now, text)
        is_new = before is None or used.earlier != earlier_before
        if is_new and (used.earlier < _CHANGES_NOTED or now - process.change_noted > _CHANGE_NOTED_EVERY_S):
            process.change_noted = now
            loaded = f"loaded in {describe.duration(used.load_s)}"
            yield events.Notice(now, f"{report.host} now predicts with step {used.step:,}, {loaded} {who}")
        if now - process.numbers_noted > _NUMBERS_EVERY_S:
            yield from self._numbers(process, now)

    def end(self, now: float, report: ModelUsed | None = None) -> Iterator[events.Event]:
        """Yield the events for the end of the process that has sent `report`, or of all processes."""
        for key, process in self._processes.items():
            if process.is_over or (report is not None and key != (report.host, report.pid)):
                continue
            process.is_over = True
            if process.slot is not None:
                yield from self._numbers(process, now)
                yield events.ItemEnded(now, process.item, "finished", seconds=now - process.began)

    def _free_slot(self) -> int | None:
        taken = {process.slot for process in self._processes.values() if not process.is_over}
        return next((slot for slot in range(self._at_once) if slot not in taken), None)

    def _begin(self, process: _Process, report: ModelUsed, now: float) -> Iterator[events.Event]:
        yield events.ItemsPlanned(now, self._at_once, total=len(self._processes), noun="process")
        if process.slot is not None:
            yield events.RankStarted(now, process.slot, report.host, report.pid)
            yield events.ItemStarted(now, process.item, f"process {report.pid} on {report.host}", process.slot)

    def _numbers(self, process: _Process, now: float) -> Iterator[events.Event]:
        if process.slot is None:
            return
        used, since = process.used, process.numbers_noted or process.began
        rate = (used.rows - process.rows_noted) / max(now - since, 1e-6)
        process.numbers_noted, process.rows_noted = now, used.rows
        values = {"rows": float(used.rows), describe.ROWS_RATE: rate, "step": float(used.step)}
        yield events.Metrics(values, time=now, rank=process.slot)
