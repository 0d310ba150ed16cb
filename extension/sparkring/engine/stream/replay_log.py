"""The micro-batches that Spark considers done, although no checkpoint contains their effect yet.

    <checkpoint directory>/_stream-<lineage>/
        spark/          Spark's own checkpoint of the query
        batches/        for each such micro-batch, <number>.json; and the files with its rows

Spark delivers a micro-batch again only if the foreachBatch function has not returned for it. So before the function
returns for a micro-batch that has not been saved, the batch is written here. A run that continues from the last
checkpoint trains on these batches first, in their order.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any, NamedTuple

from sparkring.data.micro_batches import StoredRows
from sparkring.errors import CheckpointError
from sparkring.runtime.storage import Location


class Logged(NamedTuple):
    """A micro-batch in the log. `rows` is None if it had no rows."""

    batch_id: int
    position: str
    rows: StoredRows | None


class ReplayLog:
    """The log in `folder`, which need not exist."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder

    def add(self, batch_id: int, position: str, rows: StoredRows | None) -> None:
        """Add a micro-batch. Raises CheckpointError if it cannot be written."""
        content: dict[str, Any] = {"position": position}
        if rows is not None:
            content |= rows.described()
        file = self.folder / f"{batch_id}.json"
        try:
            file.fs.makedirs(self.folder.path, exist_ok=True)
            with file.fs.open(f"{file.path}.part", "wb") as opened:
                opened.write(json.dumps(content).encode())
            file.fs.mv(f"{file.path}.part", file.path)
        except OSError as error:
            raise CheckpointError(
                f"batch {batch_id} could not be written to {self.folder.written}: {error.strerror or error}. The "
                "stream ends, so that the batch is not lost: free up space, and run the cell again."
            ) from error

    def after(self, batch_id: int) -> list[Logged]:
        """Return the micro-batches that follow `batch_id`, without a gap.

        Raises CheckpointError if one cannot be read.
        """
        batches: list[Logged] = []
        there = {int(name.removesuffix(".json")) for name in self._names() if re.fullmatch(r"\d+\.json", name)}
        while (number := batch_id + 1 + len(batches)) in there:
            file = self.folder / f"{number}.json"
            try:
                with file.fs.open(file.path, "rb") as opened:
                    content = json.loads(opened.read())
                rows = StoredRows.from_described(content, self.folder) if "pieces" in content else None
                batches.append(Logged(number, content["position"], rows))
            except (OSError, ValueError, KeyError) as error:
                raise CheckpointError(f"{file.written} cannot be read: {error}. Start over with --fresh.") from error
        return batches

    def forget(self, saved: int) -> None:
        """Remove the files of micro-batches up to `saved`, which a checkpoint includes."""
        for name in self._names():
            number = re.match(r"\d+", name)
            if number is not None and int(number[0]) <= saved:
                with contextlib.suppress(Exception):  # each of fsspec's packages raises its own errors
                    self.folder.fs.rm_file((self.folder / name).path)

    def _names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [str(name).rpartition("/")[2] for name in self.folder.fs.ls(self.folder.path, detail=False)]
        return []
