"""`%doctor`, which checks whether launches from this notebook will work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparkring.errors import OptionsError
from sparkring.notebook.magic import Magic
from sparkring.notebook.options_table import Option, OptionsTable
from sparkring.notebook.sources import suggest_checkpoint_directories, value_of

if TYPE_CHECKING:
    from sparkring.history.findings import Finding, Section
    from sparkring.runtime.storage import Location

_HELP = """Check whether launches from this notebook will work, and say what to do if not.

    %doctor
    %doctor dbfs:/ml/run1       also check a directory for checkpoints

%doctor checks this machine (packages, Horovod's build, memory, disks, limits) and starts a rank on it. If there are
NVIDIA GPUs, it checks the driver and each GPU, without using CUDA. If there is a SparkSession, it runs a job on all
free task slots, and compares the executors' Python and packages with the notebook's. It never starts or stops a
session. In a directory for checkpoints, it writes, reads, lists and deletes a small file, on this machine and on the
executors.

    ✓   all is well
    !   you should know about this
    ✗   launches will fail, or will not do what you expect

Options:
{options}
"""


OPTIONS = OptionsTable(
    "%doctor",
    Option(
        "directory",
        nargs="?",
        default="",
        metavar="DIR",
        help="a directory for checkpoints: a path or URL, or a variable that holds one",
        suggest=suggest_checkpoint_directories,
    ),
)


def _doctor(shell: Any, line: str) -> None:
    from sparkring.engine.doctor.examination import examine
    from sparkring.runtime.interrupts import interrupted
    from sparkring.views.findings import show_findings
    from sparkring.views.progress_line import ProgressLine

    source = OPTIONS.parse(line)["directory"]
    sections: list[Section] = []
    stopped = False
    with ProgressLine() as progress:
        try:
            for section in examine(_location(shell, source) if source else None, [_view()], progress.say):
                sections.append(section)
        except KeyboardInterrupt:
            stopped = True
    if sections:
        show_findings(sections)
    if stopped:
        raise interrupted("before all checks were done")


def _location(shell: Any, source: str) -> Callable[[], Location]:
    from sparkring.checkpointing.inventory import directory_of

    return lambda: directory_of(value_of(shell, source), source, "%doctor")


def _view() -> Finding:
    """Return which view of runs this front end gets, and why."""
    from sparkring.history.findings import ok, problem
    from sparkring.views.front_end import choice

    try:
        form, reason = choice()
    except OptionsError as error:
        return problem("view", str(error), "Set the variable to one of these, or unset it.")
    return ok("view", f"{form} ({reason})")


MAGICS = (Magic("doctor", "line", _HELP.format(options=OPTIONS.help()), _doctor, OPTIONS.complete),)
