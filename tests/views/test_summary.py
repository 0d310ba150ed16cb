import json
from pathlib import Path

from texts import mentions

from sparkring.history import describe
from sparkring.history.events import (
    CodeFrame,
    Failure,
    MemberJoined,
    Metrics,
    Output,
    RankExited,
    RankFailed,
    RankFinished,
    RankUsed,
    RunFinished,
    SourceLine,
    StackTaken,
)
from sparkring.views.description import Column, bars_top, column_texts, fact

CODE = "%%horovod -n -4\nimport time\ndef train(x):\n    y = x + 1\n    raise ValueError(x)\n\ntrain(3)\n"
TRACEBACK = (
    'Traceback (most recent call last):\n  File "<cell>", line 7, in <module>\n    train(3)\n'
    '  File "<cell>", line 5, in train\n    raise ValueError(x)\nValueError: 3\n'
)
FRAMES = (
    CodeFrame("<cell>", 7, "<module>", True, (SourceLine(7, "train(3)"),)),
    CodeFrame("<cell>", 5, "train", True, (SourceLine(4, "    y = x + 1"), SourceLine(5, "    raise ValueError(x)"))),
)
FAILURE = Failure("exception", "ValueError: 3", FRAMES, TRACEBACK, "Try another number.")
ECHO = Failure("echo", "HorovodInternalError: gone")


def test_the_page_has_the_same_words():
    """Numbers and lists of ranks have the same text as in the page (tests/views/panel/twins.test.mjs)."""
    same = json.loads((Path(__file__).parent / "words.json").read_text(encoding="utf-8"))
    write = {
        "ticking": describe.duration,
        "numbers": lambda values: [*map(describe.numbers([*map(float, values)]), map(float, values))],
        "cells": lambda kind, cell: column_texts(Column("", "", kind, signs={"failed": "✗"}), [cell])[0],
        "facts": lambda title, kind, cell: fact(Column("", title, kind, noun="step"), cell, "batch"),
        "usage_words": lambda used: describe.usage_words(used and RankUsed(*used)),
        "bars_top": bars_top,
        "counted": lambda given: describe.counted(*given),
    }
    for name, cases in same.items():
        worded = write.get(name) or getattr(describe, name)
        for *given, words in cases:
            value = [
                float(each) if name not in ("cells", "facts") and isinstance(each, str) else each for each in given
            ]
            assert worded(*value) == words, (name, given)


def test_ranks_in_words():
    assert describe.rank_list([2]) == "rank 2"
    assert describe.rank_list([7, 0, 1, 2, 3]) == "ranks 0–3, 7"
    assert describe.rank_list([0, 1]) == "ranks 0, 1"
    assert describe.counted(1, "rank") == "1 rank"
    assert describe.counted(1024, "rank") == "1,024 ranks"


def test_a_failure_names_rank_host_line_advice_last_lines_followers_and_log(replayed):
    record = replayed(
        Output("stdout", b"reading\nready\n", time=2.0, rank=2),
        Output("stderr", TRACEBACK.encode(), time=3.0, rank=2),
        Output("stdout", b"goodbye\n", time=3.0, rank=2),
        RankFailed(3.0, 2, FAILURE),
        *(RankFailed(3.1, rank, ECHO) for rank in (0, 1, 3)),
        RunFinished(4.0, "failed", "ValueError: 3", 2),
        size=4,
        code=CODE,
    )
    assert describe.explain_failure(record) == (
        "rank 2 on node-0 failed: ValueError: 3\n\n"
        "cell line 5, in train:\n"
        "  4      y = x + 1\n"
        "→ 5      raise ValueError(x)\n"
        "  called from cell line 7: train(3)\n\n"
        "Try another number.\n\n"
        "ranks 0, 1, 3 then failed too: HorovodInternalError: gone\n\n"
        "Last lines of rank 2:\n"
        "  reading\n  ready\n  goodbye\n\n"
        "Whole log: /runs/a1b2/rank-2.log"
    )


def test_in_a_notebook_the_whole_log_is_no_path(replayed, monkeypatch):
    """Errors name a %logs line, because JupyterLab would turn a path into a link that opens its debugger."""
    monkeypatch.setattr("sparkring.history.describe.run.in_notebook", lambda: True)
    record = replayed(RankFailed(3.0, 1, FAILURE), RunFinished(4.0, "failed", "", 1))
    assert describe.explain_failure(record).endswith("\n\nWhole log: %logs 2026-11-20_14-03-22_a1b2 --rank 1")
    assert describe.explain_timeout(replayed(), "30 s").endswith("\n\nWhole logs: %logs 2026-11-20_14-03-22_a1b2")


