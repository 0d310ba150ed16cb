"""Why a run is slow: verdicts on made records. None may come from chance."""

from __future__ import annotations

import random

import pytest

from sparkring.history import describe
from sparkring.history.describe.verdicts import ENOUGH_LOOKS, ENOUGH_S, verdict, verdict_words
from sparkring.history.events import (
    AttemptEnded,
    AttemptStarted,
    DataOpened,
    DataRead,
    ItemsPlanned,
    RankFinished,
    RankStarted,
    RankUsed,
    RunFinished,
    RunStarted,
    SpentAt,
    StreamBegan,
    TimeSpent,
    UserCall,
)
from sparkring.history.record import PHASE_TIMES_KEPT, apply, phase_times_kept, replay

WHOLE_S = 20.0
END = RunFinished(60.0, "finished")


def at(phase, seconds, *calls, what=""):
    """Return a place: `calls` are the names of functions, innermost first, each with its line of the cell."""
    return SpentAt(phase, what, tuple(UserCall(*call) for call in calls), seconds)


def spent(rank, *places, queued_s=0.0, looks=250, whole_s=WHOLE_S, **more):
    """Return what a rank reports; what is left of `whole_s` is spent computing in `train`, at line 20."""
    rest_s = whole_s - sum(place.seconds for place in places)
    places = (*places, at("compute", rest_s, ("train", 20), ("", 30)))
    phases = {}
    for place in places:
        phases[place.phase] = phases.get(place.phase, 0.0) + place.seconds
    own_s = whole_s - sum(phases.get(name, 0.0) for name in ("collective", "native", "start"))
    awake_s = own_s - phases.get("idle", 0.0)
    times = {"queued_s": queued_s, "cpu_s": awake_s - queued_s, "process_cpu_s": awake_s - queued_s, "awake_s": awake_s}
    report = {"time": 30.0, **times, **more}
    return TimeSpent(looks, whole_s, phases, places, rank=rank, **report)


def record_of(*reports, size=None, ended=False, events=()):
    size = size or len(reports)
    ranks = [RankStarted(1.0, rank, f"host-{rank // 8}", 4000 + rank) for rank in range(size)]
    started = RunStarted(0.0, "run", "train", "%%torchrun\n", size, "local", "torch", "all")
    return replay([started, *ranks, *events, *reports, *([END] if ended else [])])


def waiting(rank, seconds, *more, **options):
    return spent(rank, at("collective", seconds, ("train", 21), what="all_reduce"), *more, **options)


AUGMENT = at("compute", 9.0, ("augment", 12), ("train", 19), ("", 30))


def test_the_rank_that_the_others_wait_for_is_named_with_its_function_and_line():
    record = record_of(*(waiting(rank, 9.0) for rank in range(3)), waiting(3, 0.5, AUGMENT))
    judged = verdict(record)
    assert (judged.kind, judged.ranks) == ("slow rank", (3,))
    assert judged.share == pytest.approx(8.5 / WHOLE_S)
    assert judged.ratio == pytest.approx(19.5 / 11)
    assert judged.place.calls[0] == UserCall("augment", 12)
    assert judged.part == pytest.approx(1.0)
    words = verdict_words(record)
    assert "rank 3" in words
    assert "augment (cell line 12)" in words


def test_a_helper_that_all_call_is_not_named_instead_of_its_caller():
    """All ranks resize in their steps; the slow one resizes in augment() as well."""
    step = at("compute", 6.0, ("resize", 5), ("step", 8), ("", 30))
    more = at("compute", 9.0, ("resize", 5), ("augment", 12), ("", 29))
    assert verdict(record_of(waiting(0, 9.5, step), waiting(1, 0.5, step, more))).place.calls[0].function == "augment"


def test_a_phase_that_the_user_has_named_is_named():
    named = at("crop", 9.0, ("resize", 5), ("augment", 12), ("", 30))
    record = record_of(waiting(0, 9.5), waiting(1, 0.5, named))
    assert verdict(record).place.phase == "crop"
    assert "crop (cell line 5)" in verdict_words(record)


@pytest.mark.parametrize(
    ("place", "named"),
    [
        (at("data", 9.0, ("Images.__getitem__", 4), ("", 30), what="DataLoader without workers"), "num_workers"),
        (at("save", 9.0, ("", 30), what="torch.save"), "torch.save"),
        (at("idle", 9.0, ("", 8)), "cell line 8"),
        (at("start", 9.0, what="import"), "import"),
    ],
)
def test_what_the_slow_rank_does_is_named(place, named):
    record = record_of(waiting(0, 9.5), waiting(1, 0.5, place))
    assert (verdict(record).ranks, verdict(record).place.phase) == ((1,), place.phase)
    assert named in verdict_words(record)


