"""Tests of the record of a run, which is computed from the run's events and has a bounded size."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.history import record as module
from sparkring.history.events import (
    DataOpened,
    DataPlanned,
    Failure,
    GpuUsed,
    MemberJoined,
    Metrics,
    ModelGpuUsed,
    Notice,
    Output,
    Piece,
    RankExited,
    RankFailed,
    RankFinished,
    RankStarted,
    RankUsed,
    RunFinished,
    RunStarted,
    StackTaken,
    UserMessage,
    from_json,
    to_json,
)
from sparkring.history.record import LogLine, RunRecord, apply, as_shown, replay

STARTED = RunStarted(1.0, "id", "title", "code", 2, "local", "plain", "all")


def printed(*data: bytes, rank: int = 0, stream="stdout") -> RunRecord:
    """Return the record of a run in which one rank wrote `data` piece by piece."""
    return replay([STARTED, *(Output(stream, piece, time=2.0, rank=rank) for piece in data)])


def texts(record: RunRecord, rank: int = 0) -> list[str]:
    return [line.text for line in record.ranks[rank].tail]


def test_a_whole_life():
    """At each point, the record contains everything that is known by then."""
    record = replay([STARTED, MemberJoined(1.1, 0, "h"), MemberJoined(1.2, 1, "h")])
    assert (record.joined, record.running_since, record.outcome) == (2, 0.0, None)
    record = replay([RankStarted(1.3, 0, "h", 10), RankStarted(1.4, 1, "h", 11)], record)
    assert (record.running_since, [rank.state for rank in record.ranks]) == (1.3, ["running"] * 2)
    record = replay([RankFinished(2.0, 0, "5"), RankFailed(2.1, 1, Failure("exit", "exited with code 3"))], record)
    assert record.failure is None, "nobody has said yet that it ended the run"
    record = replay([RankExited(2.2, 0), RankExited(2.2, 1), RunFinished(2.3, "failed", "why", 1)], record)
    assert [rank.state for rank in record.ranks] == ["finished", "failed"]
    assert (record.outcome, record.message, record.ended) == ("failed", "why", 2.3)
    assert record.failure == Failure("exit", "exited with code 3")


def test_a_rank_that_ends_without_a_word_was_stopped():
    """If a running rank exits without reporting its end, its state is `stopped`."""
    assert replay([STARTED, RankStarted(1.3, 0, "h", 10), RankExited(2.0, 0)]).ranks[0].state == "stopped"


def test_the_last_use_of_each_gpu_is_kept():
    """GPUs are in the order of their first reports. A report about a GPU is not a sign of life from its rank."""
    told = [GpuUsed(address, "A", used, 9, 50, time=2.0, rank=1) for address, used in (("1", 3), ("0", 4), ("1", 5))]
    record = replay([STARTED, *told])
    assert [(gpu.address, gpu.used_bytes) for gpu in record.ranks[1].gpus] == [("1", 5), ("0", 4)]
    assert (record.ranks[0].gpus, record.ranks[1].last_heard) == ((), 0.0)


@pytest.mark.parametrize(("size", "kept"), [(1, 60), (32, 60), (256, 7), (1_024, 1), (5_000, 1)])
def test_what_a_rank_has_used_is_thinned(size, kept):
    """The first and the last samples stay, and earlier samples become fewer. A report is not a sign of life."""
    record = replay([STARTED._replace(size=size)])
    for at in range(1_000):
        record = apply(record, RankUsed(at, 10 * at, 8, 10**9, time=5.0 * at, rank=0))
        assert len(record.ranks[0].samples) <= kept
    rank = record.ranks[0]
    times = [each.time for each in rank.samples]
    assert rank.used == RankUsed(999, 9_990, 8, 10**9, time=4_995.0, rank=0)
    assert (rank.samples[-1].cpu_percent, rank.samples[-1].memory_bytes, rank.last_heard) == (999, 9_990, 0.0)
    assert times == sorted(times)
    if kept == 60:
        assert times[0] == 0.0
        assert times[-30:] == [5.0 * at for at in range(970, 1_000)]
    assert apply(record, RankStarted(6_000.0, 0, "h", 10)).ranks[0].samples == (), "another process"


def test_a_sample_has_the_gpus_of_the_rank():
    """The use is the mean over the rank's GPUs, memory and power are sums; what is not known is None."""
    gpus = [
        GpuUsed("0", "A", 3, 9, 50, 300, 60, time=2.0, rank=1),
        GpuUsed("1", "A", 4, 9, None, 200, 70, time=2.0, rank=1),
    ]
    used = [RankUsed(1, 2, 8, 9, time=3.0, rank=rank) for rank in (0, 1)]
    ranks = replay([STARTED, *gpus, *used]).ranks
    assert [rank.samples[0][3:] for rank in ranks] == [(None,) * 4, (50.0, 7, 500, 70)]
    old = {name: value for name, value in gpus[0]._asdict().items() if name not in ("power_w", "temperature_c")}
    assert from_json({"type": "GpuUsed", **old}) == GpuUsed("0", "A", 3, 9, 50, time=2.0, rank=1), "an older saved run"
    assert from_json(json.loads(to_json(gpus[1]))) == gpus[1]


