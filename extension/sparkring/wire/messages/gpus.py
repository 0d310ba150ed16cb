"""What has gone wrong with a GPU, and which processes hold its memory."""

from typing import NamedTuple

from sparkring.wire.messages.fields import Count, GpuFaultKind, GpuHolderKind


class GpuHolder(NamedTuple):
    """A process that holds memory of a GPU. `name` is the name of its program, '' if it is not known.

    `used_bytes` is None if the driver of the GPU does not say it. The member and the rank do not know the `kind`: the
    notebook sets it. `rank` is the rank's number if the kind is "rank".
    """

    pid: Count
    name: str
    used_bytes: Count | None
    kind: GpuHolderKind = "other"
    rank: Count | None = None


class GpuFault(NamedTuple):
    """What has gone wrong with a GPU, as far as a rank's failure shows it.

    `address` and `name` are those of the GPU, '' if it is not known which GPU it was. If memory ran out, `wanted_bytes`
    is the size of the allocation that failed; the GPU has `total_bytes`, of which `used_bytes` were in use, by the
    `holders`. `xid` is the number of the error that NVIDIA's driver has reported. `detail` is a sentence about the
    collective that did not end. Unknown numbers are None.
    """

    kind: GpuFaultKind
    address: str = ""
    name: str = ""
    wanted_bytes: Count | None = None
    used_bytes: Count | None = None
    total_bytes: Count | None = None
    holders: tuple[GpuHolder, ...] = ()
    xid: Count | None = None
    detail: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the process can no longer use CUDA after this fault."""
        return self.kind in ("assert", "illegal access", "launch failure", "hardware", "lost")


class GpuTrouble(NamedTuple):
    """A GPU of the member's rank has reported the error `xid`, or is lost, which means that it no longer answers."""

    address: str
    name: str
    xid: Count | None = None
    lost: bool = False
