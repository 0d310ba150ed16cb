"""A run's record: what is known about the run so far, computed by a pure fold over the run's events.

A view shows only what is in a RunRecord, so a saved run looks like a live one. The size of a record is limited. It
contains only the last lines that the ranks printed (the log files contain all lines). For each rank, it contains at
most DISPLAYS_KEPT displays, of at most DISPLAY_BYTES in total.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sparkring.history import events, item_records, stream_records
from sparkring.history.epoch_steps import with_report
from sparkring.history.item_records import ItemsRecord
from sparkring.history.stream_records import StreamRecord
from sparkring.runtime.report import DISPLAY_BYTES, DISPLAYS_KEPT

TAIL_LINES = 200  # how many of each rank's last lines are kept
RECENT_LINES = 1_000  # how many of the last lines of all ranks together are kept, in order of arrival
METRICS_KEPT = 5_000
NOTICES_KEPT = 50
NUMBERS_SHOWN = 10  # how many ranks or items a notice names
EPOCHS_KEPT = 100  # how many epochs are kept for each reader: the ones that ended most recently
PLANS_KEPT = 3  # how many of a rank's plans are kept: the newest ones, and at most one for each reader
CHECKPOINTS_KEPT = 1_000
TIMELINES_KEPT = 20
ATTEMPT_LINES = 20  # if a rank's failure ends an attempt, this many of the rank's last lines are kept
SAMPLES_KEPT, SAMPLES_OF_ALL = 60, 1_920  # how many Samples are kept for each rank, and for all ranks together
# How many PhaseTimes are kept for each rank, and for all ranks together.
PHASE_TIMES_KEPT, PHASE_TIMES_OF_ALL = 120, 4_096
LINE_CHARACTERS = 4_000  # a longer line is cut in the record, not in the log file
PARTIAL_BYTES = 64 * 1024  # a line that grows beyond this before it ends is shown in pieces
LARGE_FILE_BYTES = 250_000  # when a run has ended, its files of at least this size are compressed
QUICK_S = 1.0  # a cell that finishes on a warm gang in less time is quick
STACK_HOLDS_S = 1.0  # a stack is kept at least this long; otherwise, the next output of the rank would remove it

RankState = Literal["starting", "running", "finished", "failed", "stopped", "idle"]


class LogLine(NamedTuple):
    """One line that a rank printed, or a message that it explicitly sent to the notebook (`stream` is "message").

    In a run of items, `rank` is the number of the item, except in the `tail` of a RankRecord.
    """

    time: float
    rank: int
    stream: events.Stream | Literal["message"]
    text: str


CheckpointState = Literal["committed", "damaged", "removed"]


class Checkpoint(NamedTuple):
    """A checkpoint that this run saved or found damaged, and its state.

    `attempt` is the number of the attempt that saved the checkpoint. It is 0 if an earlier run saved the checkpoint, or
    if this run lists no attempts. `reason` says how the checkpoint is damaged.
    """

    saved: events.CheckpointSaved
    attempt: int
    state: CheckpointState = "committed"
    reason: str = ""

    @property
    def place(self) -> tuple[str, str]:
        """The checkpoint's directory, and its name in the directory."""
        return self.saved.folder, self.saved.name


class Attempt(NamedTuple):
    """One attempt of a run that can restart.

    `checkpoint` is the name of the checkpoint to continue from, and `step` is the checkpoint's step. `restored` is the
    time at which the first rank reported that it had restored the checkpoint (Unix seconds; 0 before that). `ended` and
    the fields after it say when and why the attempt ended. They are set only if another attempt was to follow. `most`
    is the number of attempts that failures leave room for; 0 if it is not known.
    """

    number: int
    started: float
    size: int
    checkpoint: str = ""
    step: int = 0
    restored: float = 0.0
    ended: float = 0.0
    reason: str = ""
    failed_rank: int | None = None
    host: str = ""
    failure: events.Failure | None = None
    last_lines: tuple[LogLine, ...] = ()
    most: int = 0


class Reading(NamedTuple):
    """One reader of a rank: what it reads, its progress, how its last epochs ended, and its last plan for an epoch."""

    opened: events.DataOpened
    now: events.DataRead | None = None
    ended: tuple[events.DataRead, ...] = ()
    plan: events.DataPlanned | None = None


class Sample(NamedTuple):
    """What a rank used at some time: as in RankUsed, and its GPUs' mean use and the sum of their memory in use.

    `gpu_power_w` is the power of its GPUs in watts, and `gpu_temperature_c` the temperature of the hottest one in
    degrees Celsius. What is not known about the GPUs is None.
    """

    time: float
    cpu_percent: int
    memory_bytes: int
    gpu_percent: float | None = None
    gpu_bytes: int | None = None
    gpu_power_w: int | None = None
    gpu_temperature_c: int | None = None


