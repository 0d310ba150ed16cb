"""Tests of what a rank reports about an exception: advice, and the cause, such as another rank's failure."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest
from texts import mentions

from sparkring import errors
from sparkring.capture import submodules
from sparkring.capture.source_lines import FUTURE_LINE
from sparkring.wire.messages import SourceLine
from sparkring.worker.rank.cell import compile_cell
from sparkring.worker.rank.failures import as_failure

# Code that fails on a rank, and the name that the ranks do not know, or '' if it fails for another reason.
UNKNOWN = {
    "a name": ("limit", "limit"),
    "pandas": ("raise NameError(\"local variable 'limit' is not defined\")", "limit"),
    "a key of globals()": ("globals()['limit']", "limit"),
    "a key in a format": ("'{limit}'.format(**globals())", "limit"),
    "a key in a template": ("import string\nstring.Template('$limit').substitute(globals())", "limit"),
    "what pickle looks up": ("import pickle\npickle.loads(b'c__main__\\nNoSuchNet\\n.')", "NoSuchNet"),
    "what pickle looks up in a class": (
        "import pickle\npickle.loads(b'\\x80\\x04c__main__\\nNoNet.Part\\n.')",
        "NoNet",
    ),
    "an attribute of __main__": ("import __main__\n__main__.no_such_limit", "no_such_limit"),
    "another key": ("{}['limit']", ""),
    "another attribute": ("import math\nmath.limit", ""),
}


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that runs code in a rank's `__main__`, where it fails, and returns the advice."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    def run(source: str) -> str:
        with pytest.raises(Exception) as raised:  # noqa: PT011
            exec(compile(source, "<cell>", "exec"), vars(main))
        return as_failure(raised.value).advice

    return run


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_name_that_the_ranks_do_not_know(what: str, advice: Callable[[str], str]) -> None:
    """The error says what to do, whichever code looked up the name. Other errors get no advice."""
    source, name = UNKNOWN[what]
    expected = f"`{name}` is not known on the ranks: define it in the cell or in the notebook, or name it with --push."
    assert advice(source) == (expected if name else "")


def test_a_submodule_that_could_not_be_imported(advice: Callable[[str], str]) -> None:
    """If a submodule could not be imported, the error of the code that uses it says why."""
    try:
        submodules.import_submodule("json.nowhere")
        told = advice("import json\njson.nowhere.f()")
    finally:
        submodules.missing.clear()
    assert mentions(told, "`json.nowhere`", "not", "ModuleNotFoundError")


def test_the_lines_around_a_failure() -> None:
    """The lines are the user's: the import that takes the place of the magic's line is left out."""
    with pytest.raises(ZeroDivisionError) as raised:
        compile_cell(f"{FUTURE_LINE}\nx = 0\n1 / x\n", "<cell>").run({})
    assert as_failure(raised.value).frames[-1].source == (SourceLine(2, "x = 0"), SourceLine(3, "1 / x"))


class HorovodInternalError(RuntimeError):
    """An error that is recognised by its name, like Horovod's own."""


class OwnTypeError(TypeError):
    """A class that the user has defined."""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OwnTypeError(), "code"),
        (ModuleNotFoundError(), "code"),
        (UnboundLocalError(), "code"),
        (errors.OptionsError(), "code"),
        (errors.CheckpointError(), "code"),
        (errors.CheckpointStorageError(), "exception"),
        (errors.CheckpointDamagedError(), "damaged checkpoint"),
        (ValueError("TypeError: no"), "exception"),
        (OSError(), "exception"),
        (MemoryError(), "out of memory"),
        (SystemExit(1), "exit"),
        (KeyboardInterrupt(), "interrupt"),
    ],
)
def test_what_the_type_says(error, cause):
    """The base classes of an exception count, but its text does not."""
    assert as_failure(error).cause == cause


def test_the_summary_begins_with_text():
    """Tables show the first line of the summary, so it is not blank, as in the errors of torch's mp.spawn()."""
    assert as_failure(ValueError("\n\n-- Process 0:\n  x\n")).summary == "ValueError: -- Process 0:\n  x"


def test_what_a_handler_raises_is_an_echo():
    """A TypeError that is raised while the error of a collective is handled results from another rank's exit."""

    def handled(*, hidden: bool) -> BaseException:
        try:
            try:
                raise HorovodInternalError
            except HorovodInternalError:
                if hidden:
                    raise OwnTypeError from None
                len(5)
        except TypeError as error:
            return error

    assert as_failure(handled(hidden=False)).cause == "echo"
    assert as_failure(handled(hidden=True)).cause == "code"
    assert as_failure(handled(hidden=True)).error.endswith("OwnTypeError")