def test_each_gpu_counts_once():
    """Several ranks may share a GPU. If a model process was replaced, its GPU is that of the new process."""
    of_ranks = [GpuUsed("0", "A", rank, 9, 50, time=2.0, rank=rank) for rank in (0, 1)]
    of_models = [
        ModelGpuUsed(3.0, "h", pid, GpuUsed(address, "A", pid, 9, 50)) for pid, address in ((1, "1"), (2, "1"))
    ]
    record = replay([STARTED, *(RankStarted(1.3, rank, "h", 10) for rank in (0, 1)), *of_ranks, *of_models])
    assert [(gpu.address, gpu.used_bytes) for gpu in record.gpus] == [("0", 1), ("1", 2)]
    assert [each.pid for each in record.model_gpus] == [2]


def test_lines_in_pieces():
    """A line that arrives in pieces is one line, streams do not mix, and an unfinished line is kept separately."""
    record = printed(b"a", b"b\nc", b"\n", b"rest")
    assert texts(record) == ["ab", "c"]
    assert record.ranks[0].partial_stdout == b"rest"
    record = apply(record, Output("stderr", b"error\n", time=3.0, rank=0))
    assert [(line.stream, line.text) for line in record.ranks[0].lines_with_partial()] == [
        ("stdout", "ab"), ("stdout", "c"), ("stderr", "error"), ("stdout", "rest"),
    ]  # fmt: skip
    record = apply(record, RankExited(4.0, 0))
    assert texts(record) == ["ab", "c", "error", "rest"]
    assert record.ranks[0].line_count == record.recent_count == 4
    assert record.ranks[0].partial_stdout == b""


BARS = {
    "leave=False": (b"\r  0%|  | 0/1\r100%|##| 1/1\r             \r", []),
    "leave=False, then a line": (b"\r100%|##| 1/1\r             \rdone\n", ["done"]),
    "leave=False, then an empty line": (b"\r100%|##| 1/1\r             \r\n\n", [""]),
    "nested": (
        b"\router: 0\n\rinner: 0\x1b[A\n\rinner: 1\x1b[A\n\r        \x1b[A\router: 1"
        b"\n\rinner: 0\x1b[A\n\rinner: 1\x1b[A\n\r        \x1b[A\router: 2\router: 2\n",
        ["outer: 0", "outer: 1", "outer: 2"],
    ),
    "at positions": (
        b"\router: 0\n\rinner: 0\x1b[A\n\r        \x1b[A\n\n\rthird: 0\x1b[A\x1b[A"
        b"\n\n\rthird: 1\x1b[A\x1b[A\rthird: 1\n"
        b"\router: 1\nafter\n",
        ["outer: 0", "third: 1", "outer: 1", "after"],
    ),
    "erased to the end of the line": (b"\r100 %\r\x1b[K\rnext\n\r50 %\r\x1b[2K", ["next"]),
    "Keras 2": (b"\r1/2 [===>..]\x08\x08\x08\r2/2 [======]\n", ["2/2 [======]"]),
    "empty lines of the user's": (b"one\n\n  \n\r\n", ["one", "", "  ", ""]),
}


