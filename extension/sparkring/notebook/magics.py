"""IPython's surface and nothing else: parse the line, capture, run, show."""

from __future__ import annotations

import ast
import contextlib
import functools
import glob
import inspect
import os
import re
import shlex
import textwrap
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.core.getipython import get_ipython
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from sparkring.capture.scripts import Script, find_script, is_for_ipython
from sparkring.engine import background, warm_gang
from sparkring.engine.options import Options
from sparkring.errors import CaptureError, OptionsError
from sparkring.frameworks import FRAMEWORKS
from sparkring.history import describe, reading, run_store
from sparkring.notebook import parsers
from sparkring.runtime.kernel import tell
from sparkring.views import show_run
from sparkring.views.tables import show_captured, show_table
from sparkring.worker.rank.expand import expand
from sparkring.worker.rank.shell import LINE_MAGICS

if TYPE_CHECKING:
    from sparkring.data.dataset import Dataset
    from sparkring.runtime.storage import Location

_PATHS_OFFERED = 200
_MARK = "_sparkring_gang"  # in the notebook's namespace as long as it has not been reset

_HELP = """Run the cell on {what}.

    %%{magic} {line}
{example}

The cell is the body of the training function. Names that it reads (here {reads}) are taken from
the notebook when it runs: functions and classes by value, modules by reference. `rank`, `size` and
`local_rank` are there unless the notebook defines them. What the ranks print shows here, tagged by
rank; the first rank to fail ends all, and the error names it and the line of the cell.

Returns a RunResult: .value (rank 0's last expression), .values (by rank), .record, .logs(rank).
It is in `_` afterwards.

With --background the cell returns at once, with a BackgroundRun, and the notebook is free: .result()
waits for the RunResult; .stop() ends the run, as `%runs --stop RUN` does, and the notebook's Stop does not.

Options:
{options}
"""


_GANG_HELP = """Ranks that stay up between cells.

    %gang start -n -4       four processes here; -n 4: four Spark barrier tasks, whose slots are held until it stops
    %gang                   what is up, and since when
    %gang --stacks          where each rank stands
    %gang stop              end it (all; or `stop local`, `stop spark`)

Cells without -n, or with the same, then run on the gang, within milliseconds. What a cell binds stays on
the ranks for the next cell, and is used there unless the notebook has bound the name anew since; --push
NAME sends the notebook's value in any case, --pull NAME brings rank 0's back. %%ranks runs a cell on some
ranks. Stop ends the cell and keeps the gang if its ranks come back; a rank that dies takes the gang down.

Options of `%gang start`:
{options}
"""


_SHARDS_HELP = """Show which rank reads which rows of a data set, before anything is launched.

    %shards /dbfs/data/digits -n 4 --batch-size 256
    %shards "s3://bucket/events/day=*/" -n 8 --columns speed,label --where "speed > 3" --epochs 100
    %shards frame -n 4          a Spark DataFrame of the notebook, which is written to the cache first
    %shards train               what sparkring.shards(…) gave

Only the files' footers are read, and the columns of a filter. Two splits stand side by side: the even one that
sparkring.shards() reads by, in which ranks differ by one row at most and all take as many steps; and Petastorm's,
in which row group i goes to rank i % n, so that a rank may get more than another, or nothing, and the others wait
for it in allreduce. Shown are rows, bytes, files, row groups and steps of each rank, for object stores the GET
requests and their price, and what to change about the files, in numbers.

Options:
{options}
"""


_CHECKPOINTS_HELP = """Show the checkpoints in a directory, and which one a run would go on from.

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


_RUNS_HELP = """List saved runs, newest first, show one, open its metrics in TensorBoard, or stop one in the background.

    %runs                       the last 20; %runs 50 lists more
    %runs RUN                   how it went; for a run in the background, its panel
    %runs RUN --tensorboard     RUN is its name in the list, the beginning or the end of that, or its title
    %runs --stop RUN            ends a run of this notebook that goes on in the background

