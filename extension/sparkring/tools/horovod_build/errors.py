"""The error of sparkring-build-horovod."""

from __future__ import annotations

from sparkring.errors import SparkringError

AGAIN = "then run this command again."


class BuildError(SparkringError):
    """Horovod cannot be built or does not load; the message says what to do next."""
