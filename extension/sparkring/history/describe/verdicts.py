"""Says why a run is slow: where the time of its ranks goes, and which ranks the others wait for.

The judgement is a function of the ranks' TimeSpent. It must not come from chance: there is none before the ranks have
been looked at often enough, and none from small differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from sparkring.history.describe.text import rank_list
from sparkring.history.events import SpentAt, TimeSpent, UserCall
from sparkring.history.lines import plain
from sparkring.history.metrics import remembered
from sparkring.history.record import RankRecord, RunRecord
from sparkring.wire.messages.fields import PHASES

ENOUGH_LOOKS, ENOUGH_S = 100, 10.0  # of each rank after its start; on a busy machine, looks are rarer
LEAST_S = 2.0  # ranks that the others wait for during a shorter time are not named
LEAST_SHARE = 0.15  # ranks that the others wait for during a smaller share of the time are not named
LEAST_RATIO = 1.25  # nor are ranks whose own part takes at most this many times as long
BY_CHANCE = 0.001  # about how likely it may be that ranks that are alike seem to differ, since looks are a sample
# From these shares on, one phase of all ranks is the verdict.
MUCH_DATA, MUCH_SAVING, MUCH_IDLE, MUCH_QUEUED, MUCH_COLLECTIVE = 0.3, 0.2, 0.4, 0.3, 0.4
HANGS = 0.9  # with a larger share in collectives, the ranks may be waiting for something that never comes
ONE_CORE_OF = 4  # a rank that uses one core is named if it may use at least this many
BUSY_THREADS = 0.2  # if other threads of a slow rank use at least this much of a core, this may be why it is slow
CROWDED = 0.2  # if ranks could run, but wait for a core during this share of that time, others wait for them, too
FREE = 0.05  # if a rank waits for a free core during a smaller share of the time, cores are free
SAME = 0.95  # of functions whose times are about the same, the innermost one is named
ALL = 0.95  # if at least this part of the difference is at one place, the part is not said
NAMED = 0.02  # smaller shares are not mentioned
WAITS = ("collective", "native")
# What a rank does in a phase, as a share of its time.
DOING: Mapping[str, str] = {
    "compute": "computing",
    "data": "reading data",
    "collective": "in collectives",
    "native": "waiting in native code",
    "save": "saving",
    "start": "importing and compiling",
    "idle": "idle",
    "other": "unknown",
}

VerdictKind = Literal["slow rank", "data", "save", "idle", "queued", "one core", "collective", "balanced"]
_NOWHERE = UserCall("", 0)
_WHOLE = ""  # the name of all that a rank does


class Verdict(NamedTuple):
    """Why a run is slow, or, if its kind is "balanced", that nothing stands out.

    `share` is the share of the time that is lost, or spent in the phase. If other ranks wait for some `ranks`, the own
    part of these takes `ratio` times as long as that of the others, and the fraction `part` of the difference is at
    `place`. Otherwise, `place` is where most of the time is spent. `at_end` says whether the others have mostly waited
    after they had finished, and `threads` whether other threads of the slow ranks' processes compute as well. `cores`
    is the number of cores that a rank of kind "one core" may use.
    """

    kind: VerdictKind
    share: float
    ranks: tuple[int, ...] = ()
    ratio: float = 0.0
    place: SpentAt | None = None
    part: float = 0.0
    at_end: bool = False
    threads: bool = False
    cores: int = 0


class _TimeShares(NamedTuple):
    """The shares of a rank's time: waiting for others, of that after it had finished, for a free core, its own part.

    What is not known belongs to none of them.
    """

    waits: float
    after: float
    queued: float
    own: float
    whole_s: float


@remembered("ranks", "part", "outcome", "items", "stream")
def verdict(record: RunRecord) -> Verdict | None:
    """Return why the run is slow; None if it is too early to tell or, before the run has ended, if nothing stands out.

    Runs of items and of streams have no verdict.
    """
    ranks = [rank for rank in record.taking_part if rank.spent is not None]
    spent = [rank.spent for rank in ranks if rank.spent is not None]
    if not spent or len(spent) < len(record.taking_part) or record.items is not None or record.stream is not None:
        return None
    looks, after_start_s = (statistics.median(map(of, spent)) for of in (_looks_after_start, _after_start_s))
    if looks < ENOUGH_LOOKS and after_start_s < ENOUGH_S:
        return None
    begun = [_without_start(report) for report in spent]
    much = [judged for judged in (_slow_rank(ranks, spent), *_much(begun)) if judged is not None]
    if much:
        # Why ranks are idle is not known, so anything else says more.
        return max(much, key=lambda judged: judged.share / (2 if judged.kind == "idle" else 1))
    judged = _queued(spent) or _one_core(record, ranks, spent) or _collective(spent)
    if judged is not None:
        return judged
    return Verdict("balanced", phase_shares(spent).get("compute", 0.0)) if record.outcome is not None else None


def phase_shares(spent: Iterable[TimeSpent]) -> dict[str, float]:
    """Return the mean share of each phase, the largest first."""
    sums: dict[str, float] = {}
    count = 0
    for report in spent:
        count += 1
        whole_s = sum(report.phases.values()) or 1.0
        for name, seconds in report.phases.items():
            sums[name] = sums.get(name, 0.0) + seconds / whole_s
    return {name: total / count for name, total in sorted(sums.items(), key=lambda entry: -entry[1])}


def _slow_rank(ranks: Sequence[RankRecord], spent: Sequence[TimeSpent]) -> Verdict | None:
    """Return the verdict on ranks that the others wait for, if there are any.

    Ranks that meet in collectives go on together. So the slow ones wait least, and their own part takes longest. A rank
    that waits for a free core is not blamed for it: its own part without this must explain half of what others wait.
    """
    if len(ranks) < 2:
        return None
    shares = _shares(ranks, spent)
    order = sorted(range(len(ranks)), key=lambda at: shares[at].own)
    # The slow ranks are those above the largest gap, at most half of the ranks.
    first = max(
        range((len(order) + 1) // 2, len(order)), key=lambda at: shares[order[at]].own - shares[order[at - 1]].own
    )
    fast, slow = order[:first], sorted(order[first:])
    usual, own = (statistics.median(shares[at].own for at in some) for some in (fast, slow))
    waited = statistics.mean(shares[at].waits for at in fast)
    share = waited - max(shares[at].waits for at in slow)
    ratio = own / max(usual, 0.01)
    looks = max(1.0, min(map(_looks_after_start, spent)))
    error = math.sqrt(waited * max(0.0, 1 - waited) * (1 + 1 / len(fast)) / looks)
    least = max(LEAST_SHARE, error * math.sqrt(2 * math.log(len(ranks) / BY_CHANCE)))
    stretch = statistics.median(1 + shares[at].queued / max(shares[at].own, 0.01) for at in slow)
    explained = (own - usual) * stretch
    computed = [statistics.median(spent[at].cpu_s for at in some) for some in (fast, slow)]
    is_certain = own - usual > 2 * error or computed[1] > LEAST_RATIO * computed[0] > 0
    is_much = share >= least and share * max(shares[at].whole_s for at in slow) >= LEAST_S and ratio >= LEAST_RATIO
    if not is_much or explained < share / 2 or not is_certain:
        return None
    place, part = _difference(*([(spent[at], shares[at].whole_s) for at in some] for some in (slow, fast)))
    after = statistics.mean(shares[at].after for at in fast)
    others = [max(0.0, report.process_cpu_s - report.cpu_s) / _after_start_s(report) for report in spent]
    threads = min(others[at] for at in slow) >= BUSY_THREADS > 2 * max(others[at] for at in fast)
    who = tuple(ranks[at].rank for at in slow)
    return Verdict("slow rank", share, who, ratio, place, part, after > share / 2, threads)


def _shares(ranks: Sequence[RankRecord], spent: Sequence[TimeSpent]) -> list[_TimeShares]:
    """Return the shares of each rank's time until the last rank ends. The ranks that have finished wait for it."""
    longest_s = max(report.elapsed_s for report in spent)
    ended = [rank.state == "finished" for rank in ranks]
    return _shares_of(spent, [ended[at] * (longest_s - report.elapsed_s) for at, report in enumerate(spent)])


