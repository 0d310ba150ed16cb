"""`%runs` and `%logs`: list saved and background runs, and show what their ranks printed."""

from __future__ import annotations

import io
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkring.engine.run.option_types import age, count
from sparkring.errors import OptionsError
from sparkring.notebook.magic import Magic
from sparkring.notebook.options_table import Option, OptionsTable

if TYPE_CHECKING:
    from sparkring.history.record import RunRecord

MOST_COMPARED = 8  # runs; views/compare.py has a colour for each
ID_DIGITS = 6  # the number of characters at the end of a run's id; all of them may happen to be digits

_RUNS_HELP = """List saved runs, show a run, open its metrics in TensorBoard, or stop a background run.

    %runs                       list the last 20 runs, newest first; `%runs 50` lists 50
    %runs RUN                   show a run; for a background run, show its panel
    %runs --sort val_loss       sort by a column; the best values of a metric, or the latest runs, come first
    %runs --where "lr < 0.1"    list only some runs: compare columns with values; and, or, not
    %runs RUN RUN …             compare runs: outcome, parameters, metrics, curves, data, options, versions, code
    %runs RUN --tensorboard     open the metrics of a run in TensorBoard
    %runs --stop RUN            stop a background run of this notebook
    %runs --delete RUN          delete a saved run
    %runs --delete-older 30d    delete the runs that began more than 30 days ago (h: hours, d: days, w: weeks)

RUN is the id in the list, the beginning or the end of the whole id, or a name that `--name` has set.

In JupyterLab and Notebook, a click on the head of a column sorts the list, and a click on a row opens the run. Select
runs to compare them. Columns of parameters are the numbers that the cells have read from the notebook, if they differ.

TensorBoard plots the metrics of each rank and their mean over all ranks, against the step or epoch and against time.
Each time you use --tensorboard, sparkring writes TensorBoard's files to the run folder. Outside a notebook, sparkring
prints the command that starts TensorBoard.

Options:
{options}
"""
_LOGS_HELP = """Print what the ranks of a run wrote.

    %logs                           print what all ranks of the last run wrote
    %logs RUN --rank 1 --tail 20    print the last 20 lines that rank 1 of a run wrote

For what RUN can be, see `%runs?`.

Options:
{options}
"""


def _runs_to_stop(current: str) -> Iterator[str]:
    from sparkring.engine.run import background

    return (shlex.quote(run.run_id) for run in background.going())


_RUNS = OptionsTable(
    "%runs",
    Option(
        "run",
        nargs="*",
        metavar="N|RUN",
        help="how many runs to list (default 20), the run to show, or the runs to compare",
    ),
    Option("--sort", default="", metavar="COLUMN", help="sort the list by a column; the best values come first"),
    Option("--reverse", action="store_true", help="reverse the order of the list"),
    Option("--where", default="", metavar="FILTER", help='list only these runs, as in "loss < 0.1 and lr = 0.3"'),
    Option(
        "--tensorboard",
        action="store_true",
        help="show the metrics of RUN in TensorBoard (default: the last run with metrics)",
    ),
    Option(
        "--stop",
        action="store_true",
        help="stop RUN, a background run of this notebook",
        suggest=_runs_to_stop,
        alone=True,
    ),
    Option("--delete", action="store_true", help="delete the folder of RUN, unless RUN may be in progress", alone=True),
    Option(
        "--delete-older",
        type=age,
        metavar="AGE",
        help="delete the folders of all runs that began longer than AGE ago, as in 30d, 12h or 4w",
        alone=True,
    ),
)
LOGS = OptionsTable(
    "%logs",
    Option("run", nargs="?", default="", metavar="RUN", help="the run; default: the last one"),
    Option("--rank", type=count, metavar="R", help="print only what this rank wrote"),
    Option("--item", type=count, metavar="I", help="print only what was written while item I of %%foreach ran"),
    Option("--tail", type=count, metavar="N", help="print only the last N lines of each rank"),
)


