"""An exception as the driver is told of it: what its type says of another attempt, and whose echo it may be."""

from __future__ import annotations

import pytest

from sparkring import errors
from sparkring.worker.failures import as_failure


class HorovodInternalError(RuntimeError):
    """Told by its name, as Horovod's own is."""


class OwnTypeError(TypeError):
    """A class of the user's."""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OwnTypeError(), "code"),
        (ModuleNotFoundError(), "code"),
        (UnboundLocalError(), "code"),
        (errors.OptionsError(), "code"),
        (errors.CheckpointError(), "code"),
        (errors.CheckpointStorageError(), ""),
        (errors.CheckpointDamagedError(), "damaged"),
        (ValueError("TypeError: no"), ""),
        (OSError(), ""),
    ],
)
def test_what_the_type_says(error, cause):
    """Base classes count, the text does not."""
    assert as_failure(error)["cause"] == cause


def test_what_a_handler_raises_is_an_echo():
    """A TypeError raised while a broken collective was being handled came from another rank's end."""

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

    assert as_failure(handled(hidden=False))["follows"] is True
    assert as_failure(handled(hidden=True))["follows"] is False
    assert as_failure(handled(hidden=True))["error"].endswith("OwnTypeError")
