import io
import re
import sys

import pytest
from texts import mentions

from sparkring.history.events import Failure, GpuUsed, Metrics, Notice, Output, RankFailed, RankFinished, RunFinished
from sparkring.views.tables import show_table
from sparkring.views.terminal import TerminalView

START = 1_700_000_000.0
HOSTILE = b"\x1b[31mred\x1b[0m\x1b[2J\x1b[H\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\\x00\x07\x9b\xe2\x80\xae\n"


class Screen(io.StringIO):
    """A terminal, or a pipe."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def pipe():
    return Screen(terminal=False)


@pytest.fixture
def terminal():
    return Screen(terminal=True)


def test_lines_notices_and_the_end_in_a_pipe(replayed, pipe):
    view = TerminalView(pipe)
    events = [
        Notice(2.0, "waiting"),
        Output("stdout", b"one\n", time=START + 2, rank=0),
        Output("stdout", b"one\n", time=START + 2, rank=1),
    ]
    view.refresh(replayed(*events))
    view.refresh(replayed(*events))
    events += [Output("stderr", b"\x1b[31mtwo\x1b[0m\nhalf", time=START + 3, rank=1), Notice(3.0, "slow")]
    record = replayed(*events)
    view.refresh(replayed(*events[:-1]))
    view.refresh(record)
    events += [
        Metrics({"loss": 0.12}, epoch=1, time=START + 3, rank=0),
        *(RankFinished(START + 3, rank, "") for rank in (0, 1)),
        RunFinished(START + 4.2, "finished"),
    ]
    view.close(replayed(*events))
    assert pipe.getvalue().splitlines() == [
        "sparkring: waiting",
        "[0, 1] one",
        "[1] two",
        "sparkring: slow",
        "[1] half",
        "sparkring: 2 ranks finished in 4.2 s · loss 0.12 · log: /runs/a1b2/rank-N.log",
    ]


def test_a_burst_is_cut_and_says_where_the_rest_is(replayed, pipe):
    TerminalView(pipe).refresh(replayed(Output("stdout", b"x\n" * 5_812, time=2.0, rank=0)))
    lines = pipe.getvalue().splitlines()
    assert lines[0] == "… 4,812 more lines: /runs/a1b2/rank-N.log"
    assert len(lines) == 1_001


def test_a_traceback_is_printed_when_it_is_whole(replayed, pipe):
    """A traceback is held back while its lines are still arriving. If no more lines arrive, it is printed soon."""
    now = [0.0]
    view, events = TerminalView(pipe, clock=lambda: now[0]), []
    traceback = ["Traceback (most recent call last):", '  File "<cell>", line 2, in <module>', "ValueError: 3"]
    for line in traceback:
        for rank in (0, 1):
            events.append(
                Output(
                    "stderr", f"{line.replace('<cell>', f'<cell {rank + 1}>')}\n".encode(), time=START + 2, rank=rank
                )
            )
            view.refresh(replayed(*events))
    assert pipe.getvalue() == ""
    now[0] = 1.0
    view.refresh(replayed(*events))
    assert pipe.getvalue().splitlines() == [f"[0, 1] {line.replace('<cell>', '<cell 1>')}" for line in traceback]


def test_a_failure_is_one_line(replayed, pipe):
    record = replayed(
        RankFailed(2.0, 1, Failure("exit", "exited with code 3")), RunFinished(START + 5, "failed", "", 1)
    )
    TerminalView(pipe).close(record)
    assert pipe.getvalue() == "sparkring: rank 1 failed: exited with code 3 · 5.0 s\n"


def test_start_up_noise_is_counted(replayed, pipe):
    noise = b"2026-01-01 12:00:00.1: I tensorflow/core/port.cc:1] oneDNN\n"
    TerminalView(pipe).close(
        replayed(
            Output("stderr", noise, time=2.0, rank=0),
            Output("stderr", noise, time=2.0, rank=1),
            RunFinished(START + 1, "finished"),
        )
    )
    assert mentions(pipe.getvalue(), "2 lines", "TensorFlow", "/runs/a1b2/rank-N.log")


def test_no_control_code_reaches_a_pipe(replayed, pipe):
    TerminalView(pipe).refresh(replayed(Output("stdout", HOSTILE, time=2.0, rank=0)))
    assert pipe.getvalue() == "[0] redlink␀␇\\x9b\\u202e\n"


def test_only_colours_reach_a_terminal(replayed, terminal):
    record = replayed(Output("stdout", HOSTILE, time=2.0, rank=0), title=HOSTILE.decode("latin-1"))
    TerminalView(terminal).refresh(record)
    shown = terminal.getvalue()
    assert "\x1b[31mred" in shown
    rest = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", rest)
    assert re.search(r"\\u202e\x1b\[0m\n", shown), "colours end with the line"


def test_the_progress_line_is_rewritten_below_the_lines(replayed, terminal):
    now = [0.0]
    view = TerminalView(terminal, clock=lambda: now[0])
    events = [Metrics({"loss": 0.5}, step=3, epoch=1, steps=10, epochs=2, time=START + 2, rank=0)]
    view.refresh(replayed(*events))
    assert terminal.getvalue().startswith("epoch 1 of 2 · step 3 of 10 · 15 % · loss 0.5 · ")
    size = len(terminal.getvalue())
    events.append(Metrics({"loss": 0.5}, step=4, epoch=1, steps=10, epochs=2, time=START + 3, rank=0))
    view.refresh(replayed(*events))
    assert len(terminal.getvalue()) == size, "not so soon"
    now[0] += 0.3
    view.refresh(replayed(*events))
    assert terminal.getvalue()[size:].startswith("\r\x1b[Kepoch 1 of 2 · step 4")
    size = len(terminal.getvalue())
    events.append(Output("stdout", b"hello\n", time=2.0, rank=1))
    view.refresh(replayed(*events))
    assert re.match(r"\r\x1b\[K\x1b\[32m\[1\]\x1b\[0m hello\x1b\[0m\nepoch 1", terminal.getvalue()[size:])
    size = len(terminal.getvalue())
    view.close(replayed(*events, RunFinished(START + 4, "interrupted", "2 ranks ended")))
    assert terminal.getvalue()[size:] == "\r\x1b[Ksparkring: interrupted: 2 ranks ended · 4.0 s · loss 0.5\n"


def test_the_progress_line_has_the_gpus(replayed, terminal):
    """The line sums up the GPUs of all ranks. A GPU that ranks on the same host share is counted only once."""
    used = [GpuUsed("0", "A", 10**9, 4 * 10**9, 40 + 20 * rank, time=2.0, rank=rank) for rank in range(2)]
    TerminalView(terminal).refresh(replayed(*used, GpuUsed("0", "A", 10**9, 4 * 10**9, 60, time=2.0, rank=2), size=3))
    assert " · 2 GPUs 60 %, 2.00 GB of 8.00 GB · " in terminal.getvalue()


def test_wide_letters_do_not_wrap_the_progress_line(replayed, terminal, monkeypatch):
    """Only the last line of the terminal can be cleared, so the rest of a wrapped line would stay."""
    monkeypatch.setenv("COLUMNS", "40")
    TerminalView(terminal).refresh(replayed(Metrics({"精度と損失の平均値": 0.5}, step=1, time=START, rank=0)))
    shown = terminal.getvalue()
    assert sum(2 if letter > "\u3000" else 1 for letter in shown) <= 39
    assert "精度" in shown


@pytest.mark.parametrize("rewritten", [True, False])
def test_a_terminal_without_colours_or_without_codes(replayed, terminal, monkeypatch, rewritten):
    monkeypatch.setenv(*("NO_COLOR", "1") if rewritten else ("TERM", "dumb"))
    view = TerminalView(terminal)
    events = [Metrics({"loss": 0.5}, step=1, time=START, rank=0)]
    view.refresh(replayed(*events))
    view.refresh(replayed(*events, Output("stderr", b"\x1b[31mred\x1b[0m\n", time=START + 2, rank=1)))
    assert "[1] red\n" in terminal.getvalue()
    assert ("loss 0.5" in terminal.getvalue()) == rewritten
    assert set(re.findall("\x1b.*?[a-zA-Z]", terminal.getvalue())) == ({"\x1b[K"} if rewritten else set())


def test_a_narrow_encoding_does_not_end_the_run(replayed):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    TerminalView(stream).refresh(replayed(Output("stdout", "наука\n".encode(), time=2.0, rank=0)))
    assert raw.getvalue() == b"[0] ?????\n"


def test_a_narrow_encoding_does_not_end_a_magic(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1", write_through=True))
    show_table(("name", "état"), [("наука", "prêt …")], empty="")
    show_table((), [], empty="rien …")
    assert raw.getvalue().decode("latin-1").splitlines() == ["name   état", "?????  ??????", "?????  prêt ?", "rien ?"]


def test_a_quick_warm_run_is_its_lines(replayed, pipe):
    view = TerminalView(pipe)
    hello = [Output("stdout", b"hello\n", time=START, rank=rank) for rank in (0, 2)]
    part = {"size": 4, "ranks": (0, 2), "warm": True}
    view.refresh(replayed(**part))
    view.refresh(replayed(*hello, **part))
    view.close(replayed(*hello, RunFinished(START + 0.003, "finished"), **part))
    assert pipe.getvalue() == "[0, 2] hello\n"


def test_a_warm_run_that_lasted_or_ended_ill_is_closed(replayed, pipe):
    TerminalView(pipe).close(replayed(RunFinished(START + 2, "finished"), size=4, ranks=(0, 2), warm=True))
    TerminalView(pipe).close(replayed(RunFinished(START + 0.01, "interrupted", "2 ranks ended"), warm=True))
    assert pipe.getvalue().splitlines() == [
        "sparkring: ranks 0, 2 of 4 finished in 2.0 s · log: /runs/a1b2/rank-N.log",
        "sparkring: interrupted: 2 ranks ended · 10 ms",
    ]


def test_a_warm_run_shows_no_progress_at_first(replayed, terminal):
    now = [0.0]
    view = TerminalView(terminal, clock=lambda: now[0])
    view.refresh(replayed(warm=True))
    assert terminal.getvalue() == ""
    now[0] += 0.11
    view.refresh(replayed(warm=True))
    assert terminal.getvalue().startswith("2 running · ")