@dataclass(frozen=True)
class RunsRequest:
    """What the user asks `%runs` to do: list the last `count` runs, or show, plot, stop or delete `run`.

    If `others` is not empty, `run` is compared with them. If `older_s` is not None, all runs that began longer ago than
    this number of seconds are deleted.
    """

    count: int = 20
    run: str = ""
    others: tuple[str, ...] = ()
    sort: str = ""
    reverse: bool = False
    where: str = ""
    tensorboard: bool = False
    stop: bool = False
    delete: bool = False
    older_s: float | None = None


def parse_runs(line: str) -> RunsRequest:
    """Return what a `%runs` line asks for. Raise OptionsError if the line is not valid."""
    given = _RUNS.parse(line)
    names, tensorboard, stop = given["run"] or [""], given["tensorboard"], given["stop"]
    run, others = names[0], tuple(names[1:])
    if len(names) > MOST_COMPARED or (others and (tensorboard or stop)):
        raise OptionsError(
            f"%runs takes one run, or 2 to {MOST_COMPARED} runs to compare. Put a title that contains spaces in "
            "quotes: %runs 'first title' 'second title'"
        )
    if stop and (tensorboard or not run):
        raise OptionsError("%runs --stop takes one argument: the id or name of a background run.")
    if given["delete"] and (others or not run):
        raise OptionsError("%runs --delete takes one argument: the id or name of a saved run.")
    if given["delete_older"] is not None:
        if run:
            raise OptionsError("%runs --delete-older takes no run: it deletes all runs of this age, as in 30d.")
        return RunsRequest(older_s=given["delete_older"])
    if given["delete"]:
        return RunsRequest(run=run, delete=True)
    is_count = run.isdecimal() and len(run) < ID_DIGITS and not (others or tensorboard or stop)
    if run.startswith("-") or (is_count and not int(run)):
        raise OptionsError(
            f"%runs takes a number of runs to list or the name of a run, not {run!r}: for example %runs 50"
        )
    order = {name: given[name] for name in ("sort", "reverse", "where")}
    if any(order.values()) and (tensorboard or stop or (run and not is_count)):
        raise OptionsError("%runs takes --sort, --reverse and --where only when it lists runs: name no run.")
    if is_count:
        return RunsRequest(int(run), **order)
    return RunsRequest(run=run, others=others, tensorboard=tensorboard, stop=stop, **order)


def _runs(shell: Any, line: str) -> None:
    from sparkring.engine.run import background
    from sparkring.history import describe, run_store
    from sparkring.views.runs_table import chosen, listed, show_runs

    request = parse_runs(line)
    if request.tensorboard:
        _show_in_tensorboard(shell, request.run)
    elif request.stop:
        run = background.stop(request.run)
        print(f"{run.run_id}: {describe.closing(run.record, time.time())}")
    elif request.older_s is not None:
        _delete_older(request.older_s)
    elif request.delete:
        _delete(request.run)
    elif request.others:
        _compare(request.run, *request.others)
    elif request.run:
        _show(request.run)
    else:
        in_progress = {run.run_id: run.record for run in background.going()}
        is_ordered = request.sort or request.where or request.reverse
        runs = listed(in_progress, None if is_ordered else request.count)
        shown = chosen(runs, request.where, request.sort, reverse=request.reverse) if runs and is_ordered else runs
        empty = "no run passes the filter." if runs else f"no runs saved yet (they go to {run_store.home()})"
        show_runs(shown[: request.count], empty)


def _delete(name: str) -> None:
    from sparkring.engine.run import background
    from sparkring.history import describe, run_store

    run = background.find(name)
    if run is not None:
        raise OptionsError(f"run {run.run_id} is in progress: stop it first, with %runs --stop {run.run_id}")
    path = run_store.find_saved(name)
    if run_store.is_going_on(path):
        raise OptionsError(
            f"run {path.name} may be in progress in another kernel: it has no end, and was written to less than a day "
            f"ago. If its kernel was killed, remove the folder {path} yourself."
        )
    freed = run_store.size_bytes(path)
    if not run_store.remove(path):
        raise OptionsError(f"run {path.name} could not be deleted: check that you may write to {path.parent}.")
    print(f"deleted {path.name} ({describe.size(freed)})")


