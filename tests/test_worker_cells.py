"""Tests of what display() and the `%` lines of a cell do on a rank, and of the arrays that items share."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from sparkring.worker.rank import displays
from sparkring.worker.rank.items import SharedBuffers
from sparkring.worker.rank.shell import get_ipython
from sparkring.worker.rank.slist import SList


def test_handles_of_displays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle updates its own display, even if the first value was text, which is printed and not sent."""
    found: list[displays.Displayed] = []
    monkeypatch.setattr(displays, "_send", found.append)
    displays.begin()
    first = displays.display("text", display_id=True)
    second = displays.display({"text/html": "1"}, raw=True, display_id=True)
    assert first is not None
    assert second is not None
    first.update({"text/html": "2"}, raw=True)
    second.update({"text/html": "3"}, raw=True)
    assert [(each.number, each.data) for each in found] == [(1, b"1"), (2, b"2"), (1, b"3")]


def test_quotes_in_a_line_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are split as by a shell, as in the notebook."""
    found: list[list[str]] = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: found.append(command) or subprocess.CompletedProcess(command, 0)
    )
    get_ipython().run_line_magic("pip", """install "torch>=2.1" 'my package/' -q""")
    assert [command[1:] for command in found] == [["-m", "pip", "install", "torch>=2.1", "my package/", "-q"]]


def test_many_large_arrays_of_a_pool() -> None:
    """Each item has its own copy of each array. However many arrays there are, they need few file descriptors."""
    data = [bytes([number]) * (5_000 + number) for number in range(50)]
    before = len(os.listdir("/proc/self/fd"))
    shared = SharedBuffers(data)
    first, second = shared.copies_on_write(), shared.copies_on_write()
    assert len(os.listdir("/proc/self/fd")) == before + 3
    first[7][:] = bytes(5_007)
    assert [bytes(each) for each in second] == data
    assert bytes(first[7]) == bytes(5_007)
    assert [bytes(each) for each in first[8:]] == data[8:]
    os.close(shared._file)
    assert SharedBuffers([]).copies_on_write() == []


def test_an_interrupt_before_the_rank_is_ready() -> None:
    """If Stop reaches a rank while it still imports its own modules, the rank ends without a traceback."""
    code = """
import os, signal, sys, types
from sparkring.worker.member import rank_process

class Interrupting:
    def find_spec(self, name, *_):
        if name == "sparkring.worker.rank.rank":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
rank = rank_process.fork_rank(types.SimpleNamespace(rows=-1, context=b""))
print(os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1]), os.read(rank.stderr, 9_999))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"-2 b''\n"


def test_the_lines_of_a_command():
    """They have the attributes of IPython's SList."""
    from IPython.utils.text import SList as Real

    lines = ["a 1", "b  22", "", os.getcwd()]
    mine, real = SList(lines), Real(lines)
    for name in ("n", "s", "l", "list", "nlstr", "spstr"):
        assert getattr(mine, name) == getattr(real, name), name
    assert [str(path) for path in mine.p] == [str(path) for path in real.p] == [os.getcwd()]
    assert mine.fields(1, 0) == real.fields(1, 0) == ["1 a", "22 b", os.getcwd()]
    assert mine.fields() == real.fields()
    assert mine.grep("A 1").n == "a 1"
    assert mine.grep("^2", field=1) == real.grep("^2", field=1)
    assert mine.grep(str.strip, prune=True) == real.grep(str.strip, prune=True) == [""]
    assert type(pickle.loads(pickle.dumps(mine))) is SList
