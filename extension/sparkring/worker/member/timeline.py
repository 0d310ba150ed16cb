"""The file in which a rank's framework records its timeline: its path, and how it is sent to the driver.

The file belongs to the member, which sends and removes it however the rank has ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from sparkring.wire.messages import TimelinePart

READ_BYTES = 1 << 20
MOST_BYTES = 256 << 20  # more than a trace viewer can open
MOST_SENT = 64 << 20  # the limit after compression
NAME = "timeline.json"


class TimelineFile:
    """A file in a temporary folder of its own, below `folder` if that is not ''. It is sent only if `wanted`."""

    def __init__(self, folder: str, *, wanted: bool) -> None:
        import tempfile  # here, since most members do not need it

        self.folder = tempfile.mkdtemp(prefix=prefix(os.getpid()), dir=folder or None)
        self.path = os.path.join(self.folder, NAME)
        self.wanted = wanted

    def pieces(self) -> Iterator[TimelinePart]:
        """The file's contents as messages: one compressed stream, which is empty if there is no file."""
        if not self.wanted:
            return
        import zlib

        packer, sent, read, rest = zlib.compressobj(1), 0, 0, 0
        try:
            with open(self.path, "rb") as file:
                while data := file.read(READ_BYTES):
                    if read >= MOST_BYTES or sent >= MOST_SENT:
                        rest = os.fstat(file.fileno()).st_size - read
                        break
                    read += len(data)
                    packed = packer.compress(data)
                    if packed:
                        sent += len(packed)
                        yield TimelinePart(packed)
        except OSError:
            pass  # the framework wrote no file, or the disk failed: what could be read is sent
        yield TimelinePart(packer.flush(), last=True, cut=rest)

    def remove(self) -> None:
        import shutil

        shutil.rmtree(self.folder, ignore_errors=True)


def prefix(member: int) -> str:
    """How the name of a member's folder begins; `member` is its process id. The rest of the name is random."""
    return f"sparkring-timeline-{member}-"


def remove_left(member: int) -> None:
    """Remove the folder that a member on this machine left behind because it was killed."""
    import glob
    import shutil
    import tempfile

    for folder in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{prefix(member)}*")):
        shutil.rmtree(folder, ignore_errors=True)
