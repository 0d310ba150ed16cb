"""Tests of which keywords of sparkring.run() are options, and which arguments are refused before a launch."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from sparkring.capture.calls import check_call, name_of, names_of, options_apart
from sparkring.capture.cell import captured_call
from sparkring.capture.packing import pack_call, unpack_call
from sparkring.errors import OptionsError


@options_apart
def run(main: Any, *args: Any, np: int = -1, checkpoint_dir: str = "", **kwargs: Any) -> Any:
    """Stand in for sparkring.run(), without ranks: return the options and the value that the function returns."""
    return np, checkpoint_dir, main(*args, **kwargs)


def train(lr: float, checkpoint_dir: str = "own", *rest: Any, np: int = 0, **more: Any) -> tuple[Any, ...]:
    return lr, checkpoint_dir, rest, np, more


def plain(lr: float, *, steps: int = 10) -> tuple[Any, ...]:
    return lr, steps


def takes_all(**kwargs: Any) -> dict[str, Any]:
    return kwargs


@functools.wraps(train)
def decorated(*args: Any, **kwargs: Any) -> Any:
    return train(*args, **kwargs)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (lambda: run(plain, 0.1, np=-2, checkpoint_dir="/x"), (-2, "/x", (0.1, 10))),
        (lambda: run(plain, steps=3, lr=0.1), (-1, "", (0.1, 3))),
        (lambda: run(main=plain, np=2, lr=1), (2, "", (1, 10))),
        # If the function's argument is passed by position, the keyword sets the option.
        (lambda: run(train, 0.1, "/mine"), (-1, "", (0.1, "/mine", (), 0, {}))),
        (lambda: run(train, 0.1, "/mine", checkpoint_dir="/x"), (-1, "/x", (0.1, "/mine", (), 0, {}))),
        # The same applies if functools.partial() has bound the function's argument.
        (
            lambda: run(functools.partial(train, checkpoint_dir="/mine", np=4), 1, np=-2, checkpoint_dir="/x"),
            (-2, "/x", (1, "/mine", (), 4, {})),
        ),
        (lambda: run(functools.partial(functools.partial(train, 1), np=4), np=-2), (-2, "", (1, "own", (), 4, {}))),
        # A function with **kwargs names no keywords: options go to run(), and bound arguments go to the function.
        (lambda: run(takes_all, np=-2, lr=1), (-2, "", {"lr": 1})),
        (lambda: run(functools.partial(takes_all, np=7), np=-2, lr=1), (-2, "", {"np": 7, "lr": 1})),
    ],
)
def test_whose_keyword_is_whose(result: Any, expected: Any) -> None:
    """Each argument goes to run() or to the function, and none is lost."""
    assert result() == expected


@pytest.mark.parametrize("function", [train, decorated, functools.partial(train, 0.1)])
def test_a_keyword_that_could_be_either_is_refused(function: Any) -> None:
    """The keyword is refused even if it has its default value. The message says how to set each of the two."""
    with pytest.raises(OptionsError) as caught:
        run(function, checkpoint_dir="")
    assert str(caught.value) == (
        "run(): `checkpoint_dir` is an option of run() and a parameter of train(). Pass the function's argument by "
        "position, or with functools.partial(train, checkpoint_dir=…); checkpoint_dir= is then the option of run()."
    )
    with pytest.raises(OptionsError, match="`np` is an option"):
        run(function, 0.1, "/mine", np=-2)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "said"),
    [
        (plain, (), {}, r"^plain\(\) cannot be called with these arguments: missing a required argument: 'lr'\.$"),
        (plain, (1,), {"lrr": 2}, "got an unexpected keyword argument 'lrr'"),
        (plain, (1, 2), {}, "too many positional arguments"),
        (train, (1,), {"lr": 2}, "multiple values for argument 'lr'"),
        (functools.partial(plain, steps=1), (), {}, r"^plain\(\) cannot"),
    ],
)
def test_arguments_that_do_not_fit(function: Any, args: Any, kwargs: Any, said: str) -> None:
    """The error has Python's own message about the function's signature."""
    with pytest.raises(OptionsError, match=said):
        check_call(function, args, kwargs)


@pytest.mark.parametrize("function", [decorated, dict, max, print])
def test_what_cannot_be_judged_is_let_pass(function: Any) -> None:
    """A decorator may add arguments, and a function written in C may have no signature."""
    check_call(function, (), {})


def test_names_of_arguments() -> None:
    """Messages and tables call an argument by the name of its parameter."""
    assert names_of(train, (1, "x")) == ["lr", "checkpoint_dir"]
    assert names_of(train, (1, "x", 3, 4)) == ["lr", "checkpoint_dir", "rest[0]", "rest[1]"]
    assert names_of(functools.partial(train, 1), ("x",)) == ["checkpoint_dir"]
    assert names_of(max, (1, 2)) == ["argument[0]", "argument[1]"]
    assert name_of(functools.partial(train, 1)) == "train"
    assert name_of(functools.partial(dict)) == "dict"


def test_a_call_travels_with_its_arguments() -> None:
    """Positional arguments arrive in their order, and the table names all arguments."""
    args, kwargs = (0.1, "/mine", 3), {"np": 4, "more": 5}
    packed = pack_call(train, kwargs, None, args)
    function, keywords = unpack_call(packed.payload, packed.buffers)
    assert function(**keywords) == (0.1, "/mine", (3,), 4, {"more": 5})
    names = [row.name for row in captured_call(train, kwargs, packed, args)]
    assert names == ["train", "lr", "checkpoint_dir", "rest[0]", "np", "more"]
