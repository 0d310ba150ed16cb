"""The file in which a rank's framework records its timeline.

The member, not the rank, chooses the file, sends it to the driver and removes it. So the file is sent and removed even
if the rank has crashed.
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
    """A file in a new temporary folder. This folder is made in `folder`, or in the system's folder if that is ''.

    The file is sent to the driver only if `wanted`.
    """

    def __init__(self, folder: str, *, wanted: bool) -> None:
        import tempfile  # not at the top, since most members do not need it

        self.folder = tempfile.mkdtemp(prefix=prefix(os.getpid()), dir=folder or None)
        self.path = os.path.join(self.folder, NAME)
        self.wanted = wanted

    def pieces(self) -> Iterator[TimelinePart]:
        """Yield the file's contents as messages. Together, they are one compressed stream.

        The stream is empty if there is no file. Yield no messages at all if the file is not `wanted`.
        """
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
            pass  # the framework wrote no file, or the disk failed; in this case, what could be read is sent
        yield TimelinePart(packer.flush(), last=True, cut=rest)

    def remove(self) -> None:
        import shutil

        shutil.rmtree(self.folder, ignore_errors=True)


def prefix(member: int) -> str:
    """Return how the name of a member's temporary folder begins; the rest of the name is random.

    `member` is the member's process id.
    """
    return f"sparkring-timeline-{member}-"


def remove_left(member: int) -> None:
    """Remove the temporary folder of a member that was killed, and so could not remove the folder itself.

    `member` is the process id that the member had on this machine.
    """
    import glob
    import shutil
    import tempfile

    for folder in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{prefix(member)}*")):
        shutil.rmtree(folder, ignore_errors=True)
