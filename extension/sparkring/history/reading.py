"""Describes which data the ranks read, their progress, and which ranks wait for data or finish before the others."""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from sparkring.history.describe import counted, dotted, duration, first_line, named, percent, rank_list, size, span
from sparkring.history.events import DataOpened, DataPlanned, DataRead, Piece
from sparkring.history.lines import plain
from sparkring.history.record import Reading, RunRecord

STARVED = 0.5  # a rank starves if it spends more than this fraction of its time waiting for data
# A rank also starves if this fraction is more than 0.3, and more than 0.2 above the other ranks' median.
STARVED_BESIDE_OTHERS, MORE_THAN_OTHERS = 0.3, 0.2
# In an epoch's first second, waiting is ignored, since every rank has to wait for its first batch.
JUDGED_AFTER_S = 1.0
# A rank is early if it ended its epoch at least this long ago and other ranks have not ended the epoch. Within a
# shorter time, the reports of the other ranks may merely be late.
EARLY_S = 2.0
RANKS_ALONE, BLOCKS = 32, 16  # more ranks than RANKS_ALONE are shown as at most BLOCKS blocks of neighbours
NAMED = 3  # this many data sets of a run are shown: those that were opened last
UNEVEN = 1.01  # the ranks' shares count as even if the largest is at most this many times the smallest
_NAME_CHARACTERS = 40  # at most this many characters of a file's name are shown in a picture
_NOTES_SHOWN = 4
_COLUMNS = 8
_DATA_LISTED = 2  # how many data sets of each run a list of runs names
_RANKS_CHARACTERS = 60

Mark = Literal["", "starves", "early"]
State = Literal["read", "reading", "to come"]


class RankReading(NamedTuple):
    """One rank and the progress of its last reader of a data set. `mark` and `note` say what is wrong, if anything."""

    rank: int
    read: DataRead | None
    mark: Mark = ""
    note: str = ""
    plan: DataPlanned | None = None

    @property
    def fraction(self) -> float | None:
        """The fraction of its epoch that the rank has read; None if the length of the epoch is not known."""
        if self.read is None:
            return None
        for done, planned in ((self.read.rows, self.read.rows_planned), (self.read.steps, self.read.steps_planned)):
            if planned:
                return min(1.0, done / planned)
        return None

    @property
    def waiting(self) -> float | None:
        """The fraction of the epoch's time that the rank spent waiting for data; None if it is too early to tell."""
        if self.read is None or self.read.elapsed_s < JUDGED_AFTER_S:
            return None
        return min(1.0, self.read.waited_s / self.read.elapsed_s)

    def rate(self, what: Literal["rows", "size_bytes"]) -> float | None:
        """Return how many rows or bytes the rank has read per second, on average over the epoch so far."""
        if self.read is None or not self.read.elapsed_s:
            return None
        return float(getattr(self.read, what)) / self.read.elapsed_s

    @property
    def epoch(self) -> int:
        """The epoch that the rank is reading, counted from 1; 0 before the first epoch begins."""
        return max(self.read.epoch if self.read else 0, self.plan.epoch if self.plan else 0)

    @property
    def read_of_plan(self) -> DataRead | None:
        """The rank's progress in the epoch of its plan; None if the rank has not reported any progress yet."""
        if self.plan is None or self.read is None or self.read.epoch != self.plan.epoch:
            return None
        # Progress that is older than the plan belongs to an earlier start of the same epoch.
        return self.read if self.read.time >= self.plan.time else None

    @property
    def begun(self) -> int:
        """How many of the epoch's rows had already been read when the rank's reader was made."""
        return self.plan.begun if self.plan is not None and self.plan.epoch == self.epoch else 0

    @property
    def rows_planned(self) -> int | None:
        """The number of rows that the rank's reader is to read in the epoch; None if this is not known."""
        if self.plan is not None and self.plan.epoch == self.epoch:
            return self.plan.rows - self.plan.begun
        return None if self.read is None else self.read.rows_planned


class DataSet(NamedTuple):
    """A data set that some ranks read, under the same name and with the same filter."""

    opened: DataOpened
    ranks: tuple[RankReading, ...]
    versions: tuple[tuple[str, tuple[int, ...]], ...]  # each version of the files, with the ranks that found it


class Line(NamedTuple):
    """A line of the table, for one rank or several neighbouring ranks. The strings are ready to be shown."""

    ranks: tuple[int, ...]
    epoch: str
    fraction: float | None
    rows: str
    rows_per_s: str
    bytes_per_s: str
    waiting: str
    place: str
    mark: Mark
    notes: str  # if the line has several ranks, the notes name the ranks that they are about