TensorBoard shows each rank and their mean, by step or epoch and by time. Its files are written into the run's folder,
anew each time. Outside a notebook the command that starts it is printed.

Options:
{options}
"""


TITLE_CHARACTERS = 60
BATCH_SIZE = 32  # where nothing says how large a batch will be

# What a gang can carry from cell to cell; a barrier stage of its own is not among them.
_CARRIED = tuple(name for name, each in FRAMEWORKS.items() if each.by_node)
# The launch magics, by name: the framework whose ranks each starts, and what its help says.
_LAUNCH = {each.lesson.magic: (name, each.lesson) for name, each in FRAMEWORKS.items() if each.lesson is not None}


def _asked_for_help(line: str, text: str | None) -> bool:
    """Print the magic's help if the line asks for it; returns whether it did."""
    asked = parsers.asks_for_help(line)
    if asked:
        print(inspect.cleandoc(text or ""))
    return asked


def _helps(magic: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a magic so that --help prints its help."""

    @functools.wraps(magic)
    def run_or_help(self: SparkringMagics, line: str, *cell: str) -> Any:
        return None if _asked_for_help(line, run_or_help.__doc__) else magic(self, line, *cell)

    return run_or_help


@magics_class
class SparkringMagics(Magics):
    """The magics of sparkring."""

    @cell_magic
    @_helps
    def ranks(self, line: str, cell: str) -> Any:
        """Run the cell on some ranks of the warm gang: `%%ranks 0,2-3`, or `%%ranks all`; options as of %%horovod.

        %gang start -n -4

        %%ranks 0
        print(rank, "of", size, "has", len(x), "rows")

        What earlier cells bound on these ranks is there, and what this one binds stays. The values of the ranks that
        take part are in the result's .values; --pull brings names of the first of them.
        """
        found = self._gang("%%ranks")
        ranks, rest = parsers.parse_ranks(line, found.gang.size)
        return self.launch("ranks", rest, cell, found.wanted.framework, ranks)

    @line_magic
    @_helps
    def gang(self, line: str) -> None:
        wanted = parsers.parse_gang(line, _CARRIED)
        if wanted.start is not None:
            begun = time.monotonic()
            found = warm_gang.start(wanted.start, tell, tell)
            assert self.shell is not None
            self.shell.user_ns[_MARK] = True
            print(f"{found.describe()}: up after {describe.duration(time.monotonic() - begun)}; %gang stop ends it")
        elif wanted.action == "stop":
            for each in warm_gang.stop(wanted.where):
                print(f"{each.describe()}: {'was gone already' if each.lost else 'stopped'}")
        elif wanted.action == "stacks":
            lost = next(
                (each for each in warm_gang.every() if each.ended and each.wanted.np == warm_gang.default_np()), None
            )
            if lost:
                raise OptionsError(f"the {lost.describe()} is gone: {lost.ended}. The next cell starts a fresh one.")
            show_table(describe.STACK_HEADERS, describe.stacks_table(self._gang("%gang --stacks").stacks()), empty="")
        else:
            headers = ("gang", "-n", "framework", "state", "up", "cells", "hosts")
            show_table(headers, [_row(each) for each in warm_gang.every()], empty="no gang is up: %gang start -n -4")

    @line_magic
    @_helps
    def runs(self, line: str) -> None:
        wanted = parsers.parse_runs(line)
        if wanted.tensorboard:
            self._tensorboard(wanted.run)
            return
        if wanted.stop:
            _stop(wanted.run)
            return
        if wanted.run:
            _show(wanted.run)
            return
        rows = []
        mine = {each.run_id for each in background.going()}
        for path in run_store.saved()[: wanted.count]:
            try:
                begun, ended, read = run_store.first(path), run_store.last(path), run_store.data(path)
            except OSError:  # removed meanwhile, to make room
                continue
            took = describe.duration(ended.time - begun.time) if ended else ""
            goes_on = "running" if path.name in mine else "running, or its kernel was killed"
            rows.append(
                (
                    path.name,
                    begun.title,
                    describe.duration(int(time.time() - begun.time)) if path.name in mine else took,
                    f"{begun.size} {begun.where}",
                    reading.named_shortly(read),
                    ended.outcome if ended else goes_on,
                    describe.first_line(ended.message, 100) if ended else "",
                )
            )
        headers = ("run", "cell", "took", "ranks", "data", "outcome", "")
        show_table(headers, rows, empty=f"no runs saved yet (they go to {run_store.home()})")

    @line_magic
    @_helps
    def logs(self, line: str) -> None:
        """Print what a run's ranks wrote: `%logs`, `%logs RUN --rank 1 --tail 20`; RUN as in %runs, else the last."""
        wanted = parsers.parse_logs(line)
        path = _saved_run(wanted.run)
        ranks = range(run_store.first(path).size)
        if wanted.rank is not None and wanted.rank not in ranks:
            raise OptionsError(f"run {path.name} has no rank {wanted.rank}: it had ranks 0 to {len(ranks) - 1}.")
        for rank in ranks if wanted.rank is None else [wanted.rank]:
            text = run_store.log(path, rank)
            if wanted.tail is not None:
                text = "".join(text.splitlines(keepends=True)[-wanted.tail :])
            if wanted.rank is None:
                print(f"── rank {rank} ── {path / run_store.log_name(rank)}")
            print(text, end="" if text.endswith("\n") else "\n")

    @line_magic
    @_helps
    def slots(self, line: str) -> None:
        """Show where ranks can run: this machine's cores, and Spark's task slots and who holds them."""
        from sparkring.launchers import slots_table

        show_table(("where", "slots", "busy", "details"), slots_table(), empty="")

    @line_magic
    @_helps
    def shards(self, line: str) -> None:
        from sparkring.data.epoch_plan import outlook
        from sparkring.views.shards import show_shards

        wanted = parsers.parse_shards(line)
        value = self._variable(wanted.source)
        dataset = _dataset(wanted, value)
        size = wanted.size or abs(warm_gang.default_np() or 1)
        batch_size = wanted.batch_size or getattr(value, "batch_size", None) or BATCH_SIZE
        remainder = wanted.remainder or getattr(value, "remainder", None) or "drop"
        show_shards(outlook(dataset, size, batch_size, remainder=remainder, epochs=wanted.epochs))

    @line_magic
    @_helps
    def checkpoints(self, line: str) -> None:
        from sparkring.checkpointing.inventory import inventory
        from sparkring.views.checkpoints import CheckProgress, show_checkpoints

        wanted = parsers.parse_checkpoints(line)
        value = self._variable(wanted.source) if wanted.source else _last_checkpoint_dir()
        location = _directory(wanted.source, value)
        metric = wanted.metric or getattr(value, "metric", None) or ""
        mode = wanted.mode or (getattr(value, "mode", None) if not wanted.metric else None) or "min"
        with CheckProgress() as progress:
            found = inventory(location, check=wanted.check, metric=metric, mode=mode, say=progress.tell)
        show_checkpoints(found)

    def _tensorboard(self, run: str) -> None:
        """Show a run's metrics in TensorBoard: below the cell in a notebook; elsewhere say how."""
        from sparkring.history.tensorboard import environment, write_event_files
        from sparkring.runtime.kernel import in_notebook

        folder = shlex.quote(str(write_event_files(_saved_run(run))))
        needed = environment()
        if not in_notebook():
            command = needed.pop("TENSORBOARD_BINARY", "tensorboard")
            settings = [f"{name}={shlex.quote(value)}" for name, value in needed.items()]
            print(" ".join([*settings, shlex.quote(command), "--logdir", folder]))
            return
        assert self.shell is not None
        extensions = self.shell.extension_manager
        if extensions is None or "tensorboard" not in extensions.loaded:
            self.shell.run_line_magic("load_ext", "tensorboard")
        before = {name: os.environ.get(name) for name in needed}
        try:
            os.environ.update(needed)
            self.shell.run_line_magic("tensorboard", f"--logdir {folder}")
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def _variable(self, name: str) -> Any:
        """The value of the notebook's variable of that name; if there is none, the name itself."""
        assert self.shell is not None
        return self.shell.user_ns.get(name, name) if name.isidentifier() else name

    def _gang(self, who: str) -> warm_gang.WarmGang:
        """The gang that was started last, alive."""
        np = warm_gang.default_np()
        found = None if np is None else warm_gang.find(np, tell)
        if found is None:
            raise OptionsError(f"{who} needs a gang that is up and free: %gang start -n -4 starts one.")
        return found

    def launch(self, magic: str, line: str, cell: str, framework: str, ranks: tuple[int, ...] = ()) -> Any:
        """Run a cell under a launch magic, or %%ranks, with its line."""
        from sparkring.engine import api
        from sparkring.engine.prepare import capture_cell
        from sparkring.engine.spec import Cell, RunSpec

        np = warm_gang.default_np() or -1
        options = parsers.parse(magic, line, Options(np=np))
        if ranks and options.np != np:
            raise OptionsError(f"%%ranks runs on the gang that was started last, with -n {np}; leave -n out.")
        if ranks and options.survives:
            raise OptionsError("%%ranks runs on a warm gang, whose ranks are not started again: leave restarts out.")
        if ranks and options.background:
            raise OptionsError("%%ranks runs on a warm gang, and --background on ranks of its own: use %%horovod.")
        assert self.shell is not None
        source = _cell_source(self.shell, magic, cell)
        scripts = _scripts(self.shell, source)
        # A DataFrame's partitions come with a stage of their own, ranks that may be lost are started again, a timeline
        # is whole when they have ended, and what goes on in the background leaves the gang free.
        own = options.dry_run or options.data or options.survives or options.timeline or options.background
        gang = None if own else warm_gang.find(options.np, tell)
        if gang and options.gpus is not None and options.gpus != gang.wanted.gpus:
            raise OptionsError(
                f"--gpus {options.gpus}: the ranks of the {gang.describe()} have theirs already. Start it with that: "
                f"%gang stop, then %gang start -n {options.np} --gpus {options.gpus}."
            )
        title = options.name or _title(source) or f"%%{magic} -n {options.np}"
        work = Cell(source, self.shell.user_ns, scripts)
        spec = RunSpec(work, options, framework, title, f"%%{magic} {line}\n{cell}", gang, ranks)
        if options.dry_run:
            show_captured(capture_cell(spec, work).table)
            return None
        return api.start_spec(spec) if options.background else api.run_spec(spec)


def _show(name: str) -> None:
    """Show a run: its live panel if it is running in the background, else its saved view."""
    found = background.find(name)
    if found is not None:
        found.show()
    else:
        show_run(run_store.load(_saved_run(name)))


def _stop(name: str) -> None:
    """Stop a run that goes on in the background; OptionsError if none of that name does."""
    found = background.find(name)
    if found is None:
        going = ", ".join(each.run_id for each in background.going())
        raise OptionsError(
            f"no run called {name!r} goes on in the background of this notebook"
            + (f"; these do: {going}." if going else ", nor does any other.")
        )
    found.stop()
    print(f"{found.run_id}: {describe.closing(found.record, time.time())}")


def _dataset(wanted: parsers.ShardsWanted, value: Any) -> Dataset:
    """The data set that `%shards` is asked about; OptionsError if `value` is nothing that can be one."""
    from sparkring.data.dataset import Dataset, open_dataset

    name, known = wanted.source, getattr(value, "dataset", value)
    if isinstance(known, Dataset):
        if wanted.columns is not None or wanted.where:
            raise OptionsError(f"%shards {name}: its columns and its filter are chosen; leave --columns, --where out.")
        return known
    if hasattr(value, "sparkSession"):
        from sparkring.data.materialise import materialise

        copy = materialise(value, name=name, say=tell)
        found = open_dataset(copy.location.written, wanted.columns, wanted.where or None)
        return replace(found, name=name)
    if value is name and name.isidentifier() and not os.path.exists(name):
        raise OptionsError(f"%shards {name}: there is neither a variable nor a file or folder of that name.")
    if not isinstance(value, str | os.PathLike | list | tuple):
        raise OptionsError(
            f"%shards takes a path, a Spark DataFrame, or what sparkring.shards(…) gave, "
            f"and {name} is {type(value).__name__}."
        )
    return open_dataset(value, wanted.columns, wanted.where or None)


def _saved_run(name: str) -> Path:
    """The folder of the saved run of that name, '' for the newest; OptionsError if there is none."""
    path = run_store.find(name)
    if path is None:
        raise OptionsError(f"no saved run called {name!r}: %runs lists them." if name else "no runs saved yet.")
    return path


def _last_checkpoint_dir() -> str:
    """Where the newest saved run that saved checkpoints put them; OptionsError if none did."""
    directories = (run_store.first(path).checkpoint_dir for path in run_store.saved())
    found = next((each for each in directories if each), "")
    if not found:
        raise OptionsError(
            "no saved run had a --checkpoint-dir: say where to look, as in `%checkpoints dbfs:/ml/run1`."
        )
    return found


def _directory(name: str, value: Any) -> Location:
    """The directory that `%checkpoints` is asked about; OptionsError if `value` is nothing that can be one."""
    from sparkring.runtime.storage import locate

    written = getattr(value, "directory", value)
    if not isinstance(written, str | os.PathLike):
        raise OptionsError(
            f"%checkpoints takes a path, or what sparkring.checkpoints(…) gave, and {name} is {type(value).__name__}."
        )
    if value is name and name.isidentifier() and not os.path.exists(name):
        raise OptionsError(f"%checkpoints {name}: there is neither a variable nor a folder of that name.")
    return locate(written)


def _row(gang: warm_gang.WarmGang) -> tuple[str, ...]:
    """One line of `%gang`."""
    wanted, now = gang.wanted, time.time()
    state = gang.ended or ("busy" if gang.busy else f"idle for {describe.duration(int(now - gang.used))}")
    up = describe.duration(int(now - gang.started))
    hosts = ", ".join(sorted({world.node for world in gang.gang.worlds}))
    return gang.describe(), str(wanted.np), wanted.framework, state, up, str(gang.cells), hosts


def _launch_magic(magics: SparkringMagics, magic: str) -> Callable[[str, str], Any]:
    framework, lesson = _LAUNCH[magic]

    def launch(line: str, cell: str) -> Any:
        return None if _asked_for_help(line, launch.__doc__) else magics.launch(magic, line, cell, framework)

    launch.__doc__ = _HELP.format(
        magic=magic,
        line=lesson.line,
        what=lesson.what,
        reads=lesson.reads,
        example=textwrap.indent(textwrap.dedent(lesson.example).strip(), "    "),
        options=parsers.help_table(parsers.launch_parser(magic)),
    )
    return launch


SparkringMagics.gang.__doc__ = _GANG_HELP.format(options=parsers.help_table(parsers.gang_parser(_CARRIED)))
SparkringMagics.runs.__doc__ = _RUNS_HELP.format(options=parsers.help_table(parsers.runs_parser()))
SparkringMagics.shards.__doc__ = _SHARDS_HELP.format(options=parsers.help_table(parsers.shards_parser()))
SparkringMagics.checkpoints.__doc__ = _CHECKPOINTS_HELP.format(options=parsers.help_table(parsers.checkpoints_parser()))


def load(shell: Any) -> None:
    """Register everything in an IPython shell."""
    from sparkring.compat import sparkdl
    from sparkring.data.petastorm import quiet

    magics = SparkringMagics(shell)
    shell.register_magics(magics)
    for magic in _LAUNCH:
        shell.register_magic_function(_launch_magic(magics, magic), "cell", magic)
    sparkdl.install()
    quiet.silence_when_imported()
    if _complete not in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.append(_complete)
    shell.events.register("post_run_cell", _stop_after_reset)


def unload(shell: Any) -> None:
    """Take the magics away, and end the runs and gangs that they have started."""
    background.stop_all()
    warm_gang.stop()
    with contextlib.suppress(ValueError):
        shell.events.unregister("post_run_cell", _stop_after_reset)
    if _complete in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(_complete)
    for kind, names in (
        ("cell", (*_LAUNCH, "ranks")),
        ("line", ("gang", "runs", "logs", "shards", "checkpoints", "slots")),
    ):
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)


