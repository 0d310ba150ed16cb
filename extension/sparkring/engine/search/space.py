"""The values that a search chooses from: a range of numbers or a list of choices for each parameter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sparkring.errors import OptionsError
from sparkring.history.events import Searched
from sparkring.runtime.parameters import Parameters, as_text
from sparkring.runtime.report import short_repr

_PLAIN = (bool, int, float, str, type(None))  # choices of these types are stored in the study's file unchanged


class Range(NamedTuple):
    """A range of numbers, both ends included; made by uniform(), log_uniform() and integer()."""

    low: float
    high: float
    step: float | None = None
    log: bool = False
    whole: bool = False


def uniform(low: float, high: float, *, step: float | None = None) -> Range:
    """Define a range of numbers for search(). With `step`, the only values are low, low + step, low + 2 × step, …"""
    _check_numbers("uniform", low, high, 1 if step is None else step)
    return _checked("uniform", Range(float(low), float(high), step))


def log_uniform(low: float, high: float) -> Range:
    """Define a range for search(): numbers from `low` (above 0) to `high`, drawn uniformly on a logarithmic scale."""
    _check_numbers("log_uniform", low, high)
    return _checked("log_uniform", Range(float(low), float(high), log=True))


def integer(low: int, high: int, *, step: int = 1, log: bool = False) -> Range:
    """Define a range of whole numbers for search(). With log=True, they are drawn uniformly on a logarithmic scale."""
    _check_numbers("integer", low, high, step)
    if any(int(number) != number for number in (low, high, step)):
        raise OptionsError(f"integer({low!r}, {high!r}): the bounds and the step must be whole numbers.")
    return _checked("integer", Range(int(low), int(high), int(step), log, whole=True))


def _check_numbers(name: str, low: Any, high: Any, step: Any = 1) -> None:
    """Raise OptionsError unless the bounds and the step of a range are finite numbers."""
    try:
        if math.isfinite(low) and math.isfinite(high) and math.isfinite(step):
            return
    except (TypeError, ValueError, OverflowError):  # not a number, or an int that no float can represent
        pass
    written = f"{name}({short_repr(low, 60) or None}, {short_repr(high, 60) or None})"
    raise OptionsError(f"{written}: the bounds and the step must be finite numbers.")


def _checked(name: str, bounds: Range) -> Range:
    written = f"{name}({bounds.low:g}, {bounds.high:g})"
    if bounds.low > bounds.high:
        raise OptionsError(f"{written}: the first number is the lower bound, so it must not be above the second.")
    if bounds.log and bounds.low <= 0:
        raise OptionsError(f"{written}: the lower bound of a logarithmic range must be greater than 0.")
    if bounds.step is not None and bounds.step <= 0:
        raise OptionsError(f"{written}: the step must be greater than 0, not {bounds.step:g}.")
    if bounds.log and bounds.whole and bounds.step != 1:
        raise OptionsError(f"{written}: a logarithmic range cannot have a step.")
    return bounds


class Space:
    """The parameters of a search: for each name, a Range, a Python range, a list of choices, or an Optuna distribution.

    Raises OptionsError if anything else is given.
    """

    def __init__(self, written: Mapping[str, Any]) -> None:
        if not written:
            raise OptionsError(
                "search() needs at least one parameter: search(lr=sparkring.log_uniform(1e-5, 1e-1), …)."
            )
        self.names = tuple(written)
        self._choices: dict[str, dict[Any, Any]] = {}  # by parameter, each choice's value by its label in Optuna
        self.distributions = {name: self._distribution(name, given) for name, given in written.items()}

    def _distribution(self, name: str, given: Any) -> Any:
        from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

        if isinstance(given, BaseDistribution):
            return given
        if isinstance(given, range) and given:
            low, high = sorted((given[0], given[-1]))
            return IntDistribution(low, high, step=abs(given.step))
        if isinstance(given, Range):
            if given.whole:
                return IntDistribution(int(given.low), int(given.high), given.log, int(given.step or 1))
            return FloatDistribution(given.low, given.high, given.log, given.step)
        if not isinstance(given, Sequence) or isinstance(given, str | bytes) or not given:
            raise OptionsError(
                f"search({name}={short_repr(given, 60) or 'None'}): expected a list of choices, or one of "
                "sparkring.uniform(0, 1), sparkring.log_uniform(1e-5, 1e-1) and sparkring.integer(1, 4)."
            )
        plain = all(isinstance(choice, _PLAIN) for choice in given)
        labels = list(given if plain else map(as_text, given))
        if len({(type(label), label) for label in labels}) < len(labels):
            same = "are equal" if plain else "have the same repr()"
            raise OptionsError(f"search({name}=[…]): two of the choices {same}, so they cannot be told apart.")
        if not plain:
            self._choices[name] = dict(zip(labels, given, strict=True))
        return CategoricalDistribution(labels)

    def values(self, params: Mapping[str, Any]) -> Parameters:
        """Return the values of the parameters in one of Optuna's trials."""
        values = [self._choices[name][params[name]] if name in self._choices else params[name] for name in self.names]
        return Parameters(self.names, values)

    @property
    def described(self) -> tuple[Searched, ...]:
        """The parameters as views show them."""
        return tuple(
            Searched(name, choices=tuple(map(as_text, distribution.choices)))
            if hasattr(distribution, "choices")
            else Searched(name, float(distribution.low), float(distribution.high), bool(distribution.log))
            for name, distribution in self.distributions.items()
        )

    def combinations(self) -> int:
        """Return how many combinations a grid has. Raises OptionsError if a parameter has no list of values."""
        return math.prod(len(values) for values in self._listed().values())

    def grid(self) -> Iterator[dict[str, Any]]:
        """Return an iterator over all combinations of values. Choices are given by their labels in Optuna."""
        listed = self._listed()
        return (dict(zip(listed, values, strict=True)) for values in itertools.product(*listed.values()))

    def _listed(self) -> dict[str, Sequence[Any]]:
        values: dict[str, Sequence[Any]] = {}
        for name, distribution in self.distributions.items():
            if hasattr(distribution, "choices"):
                values[name] = distribution.choices
            elif isinstance(distribution.low, int):
                values[name] = range(distribution.low, distribution.high + 1, distribution.step)
            elif distribution.step is not None:
                count = round((distribution.high - distribution.low) / distribution.step) + 1
                values[name] = [distribution.low + at * distribution.step for at in range(count)]
            else:
                raise OptionsError(
                    f'search({name}=…, sampler="grid"): a grid needs a list of values, such as '
                    f"{name}=[{distribution.low:g}, {distribution.high:g}], or a range with a step."
                )
        return values
