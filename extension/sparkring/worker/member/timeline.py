"""The file in which a rank's framework records its timeline.

The member, not the rank, sends the file to the driver and removes it, so this happens even if the rank has crashed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from sparkring.wire.messages import TimelinePart

READ_BYTES = 1 << 20
MOST_BYTES = 256 << 20  # at most this much of the file is sent, which is more than a trace viewer can open
MOST_SENT = 64 << 20  # reading stops once this many compressed bytes have been sent
NAME = "timeline.json"


class TimelineFile:
    """A file in a new temporary folder below `folder`, or below the system's temporary folder if `folder` is ''.

    The file is sent to the driver only if `wanted`.
    """

    def __init__(self, folder: str, *, wanted: bool) -> None:
        import tempfile  # not at the top, since most members do not need it

        self.folder = tempfile.mkdtemp(prefix=prefix(os.getpid()), dir=folder or None)
        self.path = os.path.join(self.folder, NAME)
        self.wanted = wanted

    def pieces(self) -> Iterator[TimelinePart]:
        """Yield the file's contents as messages that form one compressed stream; no messages if it is not `wanted`."""
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
            pass  # the framework wrote no file, or the disk failed: send what could be read
        yield TimelinePart(packer.flush(), last=True, cut=rest)

    def remove(self) -> None:
        import shutil

        shutil.rmtree(self.folder, ignore_errors=True)


def prefix(member: int) -> str:
    """Return the beginning of the name of a member's temporary folder. `member` is the member's process id."""
    return f"sparkring-timeline-{member}-"


def remove_left(member: int) -> None:
    """Remove the temporary folder that a killed member has left. `member` is the process id that the member had."""
    import glob
    import shutil
    import tempfile

    for folder in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{prefix(member)}*")):
        shutil.rmtree(folder, ignore_errors=True)
