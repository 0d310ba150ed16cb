"""`%checkpoints`: what lies in a directory of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from sparkring.checkpointing.retention import Mode
from sparkring.errors import OptionsError
from sparkring.notebook.magic import Magic
from sparkring.notebook.options_table import Option, OptionsTable
from sparkring.notebook.sources import suggest_sources, value_of

_HELP = """Show the checkpoints in a directory, and which one a run would go on from.

    %checkpoints dbfs:/ml/run1
    %checkpoints s3://bucket/run1 --metric val_loss     marks the one with the least; --mode max: the greatest
    %checkpoints store --check                          what sparkring.checkpoints(…) gave; reads every byte
    %checkpoints                                        the --checkpoint-dir of the last run that had one

Nothing is changed, and a run may write there meanwhile, from another notebook, too. A checkpoint is committed when
all its files are there with the sizes that its commit names; --check compares what is in them as well. Not committed
is one that is being written, or was when its run ended; a resume passes over it, and over what is damaged, and takes
the committed one that was saved last, which need not have the highest step. Listed below ours is what Keras,
TensorFlow and torch have written there, known by its name: .keras, .h5, .weights.h5, prefixes with .index and .data,
BackupAndRestore's folders, SavedModels, .pt, .pth.

Options:
{options}
"""


def _suggest(current: str) -> Iterable[str]:
    from sparkring.checkpointing.inventory import names_directory

    return suggest_sources(current, names_directory, folders_only=True)


OPTIONS = OptionsTable(
    "%checkpoints",
    Option(
        "source",
        nargs="?",
        default="",
        metavar="DIR",
        help="a path, a URL, or a variable with one or with checkpoints(…); default: the last run's --checkpoint-dir",
        suggest=_suggest,
    ),
    Option("--check", action="store_true", help="read every byte and compare it with what was saved"),
    Option("--metric", default="", metavar="NAME", help="mark the one with the best value of this metric"),
    Option("--mode", choices=get_args(Mode), help="which value is the best: the least (default) or the greatest"),
)


def parse(line: str) -> dict[str, Any]:
    """The options on a `%checkpoints` line. OptionsError says what is wrong with it."""
    given = OPTIONS.parse(line)
    mode = given["mode"]
    if mode and not given["metric"]:
        raise OptionsError(
            f"%checkpoints: --mode {mode} says which value is the best one; of what, says --metric: "
            f"--metric val_loss --mode {mode}."
        )
    return given


def _checkpoints(shell: Any, line: str) -> None:
    from sparkring.checkpointing.inventory import directory_of, inventory
    from sparkring.history import run_store
    from sparkring.views.checkpoints import CheckProgress, show_checkpoints

    given = parse(line)
    source, metric, mode = given["source"], given["metric"], given["mode"]
    value = value_of(shell, source) if source else run_store.last_checkpoint_dir()
    if not metric:  # then what checkpoints(…) was given counts
        metric, mode = getattr(value, "metric", None) or "", getattr(value, "mode", None)
    with CheckProgress() as progress:
        location = directory_of(value, source)
        found = inventory(location, check=given["check"], metric=metric, mode=mode or "min", say=progress.tell)
    show_checkpoints(found)


MAGICS = (Magic("checkpoints", "line", _HELP.format(options=OPTIONS.help()), _checkpoints, OPTIONS.complete),)
