"""Independent runs: a pool of ranks runs a function or a cell for each item, several items at once.

items ─▶ schedule   decides which item runs next, and what follows an attempt; uses no processes and no clock
            │
         pool ───── slot, slot, …   each slot has one gang at a time, which runs one item after another
            │
         result
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkring.products import offer

if TYPE_CHECKING:
    from sparkring.engine.foreach.api import foreach as foreach
    from sparkring.engine.foreach.plan import Plan as Plan
    from sparkring.engine.foreach.result import ForeachResult as ForeachResult

offer(
    __name__,
    {
        "engine.foreach.api": "foreach",
        "engine.foreach.plan": "Plan",
        "engine.foreach.result": "ForeachResult",
    },
    "foreach",
)
