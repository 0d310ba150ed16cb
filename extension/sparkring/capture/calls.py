"""Describes and checks a call of the user's function before ranks are started."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from sparkring.errors import OptionsError

# Advice for something that is called with a value instead of a function, mostly because of `run(train(0.1))`.
CALLED = "pass the function itself, as in run(train, lr=0.1), instead of calling it, as in run(train(lr=0.1))."

P = ParamSpec("P")
R = TypeVar("R")


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name for messages and titles."""
    innermost = _innermost(function)
    return getattr(innermost, "__qualname__", None) or type(innermost).__name__


def source_of(function: Callable[..., Any]) -> str:
    """Return the source of a function, or "" if the source is not known."""
    try:
        return inspect.getsource(_innermost(function))
    except (OSError, TypeError):
        return ""


def names_of(function: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """Return the parameter name of each positional argument.

    The arguments that a parameter `*rest` collects are named `rest[0]`, `rest[1]` and so on.
    """
    names: list[str] = []
    rest = "argument"
    for parameter in _parameters(function).values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = parameter.name
        elif parameter.kind is not parameter.KEYWORD_ONLY and parameter.kind is not parameter.VAR_KEYWORD:
            names.append(parameter.name)
    return names[: len(args)] + [f"{rest}[{index}]" for index in range(len(args) - len(names))]


def check_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise OptionsError if the function cannot be called with these arguments."""
    try:
        # A decorator's wrapper may take different arguments from the function in its `__wrapped__`.
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError):  # some functions written in C have no signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise OptionsError(f"{name_of(function)}() cannot be called with these arguments: {error}.") from None


def options_apart(run: Callable[P, R]) -> Callable[P, R]:
    """Decorate `run`, which is called as `run(function, *args, **kwargs)` and has keyword-only options.

    The decorated `run` raises OptionsError if a keyword names both an option of `run` and a parameter of `function`.
    """
    first, *others = inspect.signature(run).parameters.values()
    options = [parameter.name for parameter in others if parameter.kind is parameter.KEYWORD_ONLY]

    @functools.wraps(run)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        function, *positional = args or (kwargs.get(first.name),)
        _refuse_ambiguous(run.__name__, function, positional, [name for name in options if name in kwargs])
        return run(*args, **kwargs)

    return checked


def _refuse_ambiguous(who: str, function: Any, args: Sequence[Any], given: Iterable[str]) -> None:
    """Raise OptionsError if `function` has a parameter with the name of an option in `given`.

    Parameters that `args` or a functools.partial already sets are not ambiguous.
    """
    parameters = _parameters(function)
    taken = set(names_of(function, args))
    if isinstance(function, functools.partial):
        taken |= set(function.keywords)
    for name in given:
        parameter = parameters.get(name)
        if (
            parameter is not None
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and name not in taken
        ):
            main = name_of(function)
            raise OptionsError(
                f"{who}(): `{name}` is an option of {who}() and a parameter of {main}(). Pass the function's argument "
                f"by position, or with functools.partial({main}, {name}=…); {name}= is then the option of {who}()."
            )


def _innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself; for a functools.partial, the function that the partial calls."""
    return _innermost(function.func) if isinstance(function, functools.partial) else function


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError):  # not callable, or written in C
        return {}