def _shares_of(spent: Sequence[TimeSpent], after_s: Sequence[float]) -> list[_TimeShares]:
    """Return the shares of each rank's time. Of the start, only what it takes longer than the shortest start counts.

    In a short run, imports would otherwise be most of it. `after_s` is how long each rank has waited since it finished.
    """
    starts_s = [report.phases.get("start", 0.0) for report in spent]
    own_starts_s = [start_s - report.start_queued_s for start_s, report in zip(starts_s, spent, strict=True)]
    shares = []
    for report, start_s, own_start_s, end_s in zip(spent, starts_s, own_starts_s, after_s, strict=True):
        whole_s = sum(report.phases.values()) - min(starts_s) + end_s or 1.0
        waited_s = sum(report.phases.get(name, 0.0) for name in WAITS)
        run_s = sum(report.phases.values()) - start_s - waited_s - report.phases.get("other", 0.0)
        # A collective can wait for a core, too. So of the time in which the rank's own part could run, what counts as
        # running is the usual part.
        queued_s = report.awake_s * report.queued_s / max(0.001, report.cpu_s + report.queued_s)
        own_s = run_s - queued_s + own_start_s - min(own_starts_s)
        of_whole = ((waited_s + end_s) / whole_s, end_s / whole_s, queued_s / whole_s, own_s / whole_s)
        shares.append(_TimeShares(*of_whole, whole_s))
    return shares