def test_other_threads_of_a_slow_rank_are_named():
    hog = waiting(1, 0.5, AUGMENT, process_cpu_s=29.0)
    assert verdict(record_of(waiting(0, 9.5), hog)).threads
    assert not verdict(record_of(waiting(0, 9.5, process_cpu_s=29.0), hog)).threads, "those of rank 0 compute as well"


def test_several_slow_ranks():
    reports = [
        waiting(rank, 0.4 if rank in (2, 5) else 9.0, *([AUGMENT] if rank in (2, 5) else [])) for rank in range(8)
    ]
    assert verdict(record_of(*reports)).ranks == (2, 5)
    assert "ranks 2, 5" in verdict_words(record_of(*reports))


def test_waiting_in_native_code_counts_as_waiting():
    native = [spent(rank, at("native", 9.0, ("", 9), what="TensorFlow")) for rank in (0, 1)]
    assert verdict(record_of(*native, spent(2, at("native", 0.5, ("", 9)), AUGMENT))).ranks == (2,)
    assert verdict(record_of(*native)) is None, "they may also be waiting for a GPU that computes"


def test_ranks_that_have_finished_early_wait_for_the_others():
    """Uneven shards: rank 1 reads twice as many rows."""
    read = [
        event
        for rank, rows in enumerate((1_000, 2_000))
        for event in (
            DataOpened(0, "x.parquet", "parquet", time=2.0, rank=rank),
            DataRead(0, 1, rows, rows, 8 * rows, time=3.0, rank=rank),
        )
    ]
    reports = [spent(0, whole_s=10.0, looks=120), RankFinished(11.0, 0, ""), spent(1)]
    record = record_of(*reports, size=2, events=read)
    judged = verdict(record)
    assert (judged.kind, judged.ranks, judged.at_end) == ("slow rank", (1,), True)
    assert judged.share == pytest.approx(0.5)
    assert "2.0× as many rows" in verdict_words(record)


def test_no_verdict_from_few_looks_few_ranks_or_small_differences():
    slow = waiting(0, 9.0), waiting(1, 0.5, AUGMENT)
    assert verdict(record_of(*slow)) is not None
    assert verdict(record_of(*(report._replace(looks=ENOUGH_LOOKS - 1) for report in slow))) is not None
    few = {"looks": ENOUGH_LOOKS - 1, "whole_s": ENOUGH_S - 1}
    assert verdict(record_of(waiting(0, 6.0, **few), waiting(1, 0.5, at("idle", 6.0), **few))) is None
    assert verdict(record_of(slow[1], size=2)) is None, "rank 0 has not reported yet"
    started = at("start", 13.0, what="import")
    short = record_of(waiting(0, 5.0, started), waiting(1, 0.5, started, at("idle", 5.0, ("augment", 12))))
    assert verdict(short) is None, "most looks were at the imports"
    assert verdict(record_of(waiting(0, 3.0), waiting(1, 1.0))) is None
    assert verdict(record_of(waiting(0, 5.0, looks=100), waiting(1, 2.0, looks=100))) is None, "this may be chance"
    assert verdict(record_of(waiting(0, 5.0, looks=2000), waiting(1, 1.0, looks=2000))) is not None
    assert verdict(record_of()) is None


def test_a_rank_that_waits_for_a_free_core_is_not_blamed():
    """Rank 1 computes as much as rank 0, but another program uses its core half of the time."""
    record = record_of(waiting(0, 9.0), waiting(1, 0.5, queued_s=9.0))
    assert verdict(record) is None
    crowded = record_of(waiting(0, 4.0, queued_s=9.0), waiting(1, 4.0, queued_s=9.0))
    assert verdict(crowded).kind == "queued"
    slow_as_well = record_of(waiting(0, 9.0, queued_s=7.0), waiting(1, 0.5, AUGMENT, queued_s=7.0))
    assert verdict(slow_as_well).ranks == (1,)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("data", at("data", 11.0, ("", 8), what="DataLoader")),
        ("save", at("save", 7.0, ("", 8), what="torch.save")),
        ("idle", at("idle", 11.0, ("read", 8), ("", 9))),
    ],
)
def test_what_takes_much_of_all_ranks_time(kind, place, size):
    record = record_of(*(spent(rank, place) for rank in range(size)))
    judged = verdict(record)
    assert (judged.kind, judged.ranks, judged.place) == (kind, (), place)
    assert judged.share == pytest.approx(place.seconds / WHOLE_S)
    assert "cell line 8" in verdict_words(record)