def test_how_long_a_run_took(replayed):
    """The time is in whole seconds during the run. If the ranks never started, the text says so."""
    began = 1_700_000_000.0
    assert describe.took(replayed(), began + 3.6) == "3 s"
    ended = RunFinished(began + 3.6, "timed out", "after 3 s")
    assert describe.took(replayed(ended), 0.0) == "3.6 s"
    assert describe.closing(replayed(ended), 0.0) == "timed out: after 3 s · 3.6 s"
    refused = replayed(RunFinished(began, "failed", "no slots"), up=False)
    assert describe.took(refused, 0.0).startswith("0 s, before ")


def test_different_followers_share_a_line(replayed):
    other = Failure("signal", "killed by SIGKILL")
    record = replayed(
        RankFailed(3.0, 0, FAILURE),
        RankFailed(3.1, 1, other),
        RankFailed(3.1, 2, ECHO),
        RankFailed(3.1, 3, ECHO),
        RunFinished(4.0, "failed", "", 0),
        size=4,
    )
    told = describe.explain_failure(record)
    assert "\nranks 1–3 then failed too: HorovodInternalError: gone (2, 3); killed by SIGKILL (1)\n" in told


def test_an_error_in_a_library_is_told_from_the_cell(replayed):
    frames = (*FRAMES[:1], CodeFrame("/opt/lib/python3.11/site-packages/keras/src/layers/base.py", 120, "call"))
    record = replayed(
        RankFailed(3.0, 0, Failure("exception", "ValueError: shape", frames)), RunFinished(4.0, "failed", "", 0)
    )
    told = describe.explain_failure(record)
    assert "cell line 7:\n→ 7  train(3)\n  raised in src/layers/base.py:120, in call" in told


def test_a_crash_points_at_the_line_that_faulthandler_left(replayed):
    stack = (
        b"Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first):\n"
        b'  File "/usr/lib/ctypes.py", line 5 in string_at\n  File "<cell>", line 4 in train\n'
        b'  File "<cell>", line 7 in <module>\n'
    )
    record = replayed(
        Output("stderr", stack, time=3.0, rank=1),
        RankFailed(3.0, 1, Failure("signal", "killed by SIGSEGV", advice="A crash in native code.")),
        RunFinished(4.0, "failed", "", 1),
        code=CODE,
    )
    assert describe.failed_line(record) == 4
    told = describe.explain_failure(record)
    assert "cell line 4:\n  2  import time\n  3  def train(x):\n→ 4      y = x + 1\n  5      raise" in told


def test_a_traceback_is_left_out_even_where_its_beginning_is_gone(replayed):
    record = replayed(
        Output("stderr", b"".join(TRACEBACK.encode().splitlines(keepends=True)[2:]) + b"after\n", time=3.0, rank=0),
        RankFailed(3.0, 0, FAILURE),
        RunFinished(4.0, "failed", "", 0),
    )
    assert [line.text for line in describe.without_traceback(record.ranks[0].tail, FAILURE)] == ["after"]


def test_last_lines_are_twenty_and_hold_no_control_codes(replayed):
    record = replayed(
        Output("stdout", b"".join(b"\x1b[31mline %d\x1b[0m\x00\n" % n for n in range(50)), time=3.0, rank=0),
        RankFailed(3.0, 0, FAILURE),
        RunFinished(4.0, "failed", "", 0),
    )
    told = describe.explain_failure(record)
    assert "  line 30␀\n" in told
    assert "line 29" not in told
    assert "\x1b" not in told


def test_without_a_failed_rank_the_outcome_is_told(replayed):
    record = replayed(RunFinished(4.0, "failed", "the value of rank 1 cannot be pickled"))
    assert describe.explain_failure(record) == "failed: the value of rank 1 cannot be pickled"


def stack(rank, state, line, inner="/usr/lib/python3.11/socket.py", function="recv"):
    text = f'Thread 0x1 (most recent call first):\n  File "{inner}", line 9 in {function}\n'
    if line:
        text += f'  File "<cell>", line {line} in <module>\n'
    return StackTaken(30.0, rank, state, line, text)


def test_a_timeout_says_where_each_rank_stood(replayed):
    record = replayed(
        RankFinished(20.0, 0, ""),
        RankFinished(20.0, 1, ""),
        stack(2, "waiting", 7),
        stack(3, "waiting", 7),
        StackTaken(30.0, 4, "frozen (SIGSTOP)", 0, ""),
        size=6,
        code=CODE,
    )
    lines = describe.explain_timeout(record, "after 30 s").splitlines()
    assert (lines[0], lines[2], *lines[4:6]) == (
        "after 30 s",
        "  ranks 0, 1 finished",
        "  rank 4 is frozen (SIGSTOP)",
        "  rank 5 does not respond",
    )
    assert mentions(lines[3], "ranks 2, 3", "line 7: `train(3)`", "socket.py:9 recv")
    assert "allreduce" in lines[7]
    assert mentions(lines[9], "logs", "/runs/a1b2/rank-N.log")
    assert len(lines) == 10


PACKAGES = "/opt/env/lib/python3.11/site-packages"
HOROVOD = f"{PACKAGES}/horovod/torch/mpi_ops.py"