class PhaseTimes(NamedTuple):
    """How many seconds a rank spent in each phase, in the time since the previous PhaseTimes until `ended`."""

    ended: float
    phases: Mapping[str, float]


class RankRecord(NamedTuple):
    """One rank. A rank whose state is "idle" does not run the cell.

    `partial_stdout` and `partial_stderr` hold the beginning of a line whose end has not been printed yet. `stack` is
    the rank's last stack. It is dropped when a message from the rank arrives more than STACK_HOLDS_S seconds after the
    stack was captured, since the rank has then moved on.
    """

    rank: int
    state: RankState = "starting"
    host: str = ""
    pid: int = 0
    line_count: int = 0
    size_bytes: int = 0
    tail: tuple[LogLine, ...] = ()
    partial_stdout: bytes = b""
    partial_stderr: bytes = b""
    last_heard: float = 0.0
    metrics: events.Metrics | None = None
    value: str = ""
    failure: events.Failure | None = None
    stack: events.StackTaken | None = None
    at: events.AtLine | None = None  # what the rank is running, as last reported
    loop: events.AtLine | None = None  # the first such report that tells the iterations of a loop
    looped: float = 0.0  # when the iterations were first as last reported
    gpus: tuple[events.GpuUsed, ...] = ()  # the last report of each GPU
    used: events.RankUsed | None = None  # the last report
    samples: tuple[Sample, ...] = ()  # what the rank has used so far, with fewer Samples of earlier times
    spent: events.TimeSpent | None = None  # the last report
    lane: tuple[PhaseTimes, ...] = ()  # how the rank has spent its time, with longer PhaseTimes for earlier times
    readings: tuple[Reading, ...] = ()
    displays_left_out: int = 0
    asks: events.InputRequested | None = None  # what the rank asks with input(), while it waits for the answer

    def partial_lines(self) -> list[LogLine]:
        """Return the lines that have not ended yet."""
        streams: dict[events.Stream, bytes] = {"stdout": self.partial_stdout, "stderr": self.partial_stderr}
        return [
            LogLine(self.last_heard, self.rank, stream, as_shown(data))
            for stream, data in streams.items()
            if data and not is_erased(data)
        ]

    def lines_with_partial(self) -> tuple[LogLine, ...]:
        """Return the last lines, including those that have not ended yet."""
        return (*self.tail, *self.partial_lines())


class FailedCommand(NamedTuple):
    """A shell command that has failed on `total` ranks or items, with the numbers of the first ones."""

    numbers: tuple[int, ...] = ()
    total: int = 0


class NotFinite(NamedTuple):
    """Since which epoch and step a rank's values of a metric are not finite, and `what` they are: NaN or infinite."""

    what: str
    epoch: int | None
    step: int | None