def _stop_after_reset(result: Any) -> None:
    """After each cell: %reset has emptied the notebook's namespace, so the ranks' goes too."""
    shell = get_ipython()
    if warm_gang.every() and shell is not None and _MARK not in shell.user_ns:
        warm_gang.stop()


def _completions(context: CompletionContext) -> dict[str, Any]:
    """Tab on the line of a launch magic: its options, and the values of those that have a fixed set."""
    words: list[str] = []
    found = re.match(r"%%?(\w+)(\s.*)", context.text_until_cursor)
    if found and (found[1] in _LAUNCH or found[1] == "ranks"):
        words = parsers.completions(parsers.launch_parser(found[1]), found[2])
    elif found and found[1] == "runs":
        words = parsers.runs_completions(found[2], [each.run_id for each in background.going()])
    elif found and found[1] == "gang":
        words = parsers.gang_completions(found[2], _CARRIED)
    elif found and found[1] == "shards":
        words = parsers.shards_completions(found[2]) or (
            [] if len(found[2].split()) > 1 else _sources(found[2], _can_be_shown)
        )
    elif found and found[1] == "checkpoints":
        words = parsers.completions(parsers.checkpoints_parser(), found[2])
        if len(f"{found[2]}|".split()) == 1:  # the first word is still to come, or not yet whole
            words += _sources(found[2], _can_hold_checkpoints, folders_only=True)
    return {"completions": [SimpleCompletion(word, type="option") for word in words], "suppress": True}


