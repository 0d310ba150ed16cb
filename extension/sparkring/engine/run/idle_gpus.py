"""Finds GPUs that a run does not use although its ranks are running."""

from __future__ import annotations

from sparkring.history.record import RunRecord

IDLE_S = 60.0
IDLE_PERCENT = 5  # a GPU that is busy for less than this percentage of the time counts as idle


class IdleGpus:
    """Watches the GPUs of a run's ranks."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, str], float] = {}  # by rank and address
        self._told: set[tuple[int, str]] = set()

    def new(self, record: RunRecord, now: float) -> list[tuple[str, int]]:
        """Return the address and the rank of each GPU that has now been idle for IDLE_S while its rank was running.

        `now` is a time.monotonic() time. A GPU is returned only once. If several ranks use the same GPU, it is returned
        for the first of them.
        """
        idle = {
            (rank.rank, gpu.address): rank.host
            for rank in record.ranks
            if rank.state == "running"
            for gpu in rank.gpus
            if gpu.busy_percent is not None and gpu.busy_percent < IDLE_PERCENT
        }
        self._since = {gpu: self._since.get(gpu, now) for gpu in idle}
        places = {(idle[gpu], gpu[1]) for gpu in idle if gpu in self._told}
        newly_idle = []
        for gpu, since in self._since.items():
            place = (idle[gpu], gpu[1])
            if now - since >= IDLE_S and place not in places:
                places.add(place)
                self._told.add(gpu)
                newly_idle.append((gpu[1], gpu[0]))
        return newly_idle
