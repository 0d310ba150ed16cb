"""Describes a run that trains on a stream: its progress, its rates, and how it spends its time."""

from __future__ import annotations

import itertools

from sparkring.history.describe.text import counted, dotted, duration
from sparkring.history.events import BatchEnded
from sparkring.history.record import RunRecord
from sparkring.history.stream_records import StreamRecord

# The parts of the time that a batch takes, in the order in which charts stack them.
PARTS = ("moving", "reading", "training", "saving", "other cells", "waiting")
RATE_S = 60.0  # during a run, rates are measured over this time before the end of the last batch
NOT_YET = "not yet"
WAITS_LONG = 3.0  # if the ranks wait so many times as long as they work, a chart leaves the waiting out


def stream(record: RunRecord) -> str:
    """Describe a stream in one line: `batch 137 · 12,800 rows · 5,200 rows/s · saved after batch 136 · 2 empty`.

    After the run, the line begins with `ended after batch 137`. Return '' if the run does not train on a stream.
    """
    stream_record = record.stream
    if stream_record is None:
        return ""
    last = stream_record.last
    if last is None and record.outcome is not None:
        return "ended before the first batch"
    if last is None:
        begins = "waiting for the first batch"
        return (
            begins
            if stream_record.began.saved is None
            else f"continues after batch {stream_record.began.saved:,} · {begins}"
        )
    where = f"{'batch' if record.outcome is None else 'ended after batch'} {last.batch_id:,}"
    trained, _ = stream_rates(record)
    covered = saved_after(record)
    saved = "not saved yet" if covered == NOT_YET else covered and f"saved {covered}"
    backlog = f"backlog {_backlog(stream_record)}" if stream_record.backlog_rows and record.outcome is None else ""
    others = [f"{count:,} {name}" for name, count in other_endings(stream_record)]
    return dotted(where, counted(stream_record.rows, "row"), _rate(trained), backlog, saved, *others)


def stream_total(record: RunRecord) -> str:
    """Describe all of a stream in one line: `137 batches · 12,800 rows · saved after batch 136`."""
    stream_record = record.stream
    if stream_record is None:
        return ""
    saved = saved_after(record)
    return dotted(
        counted(stream_record.batches, "batch"), counted(stream_record.rows, "row"), saved and f"saved {saved}"
    )


def stream_idle(record: RunRecord, now: float) -> str:
    """Say how long no batch has ended, if this is much longer than usual: `no batch for 12 s`; otherwise return ''."""
    stream_record = record.stream
    if stream_record is None or stream_record.last is None or record.outcome is not None:
        return ""
    usual = max((later.time - earlier.time for earlier, later in itertools.pairwise(stream_record.recent)), default=0.0)
    idle_s = now - stream_record.last.time
    return f"no batch for {duration(int(idle_s))}" if idle_s > max(5.0, 2 * usual) else ""


def stream_figures(record: RunRecord) -> list[tuple[str, str]]:
    """Return what is known about a stream, as pairs of a name and a value: `("rows", "12,800")`. Leave out the rest."""
    stream_record = record.stream
    if stream_record is None:
        return []
    over = record.outcome is not None
    trained, arriving = stream_rates(record)
    figures = [
        ("last batch" if over else "batch", f"{stream_record.last.batch_id:,}" if stream_record.last else ""),
        ("rows", f"{stream_record.rows:,}" if stream_record.last else ""),
        ("trained, on average" if over else "trained", _rate(trained)),
        ("arriving", "" if arriving is None or over else _rate(arriving) or "0 rows/s"),
        ("backlog", "" if stream_record.backlog_rows is None else _backlog(stream_record)),
        ("saved", saved_after(record)),
        *((name, counted(count, "batch")) for name, count in other_endings(stream_record)),
    ]
    return [(name, value) for name, value in figures if value]


def stream_facts(record: RunRecord) -> str:
    """Say where the rows come from, and which variables are saved: `from df · saves model, optimizer after …`."""
    stream_record = record.stream
    if stream_record is None:
        return ""
    every = stream_record.began.save_every
    often = "after every batch" if every == 1 else f"after every {every:,} batches"
    state = (
        f"saves {', '.join(stream_record.began.state)} {often}"
        if stream_record.began.state and record.checkpoint_dir
        else ""
    )
    return dotted(f"from {stream_record.began.source}" if stream_record.began.source else "", state)


