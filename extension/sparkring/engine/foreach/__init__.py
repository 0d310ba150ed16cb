"""Independent runs: a function or a cell for each item, several at once, on a pool of ranks.

items ─▶ schedule   which item runs next, and what follows when an attempt has ended: no processes, no clock
            │
         pool ───── slot, slot, …   each has a gang at a time, which runs one item after another
            │
         result
"""