def test_the_start_is_not_counted_as_time_without_data():
    """Imports take half of a short run; of the rest, most is spent waiting for data."""
    places = at("start", 10.0, what="import"), at("data", 5.0, ("", 8), what="DataLoader")
    assert verdict(record_of(spent(0, *places))).kind == "data"


def test_collectives_of_ranks_that_are_alike():
    assert verdict(record_of(waiting(0, 11.0), waiting(1, 11.0))).kind == "collective"
    assert verdict(record_of(waiting(0, 19.5), waiting(1, 19.5))) is None, "they hang; another notice says so"


def test_one_of_many_cores():
    def used(cores, percent=100):
        return RankUsed(percent, 1_000, cores, 8_000, time=5.0, rank=0)

    assert verdict(record_of(spent(0), events=[used(16)])).kind == "one core"
    assert "one of 16 cores" in verdict_words(record_of(spent(0), events=[used(16)]))
    assert verdict(record_of(spent(0), events=[used(2)])) is None
    assert verdict(record_of(spent(0), events=[used(16, 700)])) is None, "workers of a DataLoader use the others"
    assert verdict(record_of(spent(0, process_cpu_s=8 * WHOLE_S), events=[used(16)])) is None
    assert verdict(record_of(spent(0, queued_s=2.0), events=[used(16)])) is None, "the others are not free"


def test_balanced_is_said_at_the_end_only():
    reports = [waiting(0, 1.0), waiting(1, 1.2)]
    assert verdict(record_of(*reports)) is None
    ended = record_of(*reports, ended=True)
    assert verdict(ended).kind == "balanced"
    assert verdict_words(ended) == "Balanced: 94 % computing, 6 % in collectives"


def test_none_is_accused_by_chance():
    """Balanced ranks whose shares are samples of the same share."""
    chance = random.Random(7)
    for _ in range(300):
        size, looks, share = (
            chance.choice((2, 3, 8, 32)),
            chance.choice((100, 150, 400)),
            chance.choice((0.1, 0.3, 0.5)),
        )
        reports = [
            waiting(rank, WHOLE_S * sum(chance.random() < share for _ in range(looks)) / looks, looks=looks)
            for rank in range(size)
        ]
        judged = verdict(record_of(*reports))
        assert judged is None or judged.kind == "collective"


def test_runs_of_items_and_of_streams_have_no_verdict():
    slow = waiting(0, 9.0), waiting(1, 0.5, AUGMENT)
    assert verdict(record_of(*slow, events=[ItemsPlanned(1.0, 2)])) is None
    assert verdict(record_of(*slow, events=[StreamBegan(1.0, "rows")])) is None


def test_the_record_is_bounded_and_a_new_attempt_begins_at_zero():
    record = record_of(spent(0), spent(1))
    heard = record.ranks[0].last_heard
    for second in range(1_000):
        record = apply(
            record, TimeSpent(10 * second, second, {"compute": 0.9 * second, "data": 0.1 * second}, time=second)
        )
    rank = record.ranks[0]
    assert rank.last_heard == heard, "what a thread sends by itself is no sign of life"
    assert len(rank.lane) <= PHASE_TIMES_KEPT
    assert phase_times_kept(1_024) * 1_024 <= 8_192
    assert sum(part.phases.get("data", 0.0) for part in rank.lane) == pytest.approx(99.9)
    assert max(sum(part.phases.values()) for part in rank.lane) < 50, "no part of the lane is much longer than others"
    record = replay([AttemptStarted(40.0, 1, 2), AttemptEnded(41.0, 1, "lost", 0), AttemptStarted(42.0, 2, 2)], record)
    assert not any(rank.spent or rank.lane for rank in record.ranks)


def test_a_ring_of_1024_ranks():
    reports = [waiting(rank, 0.5 if rank == 700 else 9.0, *([AUGMENT] if rank == 700 else [])) for rank in range(1_024)]
    record = record_of(*reports)
    assert verdict(record).ranks == (700,)
    assert describe.share_words([reports[0]]).startswith("55 % computing")