class RunRecord(NamedTuple):
    """One run.

    `part` are the ranks that the cell runs on; () means all ranks. `joined` is the number of members that have
    connected in the current attempt. `recent` are the last lines of all ranks, and `recent_count` is the total number
    of lines that have been added to `recent`, even if they have been dropped since.
    """

    run_id: str = ""
    title: str = ""
    code: str = ""
    size: int = 0
    where: str = "local"
    framework: str = ""
    logs: str = "all"
    part: tuple[int, ...] = ()
    warm: bool = False
    started: float = 0.0
    checkpoint_dir: str = ""
    captured: tuple[events.CapturedName, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    notify: bool = False
    running_since: float = 0.0
    ended: float = 0.0
    attempts: tuple[Attempt, ...] = ()  # () if the run cannot restart; its only attempt is then not listed
    checkpoints: tuple[Checkpoint, ...] = ()
    timelines: tuple[events.TimelineSaved, ...] = ()  # in the order of the attempts
    trace: events.TraceSaved | None = None
    joined: int = 0
    ranks: tuple[RankRecord, ...] = ()
    recent: tuple[LogLine, ...] = ()
    recent_count: int = 0
    displays: tuple[events.Displayed, ...] = ()  # the displays that were not left out, in order of arrival
    metrics: tuple[events.Metrics, ...] = ()
    not_finite: Mapping[tuple[str, int], NotFinite] = {}  # by metric and rank, if the rank's last value is not finite
    notices: tuple[events.Notice, ...] = ()
    failed_commands: Mapping[tuple[str, int], FailedCommand] = {}  # by command and exit code
    outcome: events.Ending | None = None
    message: str = ""
    failed_rank: int | None = None
    log_folder: str = ""
    left_out_bytes: int = 0  # of the logs
    left_out_lines: int = 0
    items: ItemsRecord | None = None  # None if the run does not consist of independent items
    stream: StreamRecord | None = None  # None if the run does not train on a stream
    model_gpus: tuple[events.ModelGpuUsed, ...] = ()  # the last report of each GPU of a query's model processes

    @property
    def taking_part(self) -> tuple[RankRecord, ...]:
        """The ranks that the cell runs on."""
        return tuple(self.ranks[rank] for rank in self.part) if self.part else self.ranks

    @property
    def questions(self) -> list[events.InputRequested]:
        """What running ranks ask with input(), while they wait for the answer."""
        return [rank.asks for rank in self.ranks if rank.asks is not None and rank.state == "running"]

    @property
    def finished_ranks(self) -> tuple[int, ...]:
        """The ranks that have finished the cell."""
        return tuple(rank.rank for rank in self.ranks if rank.state == "finished")

    @property
    def gpus(self) -> list[events.GpuUsed]:
        """The last report of each GPU that ranks or model processes use. A GPU that several ranks share counts once."""
        of_ranks = {(rank.host, gpu.address): gpu for rank in self.ranks for gpu in rank.gpus}
        return [*of_ranks.values(), *(report.gpu for report in self.model_gpus)]

    @property
    def failure(self) -> events.Failure | None:
        """The failure that ended the run; None if no rank's failure did."""
        return None if self.failed_rank is None else self.ranks[self.failed_rank].failure


def replay(new_events: Iterable[events.Event], record: RunRecord | None = None) -> RunRecord:
    """Apply `new_events`, one after another, to `record` (by default, an empty record). Return the result."""
    record = record or RunRecord()
    for event in new_events:
        record = apply(record, event)
    return record


def apply(record: RunRecord, event: events.Event) -> RunRecord:
    """Return the record after `event`; neither argument is changed."""
    after = _after(record, event)
    return _without_old_notices(record, event, after) if any(notice.until for notice in record.notices) else after


def _after(record: RunRecord, event: events.Event) -> RunRecord:
    match event:
        case events.RunStarted():
            return _started(record, event)
        case events.AttemptStarted():
            return _begun(record, event)
        case events.AttemptEnded():
            return _lost(record, event)
        case events.ModelGpuUsed():
            known = {(report.host, report.gpu.address): report for report in (*record.model_gpus, event)}
            return record._replace(model_gpus=tuple(known.values()))
        case events.MemberJoined():
            return record._replace(joined=record.joined + 1)
        case events.MemberLeft():
            return record._replace(joined=record.joined - 1)
        case events.TimelineSaved():
            return record._replace(timelines=(*record.timelines, event)[-TIMELINES_KEPT:])
        case events.TraceSaved():
            return record._replace(trace=event)
        case events.Notice():
            if event.once and any(notice.text == event.text for notice in record.notices):
                return record
            return _noticed(record, event)
        case events.LogsCut():
            return _logs_cut(record, event)
        case events.ItemsPlanned():
            return record._replace(items=item_records.planned(record.items, event))
        case events.ItemStarted() | events.ItemEnded():
            return _item_changed(record, event)
        case events.SearchBegan() | events.SearchEnded():
            return record._replace(items=record.items and item_records.searching(record.items, event))
        case events.StreamBegan() | events.BatchEnded():
            return record._replace(stream=stream_records.after(record.stream, event))
        case events.RunFinished():
            fields = event._asdict()
            del fields["measured"]  # computed from the record's metrics
            record = _with_failed_commands(record, event.time)
            return _all_ended(record)._replace(ended=fields.pop("time"), **fields)
    return _after_news(record, record.ranks[event.rank], event)


def _after_news(record: RunRecord, rank: RankRecord, event: events.RankEvent) -> RunRecord:
    """Return the record after an event of the rank `rank`."""
    match event:
        case events.Output():
            return _printed(record, event)
        case events.UserMessage():
            line = LogLine(event.time, event.rank, "message", event.text)
            return _with_lines(record, _heard(rank, event.time), [line], 1)
        case events.CommandFailed():
            return _command_failed(record, event)
        case events.InputRequested():
            return _told(record, event, asks=event)
        case events.InputEnded():
            return _told(record, event, asks=None)
        case events.Displayed():
            return _displayed(record, event)
        case events.Metrics() if record.items is not None:
            return _told(record._replace(items=item_records.measured(record.items, event)), event)
        case events.Metrics():
            kept = with_report(record.metrics, event)
            record = _with_not_finite(record._replace(metrics=kept), kept[-1])
            record = record if len(kept) <= METRICS_KEPT else record._replace(metrics=_thinned(kept))
            return _told(record, event, metrics=kept[-1])
        case events.GpuUsed():
            known = {gpu.address: gpu for gpu in (*rank.gpus, event)}
            return _with_rank(record, rank._replace(gpus=tuple(known.values())))
        case events.AtLine():
            loop = rank.loop or (event if event.iterations else None)
            before = rank.at.iterations if rank.at is not None else None
            looped = event.time if event.iterations != before else rank.looped
            return _with_rank(record, rank._replace(at=event, loop=loop, looped=looped))
        case events.RankUsed():
            samples = _fewer((*rank.samples, _sample(event, rank.gpus)), samples_kept(record.size))
            return _with_rank(record, rank._replace(used=event, samples=samples))
        case events.TimeSpent():
            lane = _merged((*rank.lane, _since(rank.spent, event)), phase_times_kept(record.size))
            return _with_rank(record, rank._replace(spent=event, lane=lane))
        case events.DataOpened():
            return _told(record, event, readings=(*rank.readings, Reading(event)))
        case events.DataPlanned():
            return _told(record, event, readings=_planned(rank.readings, event))
        case events.DataRead():
            return _told(record, event, readings=tuple(_read(reading, event) for reading in rank.readings))
        case events.CheckpointSaved():
            stream = record.stream
            if stream is not None and event.step >= 0:  # it is -1 for the state before the first batch
                stream = stream._replace(saved=event.step)
            return _saved(_told(record, event)._replace(stream=stream), event)
        case events.CheckpointFailed():
            text = f"the checkpoint of step {event.step:,} could not be saved in {event.folder}: {event.reason}"
            return _noticed(record, events.Notice(event.time, text))
        case events.CheckpointDamaged() | events.CheckpointRemoved():
            return _changed(record, event)
        case events.CheckpointRestored():
            return _restored(_told(record, event), event)
        case events.RankStarted():
            state = "idle" if rank.state == "idle" else "running"
            record = record._replace(running_since=record.running_since or event.time)
            rank = rank._replace(used=None, samples=(), at=None, loop=None, looped=0.0, spent=None, lane=())
            return _told(_with_rank(record, rank), event, state=state, host=event.host, pid=event.pid)
        case events.RankFinished():
            return _told(record, event, state="finished", value=event.value, stack=None)
        case events.RankFailed():
            return _told(record, event, state="failed", failure=event.failure)
        case events.RankStopped():
            return _told(record, event, state="stopped")
        case events.RankExited():
            return _exited(record, event)
        case events.StackTaken():
            return _with_rank(record, rank._replace(stack=event))
        case events.TimelinePart() | events.TracePart() | events.ItemMeasured():
            return record  # the first two are saved in files, and the third is used for a plan


def _started(record: RunRecord, event: events.RunStarted) -> RunRecord:
    begun = event._asdict()
    time, part = begun.pop("time"), begun.pop("ranks")
    up_since = time if event.warm else 0.0
    ranks = _at_the_start(event.size, part, up_since)
    part = tuple(sorted(set(part))) if len(set(part)) < event.size else ()
    return record._replace(**begun, part=part, started=time, running_since=up_since, ranks=ranks)


def _item_changed(record: RunRecord, event: events.ItemStarted | events.ItemEnded) -> RunRecord:
    items = record.items
    assert items is not None
    if isinstance(event, events.ItemStarted):
        host = record.ranks[event.slot * items.ranks_each].host if event.slot >= 0 else ""
        return record._replace(items=item_records.started(items, event, host))
    slot = next(running.slot for running in items.running if running.item == event.item)
    for rank in record.ranks[slot * items.ranks_each : (slot + 1) * items.ranks_each] if slot >= 0 else ():
        record = _with_last_lines(record, rank)  # the next item begins a new line
    return record._replace(items=item_records.ended(items, event))


def _with_not_finite(record: RunRecord, report: events.Metrics) -> RunRecord:
    odd = {name: value for name, value in report.values.items() if not math.isfinite(value)}
    if not odd and not record.not_finite:
        return record
    known = dict(record.not_finite)
    for name in report.values:
        before = known.pop((name, report.rank), None)
        if name in odd and len(known) < METRICS_KEPT:
            what = "NaN" if math.isnan(odd[name]) else "infinite"
            step = report.step
            if before is None and step is None and report.epoch is None:  # such reports are numbered
                step = sum(other.rank == report.rank for other in record.metrics)
            since = before or NotFinite(what, report.epoch, step)
            known[name, report.rank] = since._replace(what=what if what == since.what else "not finite")
    return record._replace(not_finite=known)


def _command_failed(record: RunRecord, event: events.CommandFailed) -> RunRecord:
    number = event.rank if record.items is None else item_records.item_on(record.items, event.rank)
    known = record.failed_commands.get((event.command, event.code), FailedCommand())
    if number not in known.numbers:
        known = FailedCommand((*known.numbers, number)[:NUMBERS_SHOWN], known.total + 1)
    if len(record.failed_commands) < NOTICES_KEPT:
        record = record._replace(failed_commands={**record.failed_commands, (event.command, event.code): known})
    return _told(record, event)


def _with_failed_commands(record: RunRecord, time: float) -> RunRecord:
    """Return the record of a finished run with a notice for each shell command that has failed."""
    noun = "rank" if record.items is None else record.items.noun
    for (command, code), failed in record.failed_commands.items():
        ended = f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
        numbers = ", ".join(map(str, sorted(failed.numbers)))
        more = f" and {failed.total - len(failed.numbers):,} more" if failed.total > len(failed.numbers) else ""
        where = f"{noun}{'s' if failed.total > 1 else ''} {numbers}{more}"
        text = f"`{command}` {ended} on {where}. The cell went on, since such a command raises no error."
        record = _noticed(record, events.Notice(time, text))
    return record


def _noticed(record: RunRecord, notice: events.Notice) -> RunRecord:
    return record._replace(notices=(*record.notices, notice)[-NOTICES_KEPT:])


def _logs_cut(record: RunRecord, event: events.LogsCut) -> RunRecord:
    if not record.left_out_bytes:
        text = "the ranks print more than is kept, so the middle of their logs is left out"
        record = _noticed(record, events.Notice(event.time, f"{text} (SPARKRING_KEEP_RUN_MB sets how much is kept)."))
    left_out_bytes = record.left_out_bytes + event.size_bytes
    return record._replace(left_out_bytes=left_out_bytes, left_out_lines=record.left_out_lines + event.lines)


def _without_old_notices(before: RunRecord, event: events.Event, after: RunRecord) -> RunRecord:
    """Return `after`, the record after the event, without the notices that no longer apply."""
    # If a rank is stopped during a stall, it writes a traceback. This is not progress, so the notice about the stall
    # must stay.
    on_stderr = isinstance(event, events.Output) and event.stream == "stderr"
    ends = on_stderr or isinstance(event, events.RankFailed | events.RankStopped)
    ranks = zip(before.ranks, after.ranks, strict=False)
    is_over = {
        "up": all(rank.state != "starting" for rank in after.taking_part),
        "heard": isinstance(event, events.BatchEnded)
        or (not ends and any(old.last_heard < new.last_heard for old, new in ranks)),
        "ended": all(rank.state not in ("starting", "running") for rank in after.taking_part),
        "short": bool(after.outcome) or after.items is None or not after.items.short,
        "over": bool(after.outcome),
    }
    kept = tuple(notice for notice in after.notices if not is_over.get(notice.until))
    return after if len(kept) == len(after.notices) else after._replace(notices=kept)


def _thinned(metrics: tuple[events.Metrics, ...]) -> tuple[events.Metrics, ...]:
    """Drop every other step from the older half of the metrics, so that curves keep their beginning.

    If most of the older half are ends of epochs, every other epoch is dropped, too. The same steps and epochs are
    dropped for all ranks, so that ranks can be compared at the remaining ones.
    """
    half = METRICS_KEPT // 2
    older, places = metrics[:half], _places(metrics)
    ends = [place for report, place in zip(older, places, strict=False) if report.ends_epoch]
    steps = [place for report, place in zip(older, places, strict=False) if not report.ends_epoch]
    numbers = {place: number for some in (steps, ends) for number, place in enumerate(dict.fromkeys(some))}
    many_ends = len(ends) > half // 2
    # Some ranks' reports for a step may be in the older half, and other ranks' reports in the newer half, which is kept
    # whole. Such a step is kept in the older half, too.
    split = {*places[half : half + 2 * len({report.rank for report in older})]}
    # Each rank's last report is kept, so that a rank that has stopped reporting does not seem to go back.
    last = {report.rank: report for report in metrics}
    keep = (
        (report.ends_epoch and not many_ends) or at in split or numbers[at] % 2 == 0 or report is last[report.rank]
        for report, at in zip(older, places, strict=False)
    )
    return (*itertools.compress(older, keep), *metrics[half:])[-METRICS_KEPT:]


def samples_kept(size: int) -> int:
    """Return how many Samples are kept for each rank of a run of `size` ranks."""
    return max(1, min(SAMPLES_KEPT, SAMPLES_OF_ALL // max(1, size)))


def _sample(used: events.RankUsed, gpus: Sequence[events.GpuUsed]) -> Sample:
    busy = [gpu.busy_percent for gpu in gpus if gpu.busy_percent is not None]
    held = [gpu.used_bytes for gpu in gpus if gpu.used_bytes is not None]
    power = [gpu.power_w for gpu in gpus if gpu.power_w is not None]
    heat = [gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None]
    return Sample(
        used.time,
        used.cpu_percent,
        used.memory_bytes,
        gpu_percent=sum(busy) / len(busy) if busy else None,
        gpu_bytes=sum(held) if held else None,
        gpu_power_w=sum(power) if power else None,
        gpu_temperature_c=max(heat, default=None),
    )


def _fewer(samples: tuple[Sample, ...], most: int) -> tuple[Sample, ...]:
    """If there are more than `most` samples, drop every other one of the older half."""
    if len(samples) <= most:
        return samples
    half = most // 2
    return (*samples[:half:2], *samples[half:])[-most:]


def phase_times_kept(size: int) -> int:
    """Return how many PhaseTimes are kept for each rank of a run of `size` ranks."""
    return max(4, min(PHASE_TIMES_KEPT, PHASE_TIMES_OF_ALL // max(1, size)))


def _since(before: events.TimeSpent | None, after: events.TimeSpent) -> PhaseTimes:
    known = before.phases if before is not None else {}
    changes = {name: round(seconds - known.get(name, 0.0), 3) for name, seconds in after.phases.items()}
    return PhaseTimes(after.time, {name: seconds for name, seconds in changes.items() if seconds > 0})


def _merged(lane: tuple[PhaseTimes, ...], most: int) -> tuple[PhaseTimes, ...]:
    """If the lane has more than `most` parts, merge the two neighbours that are shortest together."""
    if len(lane) <= most:
        return lane
    lengths_s = [sum(part.phases.values()) for part in lane]
    at = min(range(len(lane) - 1), key=lambda at: lengths_s[at] + lengths_s[at + 1])
    (_, first), (ended, second) = lane[at : at + 2]
    sums = {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {**first, **second}}
    return (*lane[:at], PhaseTimes(ended, sums), *lane[at + 2 :])


def _places(metrics: Sequence[events.Metrics]) -> list[tuple[int | None, int, bool]]:
    """Return the epoch and step of each report, and whether the report ends the epoch.

    A report without a step gets its number among its rank's reports. If it ends an epoch, only the ends of epochs with
    the same number are counted, which are those of other fits.
    """
    counted = Counter[tuple[int, int | None, bool]]()
    places = []
    for report in metrics:
        count = (report.rank, report.epoch if report.ends_epoch else None, report.ends_epoch)
        counted[count] += 1
        of_rank = counted[count] if report.step is None or report.ends_epoch else report.step
        places.append((report.epoch, of_rank, report.ends_epoch))
    return places


# Nested progress bars of tqdm move the cursor up after each bar, and down again with a newline before the next.
_UP_AND_DOWN = re.compile(rb"\x1b\[A\r*\n")
_BLANK = re.compile(rb"(?:\s|\x1b\[\d*[A-DJK])*")


def in_place(data: bytes) -> bytes:
    """Return output without newlines that only move the cursor down again: each becomes a carriage return."""
    while b"\x1b[A" in data:
        data, count = _UP_AND_DOWN.subn(b"\r", data)
        if not count:
            break
    return data


def is_erased(line: bytes) -> bool:
    """Return whether a line was written and then blanked, as by a progress bar that removes itself."""
    line = line.rstrip(b"\r")
    return b"\r" in line and _BLANK.fullmatch(line, line.rfind(b"\r")) is not None


def as_shown(line: bytes) -> str:
    """Return what a terminal ends up showing: the text after the last carriage return, with invalid bytes as \\xNN."""
    line = line.rstrip(b"\r")
    line = line[line.rfind(b"\r") + 1 :]
    text = line.decode("utf-8", "backslashreplace")
    return text if len(text) <= LINE_CHARACTERS else text[:LINE_CHARACTERS] + " … (cut)"


def _at_the_start(size: int, part: Sequence[int] = (), warm_at: float = 0.0) -> tuple[RankRecord, ...]:
    """Return the ranks as they are when the cell starts.

    If the run is on a warm gang, `warm_at` is the time of the start: the gang's ranks are up, so they are "running" at
    once. If `part` names some ranks, the others are "idle".
    """
    state: RankState = "running" if warm_at else "starting"
    idle = {*range(size)} - {*part} if part else set()
    return tuple(RankRecord(rank, "idle" if rank in idle else state, last_heard=warm_at) for rank in range(size))


def _begun(record: RunRecord, event: events.AttemptStarted) -> RunRecord:
    """Begin an attempt. Its ranks are new, but keep the last lines and the counts of the previous attempt's ranks."""
    ranks = tuple(
        rank._replace(line_count=old.line_count, size_bytes=old.size_bytes, tail=old.tail) if old else rank
        for rank, old in itertools.zip_longest(_at_the_start(event.size), record.ranks[: event.size])
    )
    begun = Attempt(event.number, event.time, event.size, event.checkpoint, event.step, most=event.most)
    attempts = (*record.attempts, begun)
    record = record._replace(not_finite={})
    return record._replace(size=event.size, ranks=ranks, joined=0, running_since=0.0, attempts=attempts)


def _lost(record: RunRecord, event: events.AttemptEnded) -> RunRecord:
    """Record what ended the current attempt."""
    ended = record.attempts[-1]._replace(ended=event.time, reason=event.reason, failed_rank=event.failed_rank)
    if event.failed_rank is not None:
        rank = record.ranks[event.failed_rank]
        lines = rank.lines_with_partial()[-ATTEMPT_LINES:]
        ended = ended._replace(host=rank.host, failure=rank.failure, last_lines=lines)
    return record._replace(attempts=(*record.attempts[:-1], ended))


def _saved(record: RunRecord, event: events.CheckpointSaved) -> RunRecord:
    new = Checkpoint(event, len(record.attempts))
    others = []
    for checkpoint in record.checkpoints:
        saved = checkpoint.saved
        if event.best and saved.best and (saved.folder, saved.kind) == (event.folder, event.kind):
            checkpoint = checkpoint._replace(saved=saved._replace(best=False))
        if checkpoint.place != new.place:  # otherwise, ModelCheckpoint has overwritten it, and `new` replaces it
            others.append(checkpoint)
    return record._replace(checkpoints=(*others, new)[-CHECKPOINTS_KEPT:])


def _changed(record: RunRecord, event: events.CheckpointDamaged | events.CheckpointRemoved) -> RunRecord:
    """Record that a checkpoint was damaged or removed. If an earlier run saved it, only damage is recorded."""
    state: CheckpointState = "damaged" if isinstance(event, events.CheckpointDamaged) else "removed"
    reason = event.reason if isinstance(event, events.CheckpointDamaged) else ""
    place, checkpoints = (event.folder, event.name), record.checkpoints
    if isinstance(event, events.CheckpointDamaged) and all(other.place != place for other in checkpoints):
        saved = events.CheckpointSaved(event.folder, event.name, event.step, 0, time=event.time, rank=event.rank)
        checkpoints = (Checkpoint(saved, 0), *checkpoints)[:CHECKPOINTS_KEPT]
    changed = (old._replace(state=state, reason=reason) if old.place == place else old for old in checkpoints)
    return record._replace(checkpoints=tuple(changed))


def _restored(record: RunRecord, event: events.CheckpointRestored) -> RunRecord:
    if not record.attempts or record.attempts[-1].restored:
        return record
    now = record.attempts[-1]._replace(restored=event.time, checkpoint=event.name, step=event.step)
    return record._replace(attempts=(*record.attempts[:-1], now))


def _heard(rank: RankRecord, time: float) -> RankRecord:
    """Return the record of the rank after it has sent a message."""
    moved_on = rank.stack is not None and time - rank.stack.time > STACK_HOLDS_S
    # In a saved run, a DataRead may come after newer events.
    return rank._replace(last_heard=max(time, rank.last_heard), stack=None if moved_on else rank.stack)


def _told(record: RunRecord, event: events.RankEvent, **changes: Any) -> RunRecord:
    """Apply `changes` to the rank of `event`, and note that a message from the rank has arrived."""
    return _with_rank(record, _heard(record.ranks[event.rank], event.time)._replace(**changes))


def _with_rank(record: RunRecord, changed: RankRecord) -> RunRecord:
    ranks = (*record.ranks[: changed.rank], changed, *record.ranks[changed.rank + 1 :])
    return record._replace(ranks=ranks)


def _with_lines(record: RunRecord, rank: RankRecord, lines: list[LogLine], count: int) -> RunRecord:
    """Add new lines of a rank to the record. `count` is the number of new lines, and `lines` are the last of them.

    Lines that `--logs` leaves out are kept only in the rank's `tail`.
    """
    tail = (*rank.tail, *lines[-TAIL_LINES:])[-TAIL_LINES:]
    record = _with_rank(record, rank._replace(tail=tail, line_count=rank.line_count + count))
    if record.logs == "callbacks" or (record.logs == "rank0" and rank.rank != 0):
        lines = [line for line in lines if line.stream == "message"]
        count = len(lines)
    lines = labelled(record, lines)
    return record._replace(recent=(*record.recent, *lines)[-RECENT_LINES:], recent_count=record.recent_count + count)


def labelled(record: RunRecord, lines: list[LogLine]) -> list[LogLine]:
    """Return lines of a rank as they are shown. In a run of items, the `rank` of a line becomes the item's number."""
    if record.items is None or not lines:
        return lines
    item = item_records.item_on(record.items, lines[0].rank)
    return [line._replace(rank=item) for line in lines]


def _printed(record: RunRecord, event: events.Output) -> RunRecord:
    rank = record.ranks[event.rank]
    partial = rank.partial_stdout if event.stream == "stdout" else rank.partial_stderr
    data = in_place(partial + event.data)
    end = data.rfind(b"\n") + 1
    whole, rest = data[:end], data[end:]
    rest = rest[max(0, rest.rstrip(b"\r").rfind(b"\r")) :]  # a bar's earlier states would soon fill the line
    if len(rest) > PARTIAL_BYTES:
        whole, rest = data + b"\n", b""
    count = whole.count(b"\n")
    # Only lines that can be kept are decoded; most lines of a burst are only counted.
    kept = whole.rsplit(b"\n", RECENT_LINES + 1)[-RECENT_LINES - 1 : -1] if count else []
    left = [line for line in kept if not is_erased(line)]
    count -= len(kept) - len(left)
    lines = [LogLine(event.time, event.rank, event.stream, as_shown(line)) for line in left]
    rank = _heard(rank, event.time)._replace(
        partial_stdout=rest if event.stream == "stdout" else rank.partial_stdout,
        partial_stderr=rest if event.stream == "stderr" else rank.partial_stderr,
        size_bytes=rank.size_bytes + len(event.data),
    )
    return _with_lines(record, rank, lines, count)


def bounded(record: RunRecord, event: events.Displayed) -> events.Displayed:
    """Return the display as the record will keep it: without its data if this data would exceed a rank's limits."""
    event = event._replace(attempt=len(record.attempts) or 1)
    others = [old for old in record.displays if old.rank == event.rank and not _takes_place(event, old)]
    full = len(others) >= DISPLAYS_KEPT or sum(len(old.data) for old in others) + len(event.data) > DISPLAY_BYTES
    return event._replace(data=b"") if full else event


def _takes_place(new: events.Displayed, old: events.Displayed) -> bool:
    same_rank = (old.rank, old.attempt, old.item) == (new.rank, new.attempt, new.item)
    return same_rank and (new.clears or old.number == new.number)


def _displayed(record: RunRecord, event: events.Displayed) -> RunRecord:
    """Add a display, or replace an earlier display with the same number. Without data, count it as left out."""
    if not event.data:
        return _told(record, event, displays_left_out=record.ranks[event.rank].displays_left_out + 1)
    at = next((at for at, old in enumerate(record.displays) if not event.clears and _takes_place(event, old)), None)
    if at is not None:
        displays = (*record.displays[:at], event, *record.displays[at + 1 :])
    else:
        displays = (*(old for old in record.displays if not _takes_place(event, old)), event)
    return _told(record, event)._replace(displays=displays)


def _read(reading: Reading, event: events.DataRead) -> Reading:
    if event.reader != reading.opened.reader:
        return reading
    ended = (*reading.ended, event)[-EPOCHS_KEPT:] if event.done else reading.ended
    return reading._replace(now=event, ended=ended)


def _planned(readings: tuple[Reading, ...], event: events.DataPlanned) -> tuple[Reading, ...]:
    """Return the readings with the new plan `event`; only the newest PLANS_KEPT plans are kept."""
    updated = [old._replace(plan=event) if old.opened.reader == event.reader else old for old in readings]
    plans = sorted((reading.plan.time, reading.plan.reader) for reading in updated if reading.plan is not None)
    gone = {reader for _, reader in plans[:-PLANS_KEPT]}
    return tuple(reading._replace(plan=None) if reading.opened.reader in gone else reading for reading in updated)


def _exited(record: RunRecord, event: events.RankExited) -> RunRecord:
    rank = record.ranks[event.rank]
    stopped = rank.state in ("starting", "running", "idle")
    rank = rank._replace(state="stopped" if stopped else rank.state, last_heard=event.time)
    return _with_last_lines(record, rank)


def _all_ended(record: RunRecord) -> RunRecord:
    """Mark each rank that is still starting or running as stopped. A rank that had to be killed sends no event."""
    for rank in record.ranks:
        ended = rank._replace(state="stopped") if rank.state in ("starting", "running") else rank
        record = _with_last_lines(record, ended._replace(at=None))
    return record


def _with_last_lines(record: RunRecord, rank: RankRecord) -> RunRecord:
    """Add the rank's incomplete lines, as if they were complete."""
    last = rank.partial_lines()
    return _with_lines(record, rank._replace(partial_stdout=b"", partial_stderr=b""), last, len(last))
