"""No framework: only the rank and the size are set in the environment."""

from __future__ import annotations

from sparkring.frameworks.base import Framework, Start
from sparkring.runtime.world import World


class Plain(Framework):
    """Ranks that are not connected, or that connect themselves."""

    def environment(self, world: World, start: Start) -> dict[str, str]:
        return {"SPARKRING_RANK": str(world.rank), "SPARKRING_SIZE": str(world.size)}