def data_sets(record: RunRecord, now: float) -> list[DataSet]:
    """Return the data sets of a run, in the order in which they were first opened."""
    by_data_set: dict[tuple[str, str, str], dict[int, Reading]] = {}
    for rank in record.ranks:
        for reading in rank.readings:
            opened = reading.opened
            # A rank may open a new reader of the same data for each evaluation, so only its last reader is shown.
            by_data_set.setdefault((opened.name, opened.kind, opened.where), {})[rank.rank] = reading
    return [_data_set(record, readings, record.ended or now) for readings in by_data_set.values()]


def _data_set(record: RunRecord, readings: dict[int, Reading], now: float) -> DataSet:
    versions: dict[str, list[int]] = {}
    for rank, reading in readings.items():
        versions.setdefault(reading.opened.version, []).append(rank)
    ranks = [RankReading(rank, reading.now, plan=reading.plan) for rank, reading in sorted(readings.items())]
    opened = next(iter(readings.values())).opened
    return DataSet(opened, _judged(record, ranks, now), tuple((version, tuple(of)) for version, of in versions.items()))


def _judged(record: RunRecord, ranks: Sequence[RankReading], now: float) -> tuple[RankReading, ...]:
    """Return the ranks. Ranks that ended an epoch before others, or that wait for data, get a mark and a note."""
    over = record.outcome is not None
    reading = {rank.rank for rank in record.ranks if (rank.state != "finished" if over else rank.state == "running")}
    waitings = sorted(rank.waiting for rank in ranks if rank.waiting is not None)  # sort only once: ranks may be many
    reached = [(rank.read.epoch + rank.read.done, rank.rank) for rank in ranks if rank.read and rank.rank in reading]

    @functools.cache
    def not_beyond(epoch: int) -> list[int]:
        return [rank for at, rank in reached if at <= epoch]

    def judged(mine: RankReading) -> RankReading:
        read, waiting = mine.read, mine.waiting
        since_s = now - read.time if read is not None and read.done else 0.0
        if read is not None and since_s >= EARLY_S and (behind := not_beyond(read.epoch)):
            when = f"{duration(since_s)} before the run ended" if over else f"{duration(int(since_s))} ago"
            verb = "had not" if over else "has not" if len(behind) == 1 else "have not"
            note = f"ended its epoch {when}, after {counted(read.steps, 'step')}; {_ranks(behind)} {verb}"
            return mine._replace(mark="early", note=note)
        if waiting is None or waiting <= STARVED_BESIDE_OTHERS:
            return mine
        usual = _median_without(waitings, waiting)
        if waiting > STARVED or (usual is not None and waiting > usual + MORE_THAN_OTHERS):
            beside = "" if usual is None else f" (the others: {100 * usual:.0f} %)"
            note = f"{'waited' if over else 'waits'} for data {100 * waiting:.0f} % of the time{beside}"
            return mine._replace(mark="starves", note=note)
        return mine

    return tuple(map(judged, ranks))


def waits(record: RunRecord, now: float) -> dict[int, RankReading]:
    """Return the last progress of each rank that has read long enough to judge how long it waits for data.

    If a rank reads several data sets, the one that it reported last counts.
    """
    by_rank: dict[int, RankReading] = {}
    for reading in (
        reading for data_set in data_sets(record, now) for reading in data_set.ranks if reading.waiting is not None
    ):
        last = by_rank.get(reading.rank)
        if last is None or _read_at(reading) > _read_at(last):
            by_rank[reading.rank] = reading
    return by_rank


def _read_at(reading: RankReading) -> float:
    return reading.read.time if reading.read is not None else 0.0


def causes(record: RunRecord, now: float) -> dict[int, str]:
    """Say how long ranks wait for data, by rank. Only ranks that clearly wait longer than the others are included."""
    by_rank = waits(record, now)
    fractions = sorted(reading.waiting or 0.0 for reading in by_rank.values())
    words = {}
    for rank, reading in by_rank.items():
        mine = reading.waiting or 0.0
        usual = _median_without(fractions, mine)
        if reading.mark == "starves" and usual is not None and mine > usual + MORE_THAN_OTHERS:
            words[rank] = f"it waits for data {100 * mine:.0f} % of the time (the others: {100 * usual:.0f} %)"
    return words