def _sources(line: str, fits: Callable[[Any], bool], *, folders_only: bool = False) -> list[str]:
    """What `line` may be about to name: the notebook's variables whose value fits, and files and folders."""
    shell = get_ipython()
    current = "" if line[-1:].isspace() else line.split()[-1]
    names = [name for name, value in (shell.user_ns.items() if shell is not None else ()) if fits(value)]
    found = [name for name in names if name.startswith(current or name.lstrip("_"))]
    paths = sorted(glob.glob(f"{glob.escape(current)}*"))[:_PATHS_OFFERED] if current else []
    paths = [f"{path}/" if os.path.isdir(path) else path for path in paths if " " not in path]
    return found + [path for path in paths if path.endswith("/") or not folders_only]


def _can_hold_checkpoints(value: Any) -> bool:
    return isinstance(value, os.PathLike) or type(value).__name__ == "Store"


def _can_be_shown(value: Any) -> bool:
    kind = type(value)
    return isinstance(value, os.PathLike) or hasattr(kind, "sparkSession") or kind.__name__ in ("Shards", "Dataset")


# A matcher and not a hook: Python's keywords and names, which Jedi would add, are no help where an option stands.
_complete: Any = context_matcher(identifier="sparkring", priority=100)(_completions)


# Advice for a statement that is only allowed in a function.
_OUTSIDE = {
    "return": "The cell is already the body of the function, and returns the value of its last expression: write it "
    "without `return`.",
    "yield": "The cell is the body of a function that runs once on each rank. Collect the values in a list, and end "
    "the cell with it.",
}


