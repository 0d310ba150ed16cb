"""Spark's own barrier stage: ranks meet through its task context, and rank i has partition i."""

from __future__ import annotations

from sparkring.frameworks.plain import Plain


class Barrier(Plain):
    """Ranks that are the tasks of one barrier stage, in the order of its partitions."""

    by_node = False