def _median_without(ordered: Sequence[float], value: float) -> float | None:
    """Return the median of `ordered` without one occurrence of `value`; None if nothing else is left."""
    at, count = bisect.bisect_left(ordered, value), len(ordered) - 1
    if not count:
        return None
    middle = [ordered[k + (k >= at)] for k in ((count - 1) // 2, count // 2)]
    return sum(middle) / 2


# ── In words ──────────────────────────────────────────────────────────────────


def data_words(data_set: DataSet) -> str:
    """Describe the data set: `digits.parquet · columns a, b · where x > 3 · 1,797 rows in 2 files · version 3f…`."""
    opened = data_set.opened
    counts = [counted(opened.rows, "row")] if opened.rows else []
    counts += [f"in {counted(opened.files, 'file')}"] if opened.files else []
    amount = " ".join(counts) + (f"{', ' if counts else ''}{size(opened.size_bytes)}" if opened.size_bytes else "")
    columns = named(opened.columns, _COLUMNS)
    words = [
        first_line(opened.name, 120) + ("" if opened.kind == "parquet" else f" ({opened.kind})"),
        f"columns {columns}" if columns else "",
        f"where {first_line(opened.where, 200)}" if opened.where else "",
        amount,
    ]
    if len(data_set.versions) > 1:
        seen = ", ".join(f"{first_line(version, 20) or '?'} on {_ranks(of)}" for version, of in data_set.versions[:4])
        words.append(f"ranks found different files: version {seen}")
    elif opened.version:
        words.append(f"version {first_line(opened.version, 40)}")
    return plain(dotted(*words))


def progress_words(record: RunRecord, now: float) -> str:
    """Return the progress in the data set that was reported last: `34 % of digits read, 1,203,000 rows/s`; or ''."""
    data_set = max(data_sets(record, now), key=_last_heard, default=None)
    if data_set is None or not _last_heard(data_set):
        return ""
    whole = line(data_set)
    part = "" if whole.fraction is None else f"{100 * whole.fraction:.0f} % of "
    words = [f"{part}{first_line(_short(data_set.opened.name), 40)} read"]
    words += [f"{whole.rows_per_s} rows/s"] if whole.rows_per_s else []
    starving, early = ([rank.rank for rank in data_set.ranks if rank.mark == mark] for mark in ("starves", "early"))
    words += [f"{_ranks(starving)} {'waits' if len(starving) == 1 else 'wait'} for data"] if starving else []
    words += [f"{_ranks(early)} finished the epoch early"] if early else []
    return plain(", ".join(words))


def notes(data_set: DataSet) -> str:
    """Say which ranks have problems with reading: rank by rank, or summed up if these ranks are many; or ''."""
    noted = [rank for rank in data_set.ranks if rank.note]
    left_out = sum(rank.read.left_out for rank in data_set.ranks if rank.read is not None)
    first = [f"{counted(left_out, 'row')} left out, see the logs"] * bool(left_out)
    if len(noted) <= _NOTES_SHOWN:
        return "; ".join([*first, *(f"rank {rank.rank} {rank.note}" for rank in noted)])
    kinds = [("starves", "waited a long time for data"), ("early", "ended the epoch before others")]
    marked = [(what, [rank.rank for rank in noted if rank.mark == mark]) for mark, what in kinds]
    return "; ".join([*first, *(f"{_ranks(ranks)} {what}" for what, ranks in marked if ranks)])


def closing_words(record: RunRecord, now: float) -> list[str]:
    """Return a line for each of a run's last data sets: what was read, and any problems with reading."""
    return [dotted(f"read {data_words(data_set)}", notes(data_set)) for data_set in data_sets(record, now)[-NAMED:]]


def balance_words(data_set: DataSet) -> str:
    """Say which rank has more to read than others, which is slowest, and how much has been read in total; or ''."""
    return plain(dotted(_share_words(data_set), _pace_words(data_set), _amount_words(data_set)))


def _share_words(data_set: DataSet) -> str:
    """Say how the ranks' shares of the latest epoch differ: `rank 3 has 12 % more rows than rank 0 (…)`; or ''."""
    epoch = max((rank.epoch for rank in data_set.ranks), default=0)
    same = [(rank.rows_planned, rank.rank) for rank in data_set.ranks if rank.epoch == epoch]
    known = [(rows, rank) for rows, rank in same if rows is not None]
    if len(known) < 2 or len(known) < len(same):
        return ""
    least, most = min(known), max(known, key=lambda pair: (pair[0], -pair[1]))
    if not least[0]:
        idle = [rank for rows, rank in known if not rows]
        return f"{_ranks(idle)} {'has' if len(idle) == 1 else 'have'} nothing to read" if most[0] else ""
    if most[0] <= UNEVEN * least[0]:
        return f"each rank has {least[0]:,}{f' to {most[0]:,}' if most[0] > least[0] else ''} rows"
    more = 100 * (most[0] / least[0] - 1)
    return f"rank {most[1]} has {more:,.0f} % more rows than rank {least[1]} ({most[0]:,} and {least[0]:,})"


def _pace_words(data_set: DataSet) -> str:
    rates = [
        (rate, reading.rank)
        for reading in data_set.ranks
        if reading.waiting is not None and (rate := reading.rate("rows"))
    ]
    if len(rates) < 2:
        return ""
    slowest, rank = min(rates)
    return f"slowest: rank {rank}, {_rows(slowest)} rows/s; median {_rows(statistics.median(r for r, _ in rates))}"


def _amount_words(data_set: DataSet) -> str:
    """Estimate how much of the files has been read. Some ranks may already be in the next epoch."""
    opened = data_set.opened
    rows = sum(rank.read.rows + rank.begun for rank in data_set.ranks if rank.read is not None)
    if not (opened.rows and opened.size_bytes and rows):
        return ""
    part = min(1.0, rows / opened.rows)
    return f"about {size(part * opened.size_bytes)} of {size(opened.size_bytes)} read in this epoch"


def _ranks(ranks: Sequence[int]) -> str:
    """Return the list of ranks, `ranks 0–3, 7`, or only the number of ranks if the list would be long."""
    named = rank_list(ranks)
    return named if len(named) <= _RANKS_CHARACTERS else f"{len(ranks):,} ranks"


def named_shortly(names: Sequence[str]) -> str:
    """Return the names of data sets, short enough for a list of runs: `digits, val and 3 more`."""
    return named([*map(_short, names)], _DATA_LISTED, 30)


def _short(name: str) -> str:
    """Return the last part of a path."""
    return name.rstrip("/").rpartition("/")[2] or name


def _last_heard(data_set: DataSet) -> float:
    return max((rank.read.time for rank in data_set.ranks if rank.read is not None), default=0.0)


# ── As a table ────────────────────────────────────────────────────────────────


def lines(data_set: DataSet, alone: int = RANKS_ALONE) -> list[Line]:
    """Return a line for each rank, or for each block of neighbouring ranks if there are more ranks than `alone`."""
    ranks = data_set.ranks
    length = 1 if len(ranks) <= alone else -(-len(ranks) // BLOCKS)
    some = [data_set._replace(ranks=ranks[begin : begin + length]) for begin in range(0, len(ranks), length)]
    return [line(part) for part in some]


def line(data_set: DataSet) -> Line:
    """Return one line for all ranks: the rows read, the sum of the rates, and the range of waiting times."""
    ranks = data_set.ranks
    reads = [rank.read for rank in ranks if rank.read is not None]
    planned = [read.rows_planned for read in reads if read.rows_planned is not None]
    fractions = [rank.fraction for rank in ranks if rank.fraction is not None]
    rows = f"{sum(read.rows for read in reads):,}" if reads else ""
    if planned and len(planned) == len(ranks):
        rows += f" of {sum(planned):,}"
    waiting = [100 * rank.waiting for rank in ranks if rank.waiting is not None]
    marks = [rank.mark for rank in ranks if rank.mark]
    return Line(
        tuple(rank.rank for rank in ranks),
        span([read.epoch for read in reads], str) if reads else "",
        sum(fractions) / len(fractions) if fractions else None,
        rows,
        _rate([rank.rate("rows") for rank in ranks], _rows),
        _rate([rank.rate("size_bytes") for rank in ranks], size),
        f"{span(waiting, '{:.0f}'.format)} %" if waiting else "",
        first_line(reads[0].place, 120) if len(ranks) == 1 and reads else "",
        "starves" if "starves" in marks else marks[0] if marks else "",
        ranks[0].note if len(ranks) == 1 else notes(data_set),
    )


def _rate(rates: Iterable[float | None], write: Callable[[float], str]) -> str:
    known = [rate for rate in rates if rate is not None]
    return write(sum(known)) if known else ""


def _rows(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


# ── As a picture ──────────────────────────────────────────────────────────────


class Block(NamedTuple):
    """Consecutive row groups in the same state. `begin` and `end` are fractions of the rows of a rank's epoch.

    `share` is the fraction of the block's rows that has been read.
    """

    state: State
    begin: float
    end: float
    words: str
    share: float = 0.0


class Strip(NamedTuple):
    """A rank's epoch, in the order of reading. `at` is the fraction read; None if unknown or if all has been read."""

    blocks: tuple[Block, ...]
    at: float | None
    words: str


def strip(mine: RankReading, most: int, *, over: bool = False) -> Strip | None:
    """Return a rank's epoch, divided into at most about `most` blocks; None if the epoch's plan is not known.

    `over` says whether the run has ended.
    """
    plan, read = mine.plan, mine.read_of_plan
    if plan is None or plan.epoch < mine.epoch or not plan.rows:
        return None
    ends = list(itertools.accumulate(map(operator.attrgetter("rows"), plan.pieces)))
    counts = [0, *itertools.accumulate(map(operator.attrgetter("groups"), plan.pieces))]
    done, reading = _reach(plan, read)
    first_unread = bisect.bisect_right(ends, done)
    edges = (0, first_unread, max(first_unread, min(len(ends), bisect.bisect_left(ends, reading) + 1)), len(ends))
    at_row = _position(plan, read)
    # Rows of the current window are read in a random order, so about the same part of each of its row groups is read.
    part = (
        (at_row - done) / max(1, min(reading, plan.rows) - done) if read is None or read.rows_planned is not None else 0
    )
    by_state = state_words(over)
    least = ends[-1] // most
    names, noun = dict(plan.names), "file" if plan.pieces[0].row_group < 0 else "row group"
    blocks: list[Block] = []
    parts: list[str] = []
    for state, first, last in zip(by_state, edges, edges[1:], strict=False):
        count = counts[last] - counts[first]
        parts += [f"{counted(count, noun) if not parts else f'{count:,}'} {by_state[state]}"] if count else []
        while first < last:
            begin = ends[first - 1] if first else 0
            after = min(last, bisect.bisect_left(ends, begin + least, first) + 1)
            more = counts[after] - counts[first] - 1
            words = f"{_piece_words(plan.pieces[first], names)}{f' and {more:,} more' if more else ''}: "
            end = ends[after - 1]
            before, within = min(end, max(done, begin)) - begin, min(end, reading) - max(begin, done)
            share = float(state == "read")
            if state == "reading":
                share = min(1.0, (before + part * max(0, within)) / max(1, end - begin))
            words += f"{counted(end - begin, 'row')}, {by_state[state]}"
            words += f": {percent(share)}" if state == "reading" and share else ""
            blocks.append(Block(state, begin / ends[-1], end / ends[-1], words, share))
            first = after
    whole = f"rank {mine.rank}, epoch {plan.epoch}: {', '.join(parts)}"
    known = read is None or read.rows_planned is not None
    at = None if (read is not None and read.done) or not known else at_row / ends[-1]
    return Strip(tuple(blocks), at, whole)


def state_words(over: bool) -> dict[State, str]:
    """Return the word for each state. The words differ between a run in progress and a run that is `over`."""
    now, later = ("begun", "not read") if over else ("being read", "to come")
    return {"read": "read", "reading": now, "to come": later}


def _position(plan: DataPlanned, read: DataRead | None) -> int:
    return min(plan.rows, plan.begun + (read.rows if read else 0))


def _reach(plan: DataPlanned, read: DataRead | None) -> tuple[int, int]:
    """Return how many rows of the plan have been read, and up to which row the rank is currently reading.

    Rows are shuffled within a window, so all rows of the current window count as being read. If the number of rows that
    the rank is to read is not known, all rows of the plan count as being read.
    """
    if read is not None and read.done:
        return plan.rows, 0
    if read is not None and read.rows_planned is None:
        return 0, plan.rows
    at = _position(plan, read)
    if not plan.window:
        return at, at + 1
    begin = at // plan.window * plan.window
    return begin, begin + plan.window


def _piece_words(piece: Piece, names: dict[int, str]) -> str:
    name = _file_name(names[piece.file]) if piece.file in names else f"file {piece.file + 1:,}"
    return name if piece.row_group < 0 else f"{name}, row group {piece.row_group + 1:,}"


@functools.lru_cache(maxsize=10_000)
def _file_name(name: str) -> str:
    return plain(first_line(name, _NAME_CHARACTERS))


def telling(data_set: DataSet, most: int) -> tuple[RankReading, ...]:
    """Choose at most `most` ranks to show: some ranks with marks, then some of the slowest, then the first ranks."""
    if len(data_set.ranks) <= most:
        return data_set.ranks
    marked = [rank for rank in data_set.ranks if rank.mark]
    slowest = sorted((rank for rank in data_set.ranks if rank.read), key=lambda rank: rank.rate("rows") or 0.0)
    order = dict.fromkeys(rank.rank for rank in (*marked[: most // 2], *slowest[: most // 4], *data_set.ranks))
    chosen = set(itertools.islice(order, most))
    return tuple(rank for rank in data_set.ranks if rank.rank in chosen)