@pytest.mark.parametrize("written", BARS)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_progress_bars_leave(written, size):
    """A bar that removes itself leaves no line, and a nested bar none of its states; other empty lines are kept."""
    data, expected = BARS[written]
    record = printed(*(data[begin : begin + size] for begin in range(0, len(data), size)))
    assert [line.text for line in record.ranks[0].lines_with_partial()] == expected
    record = apply(record, RankExited(4.0, 0))
    assert texts(record) == expected
    assert record.ranks[0].line_count == len(expected)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"10%\r20%\r30%", "30%"),
        (b"10%\r", "10%"),
        (b"windows\r", "windows"),
        (b"\rstart", "start"),
        (b"", ""),
        (b"bad \xff", "bad \\xff"),
        ("ü".encode(), "ü"),
        (b"\x1b[31mred", "\x1b[31mred"),
        (b"x" * 4000, "x" * 4000),
        (b"x" * 4001, "x" * 4000 + " … (cut)"),
    ],
)
def test_lines_as_shown(line, shown):
    """A line is shown as plain text, as a terminal would show it in the end."""
    assert as_shown(line) == shown


def test_a_character_split_between_pieces():
    """A UTF-8 character whose bytes arrive in separate pieces is shown whole."""
    assert texts(printed(b"\xc3", b"\xbc\n")) == ["ü"]


def test_lines_are_bounded_and_counted():
    """Only the last lines of each rank, and of all ranks together, are kept, but all lines are counted."""
    record = printed(b"".join(b"%d\n" % n for n in range(5000)), b"end\n")
    assert record.ranks[0].line_count == record.recent_count == 5001
    assert texts(record)[-2:] == ["4999", "end"]
    assert len(record.ranks[0].tail) == module.TAIL_LINES
    assert len(record.recent) == module.RECENT_LINES


def test_a_line_without_an_end_is_bounded():
    """A line that never ends is shown in pieces."""
    record = printed(*[b"x" * 10_000] * 10)
    assert len(record.ranks[0].partial_stdout) <= module.PARTIAL_BYTES
    assert record.ranks[0].line_count == 1
    assert record.ranks[0].size_bytes == 100_000


def test_metrics_are_bounded_and_keep_the_ends_of_epochs():
    """If there are very many metrics, older metrics are thinned out, except ends of epochs. The newest is kept."""
    record = RunRecord(ranks=(module.RankRecord(0),))
    many = [
        Metrics({"loss": 1.0}, step=n, ends_epoch=n % 1000 == 0, time=0.0, rank=0) for n in range(module.METRICS_KEPT)
    ]
    record = apply(
        RunRecord(ranks=record.ranks, metrics=tuple(many)), Metrics({"loss": 0.0}, step=-1, time=0.0, rank=0)
    )
    assert len(record.metrics) <= module.METRICS_KEPT
    assert [m.step for m in record.metrics if m.ends_epoch] == list(range(0, module.METRICS_KEPT, 1000))
    assert record.metrics[-1].step == -1 == record.ranks[0].metrics.step


def test_thinned_metrics_can_be_compared_across_ranks():
    """However often metrics are thinned, nearly all steps that are kept are the same for all ranks."""
    size = 3
    record = RunRecord(ranks=tuple(module.RankRecord(rank) for rank in range(size)))
    for step in range(1, 5_001):
        for rank in range(size):
            record = apply(record, Metrics({"loss": 1.0}, step=step, time=float(step), rank=rank))
    steps = [{m.step for m in record.metrics if m.rank == rank} for rank in range(size)]
    assert len(record.metrics) <= module.METRICS_KEPT
    assert len(set.union(*steps)) > module.METRICS_KEPT / size / 2
    assert len(set.union(*steps) - set.intersection(*steps)) <= 2
    assert min(set.union(*steps)) == 1


@pytest.mark.parametrize("fits", [1, 4_000], ids=["one fit", "many fits of one epoch"])
def test_very_many_epochs_are_thinned_like_steps(fits):
    """The first ones are kept, and the rest are the same for all ranks."""
    record = RunRecord(ranks=tuple(module.RankRecord(rank) for rank in range(2)))
    for number in range(1, 4_001):
        for rank in range(2):
            epoch = number if fits == 1 else 1
            record = apply(record, Metrics({"loss": 1.0}, epoch=epoch, ends_epoch=True, time=float(number), rank=rank))
    times = [{m.time for m in record.metrics if m.rank == rank} for rank in range(2)]
    assert module.METRICS_KEPT // 2 < len(record.metrics) <= module.METRICS_KEPT
    assert min(times[0]) == 1
    assert len(times[0] ^ times[1]) <= 2