def test_where_every_rank_is_in_one_sentence(replayed):
    """Ranks that have left the cell come first. A collective is named before the line, other functions after it."""
    record = replayed(
        *(stack(rank, "running", 7, HOROVOD, "allreduce") for rank in (0, 1, 3)),
        RankFinished(20.0, 2, ""),
        StackTaken(30.0, 4, "frozen (SIGSTOP)", 5, ""),
        *(stack(rank, "running", 4, f"{PACKAGES}/numpy/linalg.py", "solve") for rank in (5, 6)),
        stack(7, "waiting", 0),
        size=9,
        code=CODE,
    )
    assert describe.explain_where(record) == (
        "rank 2 finished; ranks 0, 1, 3 wait in allreduce, cell line 7: `train(3)`; "
        "rank 4 is frozen (SIGSTOP), cell line 5: `raise ValueError(x)`; "
        "ranks 5, 6 run at cell line 4: `y = x + 1`, in numpy/linalg.py:9 solve; "
        "rank 7 waits in socket.py:9 recv; rank 8 does not respond"
    )


def test_a_graph_is_not_called_a_collective(replayed):
    """For a rank in a TensorFlow graph, the text names no collective, but says whether the process runs or waits."""
    context = f"{PACKAGES}/tensorflow/python/eager/context.py"
    record = replayed(
        stack(0, "running", 7, context, "call_function"), stack(1, "waiting", 0, context, "call_function")
    )
    assert (
        describe.explain_where(record)
        == "rank 0 runs in a TensorFlow graph, cell line 7; rank 1 waits in a TensorFlow graph"
    )


def test_where_many_ranks_are_is_bounded(replayed):
    record = replayed(*(stack(rank, "waiting", rank + 1) for rank in range(20)), size=20)
    told = describe.explain_where(record)
    assert told.endswith("; rank 7 waits at cell line 8, in socket.py:9 recv; ranks 8–19 are elsewhere")


def test_where_the_ranks_are_before_and_after(replayed):
    assert describe.explain_where(replayed(up=False)) == "0 of 2 ranks have connected"
    assert describe.explain_where(replayed(RunFinished(4.0, "finished"))) == "2 ranks finished"


def test_stacks_as_a_table(replayed):
    record = replayed(
        Output("stdout", b"one\n\nstep 3", time=30.0, rank=0),
        stack(0, "running", 7, HOROVOD, "synchronize_"),
        stack(1, "running", 7, HOROVOD, "allreduce"),
        code=CODE,
        size=4,
        warm=True,
        ranks=(0, 1, 2),
    )
    assert describe.stacks_table(record) == [
        ("0", "node-0", "running", "7: train(3)", "horovod/torch/mpi_ops.py:9 synchronize_", "step 3"),
        ("1", "node-1", "waiting", "7: train(3)", "allreduce", ""),
        ("2", "node-0", "no answer", "", "", ""),
        ("3", "node-1", "idle", "", "", ""),
    ]
    assert len(describe.STACK_HEADERS) == 6


def test_only_ranks_that_take_part_are_counted(replayed):
    """When a cell runs on some ranks of a gang, the other ranks are idle and are not counted."""
    part = {"size": 4, "ranks": (0, 2), "warm": True}
    assert describe.outcome(replayed(**part)) == "2 running"
    record = replayed(RankFinished(1_700_000_001.0, 0, ""), **part)
    assert describe.outcome(record) == "1 running, 1 finished"
    record = replayed(RankFinished(2.0, 0, ""), RankFinished(2.0, 2, ""), RunFinished(4.0, "finished"), **part)
    assert describe.states(record) == {"finished": 2}
    assert describe.outcome(record) == "ranks 0, 2 of 4 finished"
    assert describe.ranks(replayed(size=64, ranks=tuple(range(0, 64, 3)))) == "22 of 64 ranks"
    assert describe.explain_timeout(replayed(**part), "3 s").splitlines()[2] == "  ranks 0, 2 do not respond"


def test_a_timeout_before_the_ranks_were_up(replayed):
    record = replayed(MemberJoined(2.0, 0, "node-0"), up=False)
    assert mentions(describe.explain_timeout(record, "after 30 s"), "after 30 s", "1 of 2 ranks")


def test_the_closing_line(replayed):
    start = 1_700_000_000.0
    record = replayed(
        Metrics({"loss": 0.1}, epoch=1, ends_epoch=True, time=start + 2, rank=0),
        Metrics({"loss": 0.2}, epoch=1, ends_epoch=True, time=start + 2, rank=1),
        *(RankFinished(start + 3, rank, "") for rank in (0, 1)),
        *(RankExited(start + 3, rank) for rank in (0, 1)),
        RunFinished(start + 3.2, "finished"),
    )
    assert describe.closing(record, 0.0) == "2 ranks finished in 3.2 s · loss 0.15"
    assert describe.states(record) == {"finished": 2}