def _delete_older(than_s: float) -> None:
    from sparkring.history import describe, run_store

    old = [path for path in run_store.saved() if 0 < run_store.first(path).time < time.time() - than_s]
    sizes = {path: run_store.size_bytes(path) for path in old}
    deleted = [path for path in old if run_store.remove(path)]
    print(f"deleted {describe.counted(len(deleted), 'run')} ({describe.size(sum(map(sizes.__getitem__, deleted)))})")
    if len(deleted) < len(old):
        print(f"{describe.counted(len(old) - len(deleted), 'run')} may be in progress, or could not be deleted.")


def _show(name: str) -> None:
    """Show a run: the panel with Stop if it is running in the background, otherwise the saved run."""
    from sparkring.engine.run import background
    from sparkring.history import run_store
    from sparkring.views import show_run

    run = background.find(name)
    if run is not None:
        run.show()
    else:
        show_run(run_store.load(run_store.find_saved(name)))


def _compare(*names: str) -> None:
    """Show runs beside each other."""
    from sparkring.views.compare import show_compared

    show_compared([*map(_record, names)])


def _record(name: str) -> RunRecord:
    """Return the record of a background run of this notebook or of a saved run."""
    from sparkring.engine.run import background
    from sparkring.history import run_store

    run = background.find(name)
    return run_store.load(run_store.find_saved(name)) if run is None else run.record


def _show_in_tensorboard(shell: Any, name: str) -> None:
    """Show a run's metrics in TensorBoard below the cell. Outside a notebook, print the command that shows them."""
    from sparkring.history import run_store
    from sparkring.history.tensorboard import environment_set, last_with_metrics, shell_command, write_event_files
    from sparkring.runtime.kernel import in_notebook

    folder: Path = write_event_files(run_store.find_saved(name) if name else last_with_metrics())
    if not in_notebook():
        print(shell_command(folder))
        return
    extensions = shell.extension_manager
    if extensions is None or "tensorboard" not in extensions.loaded:
        shell.run_line_magic("load_ext", "tensorboard")
    with environment_set():
        shell.run_line_magic("tensorboard", f"--logdir {shlex.quote(str(folder))}")


def _logs(shell: Any, line: str) -> None:
    from sparkring.history import run_store
    from sparkring.runtime.kernel import write

    given = LOGS.parse(line)
    only, item, tail = given["rank"], given["item"], given["tail"]
    if only is not None and item is not None:
        raise OptionsError("%logs takes --rank or --item, but not both.")
    path = run_store.find_saved(given["run"])
    ranks = range(run_store.first(path).size)
    if item is not None:
        text = run_store.item_log(path, item)
        if text is None:
            raise OptionsError(f"run {path.name} has not started an item {item}.")
        write(_in_lines(_last(text, tail)))
        return
    if only is not None and only not in ranks:
        raise OptionsError(f"run {path.name} has no rank {only}: it had ranks 0 to {len(ranks) - 1}.")
    for rank in ranks if only is None else [only]:
        text = run_store.log(path, rank, tail)
        if only is None:
            file = path / run_store.log_name(rank)
            compressed = Path(f"{file}{run_store.COMPRESSED}")
            write(f"── rank {rank} ── {compressed if compressed.exists() else file}\n")
        write(_in_lines(text))


def _last(text: str, lines: int | None) -> str:
    """Return the last `lines` lines of `text`, or all of it if `lines` is None."""
    text_lines = io.StringIO(text).readlines()  # unlike splitlines(), it keeps the states of a progress bar together
    return text if lines is None else "".join(text_lines[max(0, len(text_lines) - lines) :])


def _in_lines(text: str) -> str:
    """Return a log's text in whole lines, without the lines that progress bars have removed."""
    from sparkring.history.record import in_place, is_erased

    lines = in_place(text.encode()).removesuffix(b"\n").split(b"\n") if text else []
    return "".join(f"{line.decode()}\n" for line in lines if not is_erased(line))


MAGICS = (
    Magic("runs", "line", _RUNS_HELP.format(options=_RUNS.help()), _runs, _RUNS.complete),
    Magic("logs", "line", _LOGS_HELP.format(options=LOGS.help()), _logs, LOGS.complete),
)