def test_the_last_report_of_a_rank_is_kept():
    """A rank that has stopped reporting must not seem to go back while the reports of others are thinned out."""
    record = RunRecord(ranks=tuple(module.RankRecord(rank) for rank in range(2)))
    for step in range(1, 9_000):
        for rank in range(2) if step <= 1_001 else (0,):
            record = apply(record, Metrics({"loss": 1.0}, step=step, time=float(step), rank=rank))
    assert max(each.step for each in record.metrics if each.rank == 1) == 1_001


def test_notices_are_bounded():
    """Only the last notices are kept."""
    record = replay([STARTED, *(Notice(0.0, str(n)) for n in range(100))])
    assert [record.notices[0].text, record.notices[-1].text] == ["50", "99"]


def test_notices_go_when_they_are_no_longer_true():
    """Notices about the start disappear when the ranks are up, and those about silence when a rank reports."""
    slow, stall, large = Notice(1.1, "waiting", "up"), Notice(2.0, "nothing heard", "heard"), Notice(1.0, "large")
    record = replay([STARTED, slow, large, RankStarted(1.3, 0, "h", 10)])
    assert record.notices == (slow, large)
    record = replay([RankStarted(1.4, 1, "h", 11), stall, StackTaken(2.1, 0, "waiting", 4, "")], record)
    assert record.notices == (large, stall)
    assert apply(record, Output("stdout", b"x", time=3.0, rank=1)).notices == (large,)
    assert apply(record, Output("stderr", b"KeyboardInterrupt", time=3.0, rank=1)).notices == (large, stall)
    assert from_json({name: value for name, value in json.loads(to_json(stall)).items() if name != "until"}).until == ""


def test_no_rank_runs_when_the_run_is_over():
    """When a run is over, even a rank that was killed does not count as running. Ranks that took no part stay idle."""
    record = replay([STARTED, RankStarted(1.3, 0, "h", 10), RunFinished(5.0, "interrupted", "2 ranks ended")])
    assert [rank.state for rank in record.ranks] == ["stopped", "stopped"]
    record = replay([WARM, RankFinished(2.0, 0, ""), RunFinished(5.0, "interrupted")])
    assert [rank.state for rank in record.ranks] == ["finished", "idle", "stopped", "stopped"]


def test_messages_and_stacks():
    """A message is a line in a separate stream; a stack is kept with its rank."""
    stack = StackTaken(2.0, 1, "waiting", 4, "text")
    record = replay([STARTED, UserMessage("hello", time=1.5, rank=1), stack])
    assert record.recent == (LogLine(1.5, 1, "message", "hello"),)
    assert record.ranks[1].stack == stack


def test_a_stack_is_kept_until_the_rank_has_moved_on():
    """A newer stack replaces an older one. A later report from the rank removes it, and so does the rank's end."""
    first, second = StackTaken(2.0, 1, "waiting", 4, "text"), StackTaken(3.0, 1, "running", 5, "text")
    record = replay([STARTED, first, second])
    assert record.ranks[1].stack == second
    for news in (
        Output("stdout", b"x\n", time=3.5, rank=1),
        Metrics({"loss": 1.0}, time=3.5, rank=1),
        UserMessage("hello", time=3.5, rank=1),
        RankExited(9.0, 1),
        Output("stdout", b"x\n", time=9.0, rank=0),
    ):
        assert apply(record, news).ranks[1].stack == second
    for news in (
        Output("stdout", b"x\n", time=4.5, rank=1),
        Metrics({"loss": 1.0}, time=4.5, rank=1),
        UserMessage("hello", time=4.5, rank=1),
        RankFinished(3.1, 1, ""),
    ):
        assert apply(record, news).ranks[1].stack is None


WARM = RunStarted(1.0, "id", "title", "code", 4, "local", "plain", "all", (0, 2, 3), warm=True)


