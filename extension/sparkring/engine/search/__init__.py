"""A search for the best values of parameters. Optuna chooses the values and decides which trials to prune.

    space    what the user wrote for each parameter ─▶ Optuna's distributions
    search   the arguments of sparkring.search(), checked
    trials   one run of a search: asks Optuna for the next trial, and tells Optuna what the trials have reported
    journal  the file in which Optuna keeps the study, and a copy in the checkpoint directory

Optuna runs on the driver only. Ranks get only the values of the parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkring.products import offer

if TYPE_CHECKING:
    from sparkring.engine.search.search import search as search
    from sparkring.engine.search.space import integer as integer
    from sparkring.engine.search.space import log_uniform as log_uniform
    from sparkring.engine.search.space import uniform as uniform

offer(
    __name__,
    {
        "engine.search.search": "search",
        "engine.search.space": "integer log_uniform uniform",
    },
)
