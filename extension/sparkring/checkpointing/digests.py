"""Computes files' digests, such as `xxh3_128:…`. They detect incomplete and changed files, but are not signatures."""

from __future__ import annotations

from typing import Any

from sparkring.errors import CheckpointError

ALGORITHM = "xxh3_128"


class Digest:
    """A digest that is computed piece by piece; `size_bytes` is the size of all pieces."""

    def __init__(self) -> None:
        try:
            import xxhash
        except ImportError as error:
            raise CheckpointError(
                "checkpoints need the package xxhash where the ranks run: run `pip install xxhash` there (on a "
                "cluster: on every node)."
            ) from error
        self._hasher = xxhash.xxh3_128()
        self.size_bytes = 0

    def add(self, piece: Any) -> None:
        """Add `piece`, bytes or a buffer of bytes. While a large piece is added, other threads can run."""
        self._hasher.update(piece)
        self.size_bytes += len(piece)

    def __str__(self) -> str:
        return f"{ALGORITHM}:{self._hasher.hexdigest()}"


def digest_of(data: bytes) -> str:
    """Return the digest of `data`."""
    digest = Digest()
    digest.add(data)
    return str(digest)
