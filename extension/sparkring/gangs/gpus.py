"""What is known about the GPUs of a gang's ranks, and which processes use them."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Sequence

from sparkring.gangs.members import Members
from sparkring.gangs.reports import with_gpu_explained
from sparkring.history.events import Event, Failure, GpuHolder, GpuTrouble, GpuUsed

_up: weakref.WeakSet[Members] = weakref.WeakSet()  # those of the notebook's gangs that are up


class GangGpus:
    """The last report on each GPU, since members report only changes, and what has gone wrong with it."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._used: dict[tuple[int, str], GpuUsed] = {}  # by rank and address
        self._troubles: dict[int, list[GpuTrouble]] = {}  # by rank; of this execution, and lost GPUs

    def open(self) -> None:
        """Say that the ranks are up: failures on the GPUs of other gangs may be their doing."""
        _up.add(self._members)

    def close(self) -> None:
        _up.discard(self._members)

    def begin(self, ranks: Sequence[int]) -> list[Event]:
        """Forget the troubles of the execution before, and return what is known of these ranks' GPUs as events."""
        now = time.time()
        for rank in ranks:
            self._troubles[rank] = [trouble for trouble in self._troubles.get(rank, ()) if trouble.lost]
        return [used._replace(time=now) for (rank, _), used in self._used.items() if rank in ranks]

    def note_used(self, used: GpuUsed) -> None:
        self._used[used.rank, used.address] = used

    def note_trouble(self, rank: int, trouble: GpuTrouble) -> None:
        self._troubles.setdefault(rank, []).append(trouble)

    def explained(self, rank: int, failure: Failure) -> Failure:
        """Return the failure, and with it what went wrong with the rank's GPUs, if anything did."""
        troubles = self._troubles.get(rank, [])
        if failure.gpu is None and not troubles:
            return failure
        return with_gpu_explained(rank, failure, troubles, self._processes_on(self._members.place_of(rank)[1]))

    def _processes_on(self, host: str) -> dict[int, GpuHolder]:
        """Return what is known about the processes on this host that may use GPUs, by pid."""
        holders = {os.getpid(): GpuHolder(os.getpid(), "", None, "notebook")} if host == socket.gethostname() else {}
        for members in list(_up):
            for rank in range(members.size):
                _, place, pid = members.place_of(rank)
                if place == host and members is self._members:
                    holders[pid] = GpuHolder(pid, "", None, "rank", rank)
                elif place == host:
                    holders[pid] = GpuHolder(pid, "", None, "other gang")
        return holders
