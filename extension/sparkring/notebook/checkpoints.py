"""`%checkpoints`, which shows the checkpoints in a directory."""

from __future__ import annotations

from typing import Any, get_args

from sparkring.checkpointing.retention import Mode
from sparkring.errors import OptionsError
from sparkring.notebook.magic import Magic
from sparkring.notebook.options_table import Option, OptionsTable
from sparkring.notebook.sources import suggest_checkpoint_directories, value_of

_HELP = """Show the checkpoints in a directory, and the checkpoint from which a run would continue.

    %checkpoints dbfs:/ml/run1
    %checkpoints s3://bucket/run1 --metric val_loss     mark the minimum; with --mode max, mark the maximum
    %checkpoints store --check                          check the directory of sparkring.checkpoints(…)
    %checkpoints                                        show the --checkpoint-dir of the last run that had one

%checkpoints changes nothing in the directory, so you can use it while a run of any notebook is writing there. A
checkpoint is committed when all its files exist and have the sizes recorded in its commit file; --check also checks
their contents. A checkpoint that is not committed is still being written, or the run ended before completing it. A run
continues from the committed checkpoint that was saved last, which need not have the highest step. It skips
checkpoints that are uncommitted or damaged. The table also lists the checkpoints that Keras, TensorFlow and torch have
written to the directory. They are recognised by their names: .keras, .h5, .weights.h5, prefixes with .index and .data,
folders of BackupAndRestore, SavedModels, .pt, .pth.

Options:
{options}
"""


OPTIONS = OptionsTable(
    "%checkpoints",
    Option(
        "source",
        nargs="?",
        default="",
        metavar="DIR",
        help="a path or URL, or a variable that holds a path, a URL or the result of checkpoints(…); default: the last "
        "--checkpoint-dir",
        suggest=suggest_checkpoint_directories,
    ),
    Option("--check", action="store_true", help="read every file and compare its contents with the saved digest"),
    Option("--metric", default="", metavar="NAME", help="mark the checkpoint with the best value of this metric"),
    Option("--mode", choices=get_args(Mode), help="which value is best: the minimum (default) or the maximum"),
)


def parse(line: str) -> dict[str, Any]:
    """Return the options on a `%checkpoints` line. Raise OptionsError if the line is not valid."""
    given = OPTIONS.parse(line)
    mode = given["mode"]
    if mode and not given["metric"]:
        raise OptionsError(f"%checkpoints: --mode {mode} needs a metric: use --metric val_loss --mode {mode}.")
    return given


def _checkpoints(shell: Any, line: str) -> None:
    from sparkring.checkpointing.inventory import directory_of, inventory
    from sparkring.history import run_store
    from sparkring.views.checkpoints import CheckProgress, show_checkpoints

    given = parse(line)
    source, metric, mode = given["source"], given["metric"], given["mode"]
    value = value_of(shell, source) if source else run_store.last_checkpoint_dir()
    if not metric:  # use the metric that the user has passed to checkpoints(…), if `value` is the result of that call
        metric, mode = getattr(value, "metric", None) or "", getattr(value, "mode", None)
    with CheckProgress() as progress:
        location = directory_of(value, source)
        listing = inventory(location, check=given["check"], metric=metric, mode=mode or "min", say=progress.tell)
    show_checkpoints(listing)


MAGICS = (Magic("checkpoints", "line", _HELP.format(options=OPTIONS.help()), _checkpoints, OPTIONS.complete),)
