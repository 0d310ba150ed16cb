"""`%checkpoints`: the checkpoints in a directory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

from sparkring.checkpointing.retention import Mode
from sparkring.errors import OptionsError
from sparkring.history import run_store
from sparkring.notebook.magic import Magic
from sparkring.notebook.options_table import OptionsTable, option
from sparkring.notebook.sources import suggest_sources, value_of

_HELP = """Show the checkpoints in a directory, and which one a run would continue from.

    %checkpoints dbfs:/ml/run1
    %checkpoints s3://bucket/run1 --metric val_loss     mark the minimum; with --mode max, mark the maximum
    %checkpoints store --check                          check the directory of sparkring.checkpoints(…)
    %checkpoints                                        show the --checkpoint-dir of the last run that had one

Nothing is changed. The directory can be shown while a run writes to it, also from another notebook. A checkpoint is
committed when all its files exist and have the sizes in its commit file; --check also compares their contents. A
checkpoint that is not committed is being written, or its run ended while it was being written. A run continues from
the committed checkpoint that was saved last, which need not have the highest step. It skips checkpoints that are not
committed or are damaged. Below these, the checkpoints that Keras, TensorFlow and torch have written to the directory
are listed. They are recognised by their names: .keras, .h5, .weights.h5, prefixes with .index and .data, folders of
BackupAndRestore, SavedModels, .pt, .pth.

Options:
{options}
"""


def _suggest(current: str) -> Iterable[str]:
    from sparkring.checkpointing.inventory import names_directory

    return suggest_sources(current, names_directory, folders_only=True)


OPTIONS = OptionsTable(
    "%checkpoints",
    option(
        "source",
        nargs="?",
        default="",
        metavar="DIR",
        help="a path, a URL, or a variable that holds one or checkpoints(…); default: the last run's --checkpoint-dir",
        suggest=_suggest,
    ),
    option("--check", action="store_true", help="compare every byte with what was saved"),
    option("--metric", default="", metavar="NAME", help="mark the checkpoint with the best value of this metric"),
    option("--mode", choices=get_args(Mode), help="which value is best: the minimum (default) or the maximum"),
)


@dataclass(frozen=True)
class CheckpointsRequest:
    """What `%checkpoints` is asked for; `source` is a directory or a variable's name, '' the last run's directory.

    `check`: read every byte. `metric` and `mode` say which one is the best; '' and None leave that to the source.
    """

    source: str = ""
    check: bool = False
    metric: str = ""
    mode: Mode | None = None


def parse(line: str) -> CheckpointsRequest:
    """What a `%checkpoints` line asks for. OptionsError says what is wrong with it."""
    request = CheckpointsRequest(**OPTIONS.parse(line))
    if request.mode and not request.metric:
        raise OptionsError(
            f"%checkpoints: --mode {request.mode} needs a metric: use --metric val_loss --mode {request.mode}."
        )
    return request


def _checkpoints(shell: Any, line: str) -> None:
    from sparkring.checkpointing.inventory import directory_of, inventory
    from sparkring.views.checkpoints import CheckProgress, show_checkpoints

    request = parse(line)
    value = value_of(shell, request.source) if request.source else run_store.last_checkpoint_dir()
    location = directory_of(value, request.source)
    metric = request.metric or getattr(value, "metric", None) or ""
    mode = request.mode or (getattr(value, "mode", None) if not request.metric else None) or "min"
    with CheckProgress() as progress:
        found = inventory(location, check=request.check, metric=metric, mode=mode, say=progress.tell)
    show_checkpoints(found)


MAGICS = (Magic("checkpoints", "line", _HELP.format(options=OPTIONS.help()), _checkpoints, OPTIONS.complete),)
