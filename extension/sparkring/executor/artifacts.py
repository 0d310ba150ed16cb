"""Values that Spark Connect has sent to the executors as files."""

from __future__ import annotations

import pickle
from typing import Any


class Artifact:
    """A pickled value in the file `name`, which is among the files of the session that SparkFiles finds in a task."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def path(self) -> str:
        """The file's path where the task runs."""
        from pyspark import SparkFiles

        return str(SparkFiles.get(self._name))

    @property
    def value(self) -> Any:
        """The value, which is read from the file."""
        with open(self.path, "rb") as file:
            return pickle.load(file)
