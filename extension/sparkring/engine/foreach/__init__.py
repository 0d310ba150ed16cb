"""Independent runs: a pool of ranks runs a function or a cell for each item, several items at once.

items ─▶ schedule   decides which item runs next, and what follows an attempt; uses no processes and no clock
            │
         pool ───── slot, slot, …   each slot has one gang at a time, which runs one item after another
            │
         result
"""