def test_a_run_on_some_ranks_of_a_warm_gang():
    """The run's ranks are running from the start. Others are idle, even if they report. Any death is recorded."""
    record = apply(RunRecord(), WARM)
    assert (record.warm, record.running_since, record.part) == (True, 1.0, (0, 2, 3))
    assert [rank.state for rank in record.ranks] == ["running", "idle", "running", "running"]
    record = replay([RankStarted(1.1, 0, "h", 10), RankStarted(1.1, 1, "h", 11)], record)
    assert [(rank.state, rank.host) for rank in record.ranks[:2]] == [("running", "h"), ("idle", "h")]
    record = replay([RankFinished(2.0, rank, "") for rank in (0, 2, 3)], record)
    assert [rank.rank for rank in record.taking_part] == [0, 2, 3]
    assert {rank.state for rank in record.taking_part} == {"finished"}
    assert apply(record, RankFailed(2.1, 1, Failure("signal", "killed"))).ranks[1].state == "failed"
    assert apply(record, RankExited(2.1, 1)).ranks[1].state == "stopped"


def test_all_ranks_are_no_part():
    """A run on all ranks has the same record, whether the ranks are named or not."""
    record = apply(RunRecord(), WARM._replace(ranks=(0, 1, 2, 3)))
    assert (record.part, len(record.taking_part)) == ((), 4)
    assert not any(rank.state == "idle" for rank in record.ranks)


def test_a_warm_rank_does_not_exit_but_its_last_line_ends_with_the_run():
    record = replay(
        [WARM, Output("stdout", b"half", time=2.0, rank=0), RankFinished(2.0, 0, ""), RunFinished(3.0, "finished")]
    )
    assert [line.text for line in record.recent] == ["half"]
    assert (record.ranks[0].partial_stdout, record.ranks[0].state) == (b"", "finished")


def test_ranks_survive_being_saved():
    """The ranks are a tuple again, although JSON has only lists. Records of older versions have neither field."""
    saved = json.loads(to_json(WARM))
    assert from_json(saved) == WARM
    older = {name: value for name, value in saved.items() if name not in ("ranks", "warm")}
    assert from_json(older) == WARM._replace(ranks=(), warm=False)


def test_of_many_readers_the_last_plans_are_kept():
    """The plan of an epoch replaces the previous plan, and only the readers that were used last keep their plans."""
    opened = [DataOpened(reader, f"data {reader}", "parquet", time=1.0, rank=0) for reader in range(6)]
    plans = [DataPlanned(epoch % 5, epoch, (Piece(0, 0, epoch),), time=2.0 + epoch, rank=0) for epoch in range(1, 9)]
    record = replay([STARTED, *opened, *plans])
    kept = [reading.plan and reading.plan.epoch for reading in record.ranks[0].readings]
    assert kept == [None, 6, 7, 8, None, None]
    assert record.ranks[1].readings == ()
    assert record.ranks[0].last_heard == 10.0


EVENTS = st.one_of(
    st.builds(Output, st.sampled_from(["stdout", "stderr"]), st.text("ab\n\r\xfc", max_size=30).map(str.encode),
              st.just(2.0), st.integers(0, 1)),
    st.builds(UserMessage, st.text(max_size=5), st.just(2.0), st.integers(0, 1)),
    st.builds(Metrics, st.just({"loss": 1.0}), time=st.just(2.0), rank=st.integers(0, 1)),
    st.builds(RankFinished, st.just(2.0), st.integers(0, 1), st.just("1")),
    st.builds(RankExited, st.just(2.0), st.integers(0, 1)),
)  # fmt: skip


@given(st.lists(EVENTS, max_size=20), st.integers(0, 20))
def test_the_fold_is_pure(events, at):
    """The arguments are not changed, and replaying in two parts gives the same record."""
    start = replay([STARTED])
    kept, given_ = copy.deepcopy(start), copy.deepcopy(events)
    assert replay(events[at:], replay(events[:at], start)) == replay(events, start)
    assert (start, events) == (kept, given_)


@given(st.lists(st.sampled_from([b"a", b"b\n", b"\n", b"c\rd\n", b"\xc3", b"\xbc\n"]), max_size=20))
def test_how_output_is_cut_does_not_matter(pieces):
    """The same bytes give the same lines, however many pieces they arrive in."""
    one, many = printed(b"".join(pieces)), printed(*pieces)
    assert texts(one) == texts(many)
    assert one.ranks[0].partial_stdout == many.ranks[0].partial_stdout
    assert one.ranks[0].line_count == many.ranks[0].line_count == b"".join(pieces).count(b"\n")
