"""Options that %%foreach has in common with %%horovod and the other magics that start ranks for a cell."""

from __future__ import annotations

from collections.abc import Sequence

from sparkring.notebook.option_types import assignment, variables
from sparkring.notebook.options_table import Option

PUSH = Option(
    "--push",
    type=variables,
    metavar="NAME,…",
    action="append",
    help="notebook variables to send, even if the cell does not name them",
)
ENV = Option(
    "--env",
    type=assignment,
    metavar="K=V",
    action="append",
    help="an environment variable for the ranks; may be repeated",
)
AUTOLOG = Option(
    "--no-autolog", action="store_false", dest="autolog", help="do not automatically report the metrics of Keras' fit()"
)
NAME = Option("--name", default="", metavar="NAME", help="the name of the run in %runs")
DRY_RUN = Option("--dry-run", action="store_true", help="show what would be sent to the ranks, and start nothing")
QUIET = Option("--quiet", action="store_true", help="show only errors")
NOTIFY = Option(
    "--notify", action="store_true", help="let the browser show a notification if the run ends while you look elsewhere"
)


def flattened(groups: Sequence[tuple[str, ...]] | None) -> tuple[str, ...]:
    """Return the names from all uses of an option that may be repeated. Each name is returned once."""
    return tuple(dict.fromkeys(name for group in groups or () for name in group))