def _cell_source(shell: Any, magic: str, cell: str) -> str:
    """The cell as Python, its lines numbered as the notebook shows them: the magic's own line is 1."""
    if not cell.strip():
        raise OptionsError(f"the cell is empty: the lines below %%{magic} are what the ranks run.")
    empty = cell[: len(cell) - len(cell.lstrip())].count("\n")  # lines at the top, which IPython drops
    source: str = "\n" * (1 + empty) + shell.transform_cell(cell)
    try:
        tree = ast.parse(source)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler: the ranks show them
            compile(tree, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        line = error.lineno or 2
        text = ("\n" + cell).split("\n")[line - 1 : line]
        shown = f"\n    {text[0]}\n    {' ' * max(0, (error.offset or 1) - 1)}^" if text else ""
        advice = next((f"\n{what}" for word, what in _OUTSIDE.items() if error.msg.startswith(f"'{word}")), "")
        raise CaptureError(f"cell line {line}: {error.msg} (SyntaxError){shown}{advice}", line=line) from None
    _refuse_magics(tree)
    return source


def _magic_call(node: ast.AST) -> tuple[str, str, str] | None:
    """The call that IPython makes of a magic: the method's name, the magic's name, and the rest of the line."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Name("get_ipython")), attr=kind),
            args=[ast.Constant(str(name)), ast.Constant(str(line)), *_],
        ):
            return kind, name, line
    return None


def _refuse_magics(tree: ast.AST, where: str = "cell") -> None:
    """Magics that need the notebook's own IPython are refused before the launch."""
    for node in ast.walk(tree):
        kind, name, _ = _magic_call(node) or ("", "", "")
        if kind == "run_cell_magic" or (kind == "run_line_magic" and name not in LINE_MAGICS):
            mark = "%" if kind == "run_line_magic" else "%%"
            raise _in_line(
                node,
                where,
                f"{mark}{name} needs the notebook's IPython, which is not there on the ranks. Run it in a cell of its "
                f"own; on ranks there are !commands and {', '.join('%' + known for known in LINE_MAGICS)}.",
            )


def _scripts(shell: Any, source: str) -> tuple[Script, ...]:
    """The scripts that the `%run` lines of a cell name, and those that notebooks among them name."""
    found: dict[str, Script] = {}

    def look_through(tree: ast.AST, where: str = "cell") -> None:
        for node in ast.walk(tree):
            kind, name, line = _magic_call(node) or ("", "", "")
            if (kind, name) != ("run_line_magic", "run") or line in found:
                continue
            try:
                script = find_script(line, lambda text: expand(text, shell.user_ns), shell.transform_cell)
            except OptionsError as error:
                raise _in_line(node, where, f"{f'%run {line}'.strip()}: {error}.") from None
            found[line] = script
            for part, code in script.parts if is_for_ipython(script.path) else ():
                inner = ast.parse(code)
                _refuse_magics(inner, part)
                look_through(inner, part)

    look_through(ast.parse(source))
    return tuple(found.values())


def _in_line(node: ast.AST, where: str, message: str) -> CaptureError:
    line = getattr(node, "lineno", 0)
    return CaptureError(f"{where} line {line}: {message}", line=line if where == "cell" else None)


# Calls that do not show what a cell is for.
_SAY_NOTHING = frozenset({"barrier", "display", "init", "init_process_group", "print", "seed", "shutdown"})


def _title(source: str) -> str:
    """A title for a run without a name, or ''.

    It is the comment or docstring at the top of the cell, its call of fit(), its last expression, or the function that
    it defines.
    """
    lines = (line.strip() for line in source.splitlines())
    first = next((line for line in lines if line and not line.startswith(("import ", "from "))), "")
    comment = first.lstrip("#%! ") if first.startswith("#") else ""
    tree = ast.parse(source)
    said = comment or (ast.get_docstring(tree) or "").partition("\n")[0]
    if not said:
        said = next((ast.unparse(node) for node in ast.walk(tree) if _calls(node) == "fit"), "")
    last = tree.body[-1] if tree.body else None
    if not said and isinstance(last, ast.Expr) and _calls(last.value) not in _SAY_NOTHING:
        said = ast.unparse(last.value)
    if not said:
        said = next((node.name for node in tree.body if isinstance(node, ast.FunctionDef)), "")
    return said if len(said) <= TITLE_CHARACTERS else f"{said[: TITLE_CHARACTERS - 1]}…"


def _calls(node: ast.AST) -> str:
    """The name of the function or method in a call."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)):
            return name
    return ""