_Reports = Sequence[tuple[TimeSpent, float]]  # what ranks have reported, and the seconds of which shares are taken


def _difference(slow: _Reports, fast: _Reports) -> tuple[SpentAt | None, float]:
    """Return where slow ranks spend most of their additional time, and its fraction of that time.

    A function that all ranks call often, but that takes longer in the slow ranks because of one of its callers, says
    less than this caller. So what counts is additional time in a function that is mostly additional time.
    """
    of_slow, of_fast = _inclusive(slow), _inclusive(fast)
    more = {name: share - of_fast.get(name, 0.0) for name, share in of_slow.items()}
    telling = {name: share * share / of_slow[name] for name, share in more.items() if share > 0 and name != _WHOLE}
    if not telling:
        return None, 0.0
    most = max(telling.values())
    name = next(name for name in telling if telling[name] >= SAME * most)  # the innermost one comes first
    places = [place for report, _ in slow for place in report.places if name in _names(place)]
    place = max(places, key=lambda place: place.seconds)
    at = next((at for at, call in enumerate(place.calls) if _name(call) == name), 0)
    return place._replace(calls=place.calls[at:]), min(1.0, more[name] / max(more[_WHOLE], more[name]))


def _inclusive(reports: _Reports) -> dict[str, float]:
    """Return the mean share of the time in each function, and in what it calls, and of _WHOLE, except waiting."""
    shares: dict[str, float] = {}
    entries = [
        (depth, name, place.seconds / whole_s / len(reports))
        for report, whole_s in reports
        for place in report.places
        if place.phase not in WAITS
        for depth, name in enumerate(_names(place))
    ]
    for _, name, share in sorted(entries, key=lambda entry: entry[0]):
        shares[name] = shares.get(name, 0.0) + share
    return shares


def _names(place: SpentAt) -> list[str]:
    """Return names of what runs at a place, the innermost first: a phase that the user has named, functions, _WHOLE.

    The first name tells the place from others of the same function.
    """
    own = place.phase if place.phase not in PHASES else f"{place.phase} {place.what} {_name(*place.calls[:1])}"
    return list(dict.fromkeys([own, *map(_name, place.calls), _WHOLE]))


def _name(call: UserCall = _NOWHERE) -> str:
    return call.function or f"line {call.line}"


def _place(spent: Iterable[TimeSpent], phase: str) -> SpentAt | None:
    """Return where ranks spend most of the time in a phase."""
    places = [place for report in spent for place in report.places if place.phase == phase]
    sums: dict[str, float] = {}
    for place in places:
        sums[_names(place)[0]] = sums.get(_names(place)[0], 0.0) + place.seconds
    return max(places, key=lambda place: (sums[_names(place)[0]], place.seconds), default=None)


def _much(spent: Sequence[TimeSpent]) -> list[Verdict]:
    """Return a verdict for each phase in which all ranks spend much of the time after their start."""
    shares = phase_shares(spent)
    much: tuple[tuple[VerdictKind, str, float], ...] = (
        ("data", "data", MUCH_DATA),
        ("save", "save", MUCH_SAVING),
        ("idle", "idle", MUCH_IDLE),
    )
    return [
        Verdict(kind, share, place=_place(spent, phase))
        for kind, phase, least in much
        if (share := shares.get(phase, 0.0)) >= least
    ]


