"""Sends reports from a rank to the notebook: numbers with log(), text with log_to_driver().

In a process that is not a rank, such as the driver, log() does nothing and log_to_driver() prints. So a function that
calls them can first be tried in the notebook.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any

from sparkring.errors import NotFiniteError
from sparkring.runtime import loops, world
from sparkring.wire.messages import Metrics, Told, UserMessage

MESSAGE_CHARACTERS = 4_000  # longer messages are cut off, as the documentation of HorovodRunner says
DISPLAYS_KEPT, DISPLAY_BYTES = 30, 3_000_000  # the limits on the displays of one rank in one run: number and total size
DISPLAY_TEXT_CHARACTERS = 4_000  # a display's text is cut off after this many characters; the log has the whole text
VALUE_CHARACTERS = 200  # the repr of a value is cut off after this many characters

Tell = Callable[[Told], None]
_tell: Tell | None = None
_step: int | None = None  # the step of metrics that are reported without a step
_stops_on_nan = False
_epoch: int | None = None  # the epoch that Keras' fit is in, counted from 1


def connect(tell: Tell) -> None:
    """Send all later reports with `tell(message)`. Each rank calls this function once."""
    global _tell
    _tell = tell


def connected() -> bool:
    """Return whether there is a driver that receives the reports."""
    return _tell is not None


def tell(message: Told) -> None:
    """Send a report to the driver. Without a driver, do nothing.

    Raises NotFiniteError after the report of a metric that is NaN or infinite, if the run stops on NaN.
    """
    if _tell is not None:
        _tell(message)
    if _stops_on_nan and isinstance(message, Metrics):
        check_finite(message)


def stop_on_nan(wanted: bool) -> None:
    """Set whether check_finite() raises an error from now on."""
    global _stops_on_nan
    _stops_on_nan = wanted


def stops_at(logs: Any) -> bool:
    """Return whether the run must stop because of a value in Keras' `logs`."""
    return _stops_on_nan and not all(map(math.isfinite, numbers(logs).values()))


def check_finite(report: Metrics) -> None:
    """If the run stops on NaN, raise NotFiniteError if one of the metrics is NaN or infinite."""
    name = next((name for name, value in report.values.items() if not math.isfinite(value)), None)
    if name is None or not _stops_on_nan:
        return
    places = ((noun, number) for noun, number in (("epoch", report.epoch), ("step", report.step)) if number is not None)
    at = ", ".join(f"{noun} {number:,}" for noun, number in places)
    what = "NaN" if math.isnan(report.values[name]) else "infinite"
    raise NotFiniteError(
        f"{name} is {what} on rank {world.world().rank}{f' at {at}' if at else ''}: --stop-on nan ends the run here."
    )


@contextlib.contextmanager
def at_step(step: int) -> Iterator[None]:
    """In this block, give the metrics that are reported without a step or an epoch this step."""
    global _step
    _step = step
    try:
        yield
    finally:
        _step = None


def in_epoch(epoch: int | None) -> None:
    """Note the epoch that Keras' fit is in, counted from 1; None if no fit is running."""
    global _epoch
    _epoch = epoch


def log(
    values: Mapping[str, Any] | None = None,
    /,
    *,
    step: int | None = None,
    epoch: int | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    **metrics: Any,
) -> None:
    """Report metrics of this rank: `log(step=3, loss=0.25)`, or `log({"train/loss": 0.25}, step=3)`.

    Values are numbers or objects with a single number (a 0-d array or tensor). For the progress bar, `steps` is the
    number of steps in an epoch, and `epochs` is the number of epochs. If both are missing, the progress is known if the
    cell's own outermost loop counts over a `range(…)`, or enumerates a DataLoader, perhaps with tqdm. `step` can be
    counted within the epoch or over all epochs. In callbacks of Keras' fit, `epoch` can be counted from 0, as Keras
    does, or from 1. Raises TypeError for any other value.
    """
    if not isinstance(values, Mapping | None):
        raise TypeError(f"log() takes metrics as a dict or as keyword arguments, not {short_repr(values)}.")
    checked = {str(name): _number(name, value) for name, value in {**(values or {}), **metrics}.items()}
    if _tell is not None:
        step = _step if step is None and epoch is None else step
        number = _count(epoch)
        if number is not None and number + 1 == _epoch:
            number = _epoch  # the user counts epochs from 0, but sparkring's reports for Keras count them from 1
        iterations = loops.completed(sys._getframe(1)) if steps is None and epochs is None else None
        tell(Metrics(checked, _count(step), number, _count(steps), _count(epochs), iterations=iterations))


def numbers(logs: Any) -> dict[str, float]:
    """Return the values in Keras' `logs` that are single numbers. Tables and `best=` need numbers."""
    values = {}
    for name, value in (logs or {}).items():
        with contextlib.suppress(TypeError, ValueError):
            values[name] = float(value)
    return values


def log_to_driver(message: object) -> None:
    """Show a message in the notebook, even if `--logs` hides output. The message is cut off after 4,000 characters."""
    text = str(message)[:MESSAGE_CHARACTERS]
    if _tell is None:
        print(text)
    else:
        _tell(UserMessage(text))


def short_repr(value: object, most: int = VALUE_CHARACTERS) -> str:
    """Return a value's repr, cut to `most` characters; '' for None. If the repr raises an error, the text says so.

    For a pandas or polars object, the text gives the type and the shape: `DataFrame [97 rows × 4 columns]`.
    """
    if value is None:
        return ""
    try:
        if type(value).__module__.partition(".")[0] in ("pandas", "polars") and hasattr(value, "shape"):
            return f"{type(value).__name__} [{' × '.join(map(_extent, value.shape, ('row', 'column')))}]"
        import reprlib

        short = reprlib.Repr()
        short.maxother = short.maxstring = most
        text = " ".join(short.repr(value).split())
    except Exception as error:  # the user's own `__repr__` may raise anything
        return f"<{type(value).__name__}; its repr raised {type(error).__name__}>"
    return text if len(text) <= most else text[: most - 1] + "…"


def _extent(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, Real):
        return float(value)
    detach = getattr(value, "detach", None)
    try:
        # float() accepts arrays and tensors with a single number, and refuses larger ones. detach() avoids torch's
        # warning about a tensor that requires a gradient.
        return float(value if detach is None else detach())
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"log({name}=…): {type(value).__name__} is not a number; reduce it first, for example with .mean()"
        ) from error