def stream_rates(record: RunRecord) -> tuple[float, float | None]:
    """Return the rows per second that are trained, and that arrive in the source; the latter is None if not known.

    During the run, these are the rates of the last RATE_S seconds. After the run, they are those of the whole run.
    """
    stream_record = record.stream
    if stream_record is None or stream_record.last is None:
        return 0.0, None
    took_s = stream_record.busy_s + stream_record.others_s + stream_record.waiting_s
    whole = stream_record.rows / took_s if took_s else 0.0
    since = stream_record.last.time - RATE_S
    recent = [batch for batch in stream_record.recent if batch.time >= since]
    recent = recent if recent[1:] else list(stream_record.recent[-2:])
    past_s = recent[-1].time - recent[0].time
    if record.outcome is not None or past_s <= 0:
        return whole, None
    rows = sum(batch.rows for batch in recent[1:] if batch.how == "trained")
    before, after = recent[0].backlog_rows, recent[-1].backlog_rows
    arriving = None if before is None or after is None else max(0.0, (rows + after - before) / past_s)
    return rows / past_s, arriving


def saved_after(record: RunRecord) -> str:
    """Say which batches the last checkpoint covers: `after batch 136`; '' if the run saves no checkpoints."""
    stream_record = record.stream
    if stream_record is None or not record.checkpoint_dir:
        return ""
    if stream_record.saved is None:
        return NOT_YET
    # Ranks report a checkpoint just before the end of its batch is recorded.
    last = stream_record.last
    return f"after batch {stream_record.saved if last is None else min(stream_record.saved, last.batch_id):,}"


def other_endings(stream_record: StreamRecord) -> list[tuple[str, int]]:
    """Return how many batches were replayed, passed over or empty, with these words. Leave out what did not happen."""
    counts = (
        ("replayed", stream_record.replayed),
        ("passed over", stream_record.passed_over),
        ("empty", stream_record.empty),
    )
    return [(name, count) for name, count in counts if count]


def parts_s(timed: BatchEnded | StreamRecord) -> tuple[float, ...]:
    """Return the seconds of each of the PARTS, for a batch or for all batches of a stream."""
    return timed.moving_s, timed.reading_s, timed.training_s, timed.saving_s, timed.others_s, timed.waiting_s


def charted(stream_record: StreamRecord) -> tuple[str, ...]:
    """Return the PARTS that a chart shows at first: all, or all but the waiting if it would dwarf the others."""
    return PARTS[:-1] if stream_record.waiting_s > WAITS_LONG * stream_record.busy_s else PARTS


def shares(stream_record: StreamRecord) -> list[str]:
    """Return the percentage of the time that each of the PARTS takes, in the same order: `62 %`, `< 1 %`."""
    times = parts_s(stream_record)
    whole = sum(times) or 1.0
    return ["< 1 %" if 0 < time < 0.005 * whole else f"{100 * time / whole:.0f} %" for time in times]


def step_noun(record: RunRecord) -> str:
    """Return what a step of a run is called: `batch` for a stream, because checkpoints and metrics are by batch."""
    return "step" if record.stream is None else "batch"


def continued(record: RunRecord, step: int) -> str:
    """Return where an attempt continues: `from step 120`, or `after batch 45` for a stream."""
    if step < 0:  # a stream has saved its initial state, and nothing later
        return "from the initial state"
    return f"from step {step:,}" if record.stream is None else f"after batch {step:,}"


def _backlog(stream_record: StreamRecord) -> str:
    seconds = (
        f" ({duration(stream_record.backlog_s)})" if stream_record.backlog_s and stream_record.backlog_rows else ""
    )
    return f"{counted(stream_record.backlog_rows or 0, 'row')}{seconds}"


def _rate(rate: float) -> str:
    if not rate:
        return ""
    return f"{rate:.2g} rows/s" if rate < 9.95 else f"{float(f'{rate:.3g}'):,.0f} rows/s"