def _without_start(report: TimeSpent) -> TimeSpent:
    return report._replace(phases={name: seconds for name, seconds in report.phases.items() if name != "start"})


def _looks_after_start(report: TimeSpent) -> float:
    return report.looks * _after_start_s(report) / max(0.001, report.elapsed_s)


def _after_start_s(report: TimeSpent) -> float:
    return max(0.001, report.elapsed_s - report.phases.get("start", 0.0))


def _queued(spent: Sequence[TimeSpent]) -> Verdict | None:
    """Return the verdict on ranks that wait for a free core: much of the time, or more than they run."""
    share, of_run = _queued_shares(spent)
    is_much = share >= MUCH_QUEUED or (share >= LEAST_SHARE and of_run >= 0.5)
    return Verdict("queued", share) if is_much else None


def _queued_shares(spent: Sequence[TimeSpent]) -> tuple[float, float]:
    """Return the share of the time after the start in which the ranks could run, but had no core.

    Also return its share of the time in which they could run.
    """
    shares = _shares_of(spent, [0.0] * len(spent))
    queued = statistics.mean(share.queued for share in shares)
    return queued, queued / max(0.001, queued + statistics.mean(share.own for share in shares))


def _one_core(record: RunRecord, ranks: Sequence[RankRecord], spent: Sequence[TimeSpent]) -> Verdict | None:
    """Return the verdict on ranks that compute in Python on one core although each may use several."""
    cores = [rank.used.cores // sum(other.host == rank.host for other in ranks) for rank in ranks if rank.used]
    computing = phase_shares(spent).get("compute", 0.0)
    uses = [report.process_cpu_s / _after_start_s(report) for report in spent]
    is_alone = cores and min(cores) >= ONE_CORE_OF and computing >= 0.7 and all(0.8 <= used <= 1.25 for used in uses)
    busy = any(rank.gpus or (rank.used and rank.used.cpu_percent > 150) for rank in ranks)
    if not is_alone or busy or _queued_shares(spent)[0] >= FREE:
        return None
    return Verdict("one core", computing, place=_place(spent, "compute"), cores=min(cores))


def _collective(spent: Sequence[TimeSpent]) -> Verdict | None:
    """Return the verdict on ranks that spend much time in collectives, and not because others wait for a core."""
    share = phase_shares(map(_without_start, spent)).get("collective", 0.0)
    if not MUCH_COLLECTIVE <= share < HANGS or _queued_shares(spent)[1] >= CROWDED:
        return None
    return Verdict("collective", share, place=_place(spent, "collective"))


# ── Words ─────────────────────────────────────────────────────────────────────


def verdict_words(record: RunRecord) -> str:
    """Say why the run is slow, and what to try; '' if there is no verdict."""
    judged = verdict(record)
    if judged is None:
        return ""
    ranks, place = record.taking_part, judged.place
    who = "Ranks" if len(ranks) > 1 else "The rank"
    s = "" if len(ranks) > 1 else "s"
    share, where = _percent(judged.share), ", ".join(_place_parts(place))
    where = f" ({where})" if where else ""
    match judged.kind:
        case "slow rank":
            return _slow_words(record, judged)
        case "data":
            return f"{who} wait{s} {share} of the time for data{where}: {_data_advice(place)}"
        case "save":
            return (
                f"{who} spend{s} {share} of the time saving{where}: save less often; if you save with other code, such "
                "as torch.save, use checkpoints(), which writes in the background"
            )
        case "idle":
            are, at = "are" if len(ranks) > 1 else "is", place_words(place)
            return (
                f"{who} {are} blocked {share} of the time (sleep, lock, file or network)"
                + (f" in {at}" if at else "")
                + ": see the tab Timeline"
            )
        case "queued":
            return (
                f"{who} wait{s} for a free CPU core {share} of the time: use fewer ranks, lower OMP_NUM_THREADS, or "
                "stop other programs"
            )
        case "one core":
            more = f"try -n -{judged.cores}; otherwise, use worker processes"
            more = f"If the work can be divided among ranks, {more}" if len(ranks) == 1 else "Try worker processes"
            return f"{who} use{s} one of {judged.cores} cores{where}: this Python code runs on one core. {more}"
        case "collective":
            return (
                f"Ranks spend {share} of the time in collectives{where}, and none is much slower than the others: try "
                "larger batches, or fewer and larger collectives"
            )
    shares = share_words(report for rank in ranks if (report := rank.spent) is not None)
    return f"Balanced: {shares}" if len(ranks) > 1 else shares


def _slow_words(record: RunRecord, judged: Verdict) -> str:
    others = len(record.taking_part) - len(judged.ranks)
    s = "s" if others == 1 else ""
    who = "The other ranks"
    if others == 1:
        [other] = (rank.rank for rank in record.taking_part if rank.rank not in judged.ranks)
        who = f"Rank {other}"
    ratio = f"{judged.ratio:.1f}×" if judged.ratio < 10 else "more than 10×"
    share, slow = _percent(judged.share), rank_list(judged.ranks)
    waited = f"{who} wait{s} {share} of the time for {slow}"
    if judged.at_end:
        waited = f"{who} finish{'es' if s else ''} first, and wait{s} for {slow} during {share} of the run"
    words = f"{waited}, whose own work takes {ratio} as long"
    where = place_words(judged.place)
    if judged.place is None or not where:
        return words
    rows = _rows_ratio(record, judged.ranks)
    read = (
        f"; it has read {rows:.1f}× as many rows as the others"
        if rows >= LEAST_RATIO and len(judged.ranks) == 1
        else ""
    )
    part = "" if judged.part >= ALL else f"{_percent(judged.part)} of the extra time is "
    return f"{words}: {part}in {where}{read}{_slow_advice(judged)}"


def _rows_ratio(record: RunRecord, slow: Sequence[int]) -> float:
    """Return how many times as many rows slow ranks have read as the others; 0 if this is not known."""
    rows = {
        rank.rank: sum(read.rows for reading in rank.readings for read in (*reading.ended, reading.now) if read)
        for rank in record.taking_part
    }
    others = [count for rank, count in rows.items() if rank not in slow]
    usual = statistics.median(others) if others else 0
    return statistics.median(rows[rank] for rank in slow) / usual if usual else 0.0


def _slow_advice(judged: Verdict) -> str:
    if judged.threads:
        return "; other threads of its process also run Python code and compete for the GIL"
    match judged.place.phase if judged.place else "":
        case "data":
            return f"; {_data_advice(judged.place)}"
        case "save":
            return "; use checkpoints(sharded=True)"
        case "start":
            return "; its imports or compilation take longer"
        case "idle":
            return ", where it sleeps or waits"
    return ""


def _data_advice(place: SpentAt | None) -> str:
    what = place.what if place is not None else ""
    if what == "DataLoader without workers":
        return "num_workers= moves this into worker processes"
    if what == "DataLoader":
        return "raise num_workers=, or do less work per row"
    if what == "shards":
        return "leave out columns that are not used, or do less work per row"
    if what == "tf.data":
        return "map(…, num_parallel_calls=tf.data.AUTOTUNE) and prefetch(tf.data.AUTOTUNE)"
    if what == "Petastorm":
        return "raise workers_count="
    return "read ahead in a thread or in worker processes"


def place_words(place: SpentAt | None) -> str:
    """Say where in the user's code time was spent: `augment (cell line 12)`."""
    parts = _place_parts(place)
    return f"{', '.join(parts[:-1])} ({parts[-1]})" if parts[1:] else "".join(parts)


def _place_parts(place: SpentAt | None) -> list[str]:
    """Return the names of what ran at a place: the user's function, what it has called, and the line of the cell."""
    if place is None:
        return []
    function = place.calls[0].function if place.calls else ""
    names = (function, place.what) if place.phase in PHASES else (place.phase,)
    line = next((call.line for call in place.calls if call.line), 0)
    return [*map(plain, filter(None, names)), *([f"cell line {line}"] if line else [])]


def share_words(spent: Iterable[TimeSpent]) -> str:
    """Say how ranks have spent their time, on average: `91 % computing, 5 % in collectives`."""
    shares = [(name, share) for name, share in phase_shares(spent).items() if share >= NAMED]
    return ", ".join(f"{_percent(share)} {phase_words(name)}" for name, share in shares)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def phase_words(phase: str) -> str:
    """Say what a rank does in a phase. The user's own phases have their names."""
    return DOING.get(phase) or f"in {plain(phase)}"
