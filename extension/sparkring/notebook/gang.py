"""`%gang`, which starts, shows and stops warm gangs, and `%slots`, which shows where ranks can run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from IPython.core.getipython import get_ipython

from sparkring.engine.run.options import GangOptions
from sparkring.errors import OptionsError
from sparkring.notebook.cell_options import rows_of
from sparkring.notebook.magic import Magic
from sparkring.notebook.options_table import OptionsTable, split_line
from sparkring.runtime.kernel import tell

if TYPE_CHECKING:
    from sparkring.engine.run.warm_gang import WarmGang

_HELP = """Start, list and stop warm gangs: ranks that stay up between cells.

    %gang start -n -4       start four processes here; -n 4 starts four Spark tasks, which keep their slots
    %gang                   list the gangs
    %gang --stacks          show the stack of each rank
    %gang stop              stop all gangs; `stop local` or `stop spark` stops only that gang

Cells without -n, or with the same -n, then run on the gang, and start within milliseconds. Variables stay on the
ranks. A later cell uses the value that a name has on the ranks, unless the notebook has since assigned to the name.
--push NAME always sends the notebook's value, and --pull NAME copies rank 0's value into the notebook. %%ranks runs a
cell on some of the ranks. The notebook's Stop ends the cell, and keeps the gang if all ranks respond. If a rank dies,
the gang ends.

Options of `%gang start`:
{options}
"""
_SLOTS_HELP = "Show where ranks can run: the machine's cores and GPUs, and Spark's task slots, with what occupies them."

_START = OptionsTable("%gang start", *rows_of(GangOptions, "np framework idle_s env env_pack gpus"))
# Starting a gang adds this name to the notebook's namespace, and %reset deletes it. So if the name is missing while a
# gang is up, the user has run %reset.
_MARK = "_sparkring_gang"


class GangRequest(NamedTuple):
    """What the user asks `%gang` to do: `start` a gang, `stop` gangs, `show` the gangs, or show the `stacks` of ranks.

    `where` is the name of the place whose gang to stop, such as "local" or "spark"; '' stops all gangs.
    """

    action: Literal["start", "stop", "show", "stacks"]
    start: GangOptions | None = None
    where: str = ""


def parse(line: str) -> GangRequest:
    """Return what a `%gang` line asks for. Raise OptionsError if the line is not valid."""
    from sparkring.launchers import PLACES

    words = split_line("%gang", line)
    match words:
        case ["start", *rest]:
            return GangRequest("start", _gang_options(rest))
        case ["stop"]:
            return GangRequest("stop")
        case ["stop", where] if where in PLACES:
            return GangRequest("stop", where=where)
        case ["--stacks"]:
            return GangRequest("stacks")
        case []:
            return GangRequest("show")
    raise OptionsError(
        f"%gang does not take {line.strip()!r}: use `%gang start -n -4`, `%gang`, `%gang --stacks` or `%gang stop` "
        "(also `stop local`, `stop spark`)."
    )


def _gang_options(words: list[str]) -> GangOptions:
    options = GangOptions(**_START.parse_words(words))
    if not options.np:
        raise OptionsError("%gang start needs a number of ranks: -n -4 for processes here, -n 4 for Spark tasks.")
    return options


def complete(line: str) -> list[str]:
    """Return what Tab offers at the end of a `%gang` line."""
    from sparkring.launchers import PLACES

    words = line.split()
    current = "" if line[-1:].isspace() or not words else words.pop()
    match words:
        case ["start", *_]:
            return _START.complete(line.partition("start")[2])
        case ["stop"]:
            return [place for place in PLACES if place.startswith(current)]
        case []:
            return [word for word in ("start", "stop", "--stacks") if word.startswith(current)]
    return []


def _gang(shell: Any, line: str) -> None:
    from sparkring.engine.run import gang_selection, warm_gang
    from sparkring.history import describe
    from sparkring.views.tables import show_table

    request = parse(line)
    if request.start is not None:
        _start(shell, request.start)
    elif request.action == "stop":
        for gang in warm_gang.stop(request.where):
            print(f"{gang.describe()}: {'had already ended' if gang.lost else 'stopped'}")
    elif request.action == "stacks":
        stacks = gang_selection.latest_gang_alive("%gang --stacks").stacks()
        show_table(describe.STACK_HEADERS, describe.stacks_table(stacks), empty="")
    else:
        headers = ("gang", "-n", "framework", "state", "up", "cells", "hosts")
        rows = [_row(gang) for gang in warm_gang.every()]
        show_table(headers, rows, empty="no gang is up; `%gang start -n -4` starts one")


def _start(shell: Any, options: GangOptions) -> None:
    from sparkring.engine.run import warm_gang
    from sparkring.history import describe

    started = time.monotonic()
    gang = warm_gang.start(options, tell, tell)
    shell.events.register("post_run_cell", stop_after_reset)
    shell.user_ns[_MARK] = True
    print(f"{gang.describe()}: started in {describe.duration(time.monotonic() - started)}; `%gang stop` stops it")


def _row(gang: WarmGang) -> tuple[str, ...]:
    """Return the row that describes a gang in the table of `%gang`."""
    from sparkring.history import describe

    now = time.time()
    state = gang.ended or ("busy" if gang.busy else f"idle for {describe.duration(int(now - gang.used))}")
    up = describe.duration(int(now - gang.started))
    hosts = ", ".join(sorted({world.node for world in gang.gang.worlds}))
    return gang.describe(), str(gang.wanted.np), gang.wanted.framework, state, up, str(gang.cells), hosts


def stop_after_reset(result: Any) -> None:
    """Stop the gangs if a %reset has just run, so that the ranks' variables are deleted, too."""
    from sparkring.engine.run import warm_gang

    shell = get_ipython()
    if warm_gang.every() and shell is not None and _MARK not in shell.user_ns:
        warm_gang.stop()


def _slots(shell: Any, line: str) -> None:
    from sparkring.launchers import slots_table
    from sparkring.views.tables import show_table

    show_table(("where", "slots", "busy", "details"), slots_table(), empty="")


MAGICS = (
    Magic("gang", "line", _HELP.format(options=_START.help()), _gang, complete),
    Magic("slots", "line", _SLOTS_HELP, _slots),
)
