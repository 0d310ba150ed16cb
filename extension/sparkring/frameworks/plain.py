"""No framework: a rank gets its place in the environment, and nothing else."""

from __future__ import annotations

from types import TracebackType

from sparkring.frameworks.base import Seat
from sparkring.place import World


class Plain:
    """Ranks that talk to nobody, or arrange it among themselves."""

    name = "plain"

    def __init__(self, host: str, seats: list[Seat]) -> None:
        pass

    def environment(self, world: World, seat: Seat) -> dict[str, str]:
        return {"SPARKRING_RANK": str(world.rank), "SPARKRING_SIZE": str(world.size)}

    def __enter__(self) -> Plain:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
