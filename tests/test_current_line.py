"""A rank tells which line of its cell it is running, and what the line has called."""

from __future__ import annotations

import threading

import pytest

from sparkring.history import stacks
from sparkring.runtime import report
from sparkring.wire.messages import AtLine
from sparkring.worker.rank.current_line import LineWatch

CELL = "def step():\n    meanwhile()\n\nstep()\n"


def test_the_line_of_the_cell_and_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[AtLine] = []
    monkeypatch.setattr(report, "_tell", sent.append)
    watch, main_thread = LineWatch(), threading.get_ident()

    def look(cell: str = "<cell 2>") -> None:
        watch._due = 0.0
        watching = threading.Thread(target=watch.look, args=(main_thread, cell))
        watching.start()
        watching.join()

    def meanwhile() -> None:
        look("<cell 3>")
        assert not sent, "this cell is not running"
        look()
        watch.look(main_thread, "<cell 2>")  # too soon

    exec(compile(CELL, stacks.cell_name(2), "exec"), {"meanwhile": meanwhile})
    [at] = sent
    assert at.line == 2
    assert at.calls[-2:] == ("<cell 2>:2 step", "<cell 2>:4 <module>")
    assert any(call.startswith("test_current_line.py:") and call.endswith(" meanwhile") for call in at.calls)
    look()
    assert sent == [at], "the cell has ended"
