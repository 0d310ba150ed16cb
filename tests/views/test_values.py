import re

import numpy as np
import pytest
from IPython.core.formatters import PlainTextFormatter

from sparkring.engine.run.result import RunResult
from sparkring.history.events import RankFinished, RunFinished
from sparkring.history.values import CHARACTERS, ENTRIES, told


class Odd:
    """A class whose repr() raises an error."""

    def __repr__(self):
        raise ValueError("no")


class Unwritten:
    """A class whose repr() is not text."""

    def __repr__(self):
        return None


@pytest.fixture
def result(replayed):
    def make(*values):
        events = [RankFinished(1_700_000_000.0, rank, "") for rank in range(len(values))]
        record = replayed(*events, RunFinished(1_700_000_000.003, "finished"), size=len(values), warm=True)
        return RunResult(dict(enumerate(values)), {}, record)

    return make


@pytest.fixture
def out():
    """The formatter with which a notebook shows values as Out[]."""
    return PlainTextFormatter()


def test_equal_values_are_shown_once(result, out):
    assert out(result(*[0.9731] * 4)) == "ranks 0–3: 0.9731"
    assert out(result(1, "b", 1)) == "ranks 0, 2: 1\nrank 1: 'b'"


def test_none_is_not_shown(result, out):
    assert out(result(None, 5)) == "rank 1: 5"
    assert out(result(None, None)) == "RunResult(2 ranks, finished in 3 ms)"


def test_several_lines_begin_on_a_line_of_their_own(result, out):
    shown = out(result(np.eye(2), np.eye(2), np.zeros(2)))
    assert shown == "ranks 0, 1:\narray([[1., 0.],\n       [0., 1.]])\nrank 2: array([0., 0.])"


def test_values_are_written_as_the_notebook_writes_them(result, out):
    out.float_precision = 2
    out.for_type(complex, lambda value, printer, cycle: printer.text("a complex number"))
    assert out(result(0.97312, 1j)) == "rank 0: 0.97\nrank 1: a complex number"
    assert re.match(r"rank 0:\n\{'a+': .*,\n 'b+'", out(result({"a" * 50: "x" * 50, "b" * 50: 1})))
    out.max_seq_length = 3
    assert out(result(list(range(5_000)))) == "rank 0: [0, 1, 2, ...]"


def test_a_repr_that_raises_is_told_by_its_type(result, out, capsys):
    odd = f"{__name__}.Odd, whose repr() raises ValueError"
    assert out(result(Odd(), 1)) == f"rank 0: <{odd}>\nrank 1: 1"
    assert told({0: Odd()}) == f"rank 0: <{odd}>"
    assert "Odd, whose" in out(result([Odd()])) or "list, whose" in out(result([Odd()]))
    assert "Unwritten, whose repr() raises TypeError" in told({0: Unwritten()})
    assert capsys.readouterr() == ("", "")


def test_it_is_bounded():
    lines = told({rank: f"{rank}" * 10_000 for rank in range(30)}).splitlines()
    assert len(lines) == ENTRIES + 1
    assert all(len(line) < CHARACTERS + 60 for line in lines)
    assert lines[0].endswith("… (10,002 characters)")
    assert lines[-1] == "… and 10 more values (ranks 20–29)"


def test_nothing_hidden_is_shown():
    class Hostile:
        def __repr__(self):
            return "\x1b[31mred\x1b[2J\u202e\x00"

    assert told({0: Hostile()}) == "rank 0: red\\u202e␀"


def test_a_result_among_others_is_one_line(result, out):
    shown = out([result(1, 2), result(3, 3)])
    assert "\n" not in shown.replace(",\n ", "")
    assert shown.count("RunResult(2 ranks, finished in 3 ms)") == 2
    assert repr(result(1, 2)) == str(result(1, 2)) == "RunResult(2 ranks, finished in 3 ms)"


def test_some_ranks_of_a_gang(replayed, out):
    record = replayed(RunFinished(1_700_000_000.003, "finished"), size=4, warm=True, ranks=(0, 2))
    assert out(RunResult({0: 7, 2: 7}, {}, record)) == "ranks 0, 2: 7"
    assert out(RunResult({}, {}, record)) == "RunResult(ranks 0, 2 of 4, finished in 3 ms)"
