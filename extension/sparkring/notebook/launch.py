"""The magics that run their cell on ranks: a magic for each framework, and `%%ranks`."""

from __future__ import annotations

import ast
import collections
import functools
import re
import textwrap
from typing import Any

from sparkring.engine.run.option_types import number_of_ranks
from sparkring.engine.run.options import Options, checked, restarts
from sparkring.errors import OptionsError
from sparkring.frameworks import FRAMEWORKS
from sparkring.notebook.cell_options import FOREIGN, rows_of
from sparkring.notebook.expressions import evaluated, split_options, variables_like
from sparkring.notebook.magic import Magic
from sparkring.notebook.options_table import Option, OptionsTable

_HELP = """Run the cell on {what}.

    %%{magic} {line}
{example}

The cell is the body of the training function. The names that the cell reads (here {reads}) are sent from the
notebook to the ranks: functions and classes by value, modules by reference. Each rank also has `rank`,
`size` and `local_rank`, unless the notebook has variables with these names. The output of the ranks
appears below the cell, labelled by rank. The first rank to fail ends the run, and the error names the
rank and the line of the cell.

The cell returns a RunResult, with .value (of rank 0's last expression), .values (of all ranks), .record
and .logs(rank). Afterwards, `_` is this RunResult.

With --background, the cell returns a BackgroundRun at once, and the notebook is free. Its .result()
waits for the RunResult. Its .stop() and `%runs --stop RUN` end the run; the notebook's Stop does not.

Options:
{options}
"""

_RANKS_HELP = """Run the cell on some ranks of the warm gang: `%%ranks 0,2-3` or `%%ranks all`.

    %gang start -n -4

    %%ranks 0
    print(rank, "of", size, "has", len(x), "rows")

The cell can use the variables of earlier cells on these ranks, and the variables that it sets stay on the ranks. The
result's .values contains the values of these ranks, and --pull copies variables from the first of these ranks into the
notebook. %%ranks takes the options of %%horovod, except those that need new ranks, such as --background and
--checkpoint-dir.
"""

_NAMES = (
    "np timeout_s step_timeout_s push pull env env_pack gpus logs stall_after_s stop_on checkpoint_dir max_restarts"
    " grace_s min_np fresh resume timeline independent profile trace pm autolog name background notify dry_run quiet"
)
_BARRIER_RANKS = Option(
    "-n",
    "--np",
    type=number_of_ranks,
    metavar="N",
    help="number of ranks, each in a Spark task; default: one for each partition of the DataFrame",
)
_BARRIER_DATA = Option(
    "--data",
    metavar="DF",
    suggest=variables_like,
    help="a Spark DataFrame, which may be an expression; each rank gets one partition of it, as `rows`",
)


@functools.cache
def options_table(magic: str) -> OptionsTable:
    """Return the table of the options of a framework's magic, or of %%ranks."""
    ranks, *others = rows_of(Options, _NAMES)
    rows = (_BARRIER_RANKS, *others, _BARRIER_DATA) if magic == "barrier" else (ranks, *others)
    return OptionsTable(f"%%{magic}", *rows, foreign=FOREIGN)


def parse(magic: str, line: str, default_np: int = Options.np) -> Options:
    """Return the Options that the line of a magic asks for. Raise OptionsError if the line is not valid."""
    if magic == "barrier":
        data, line = split_data(line)
    given = options_table(magic).parse(line)
    np = given.get("np")
    if magic == "barrier":
        given["data"] = data
        np = _barrier_np(np, data, default_np)
    given["np"] = default_np if np is None else np
    given["max_restarts"] = restarts(given.get("max_restarts"), given.get("checkpoint_dir"))
    return checked(f"%%{magic}", Options(**given), horovod=magic == "horovod")


def split_data(line: str) -> tuple[str, str]:
    """Return the expression after --data on a line of %%barrier ('' without --data), and the line without both.

    Raise OptionsError if an expression is missing.
    """
    option = re.search(r"(?:^|\s)--data(?:=|(?=\s|$))", line)
    if option is None:
        return "", line
    after = line[option.end() :]
    written = after.strip().partition(" ")[0]
    problem = f"%%barrier: --data needs a DataFrame, such as --data df or --data df.limit(8): {written!r}."
    expression, rest = split_options(after, _expression, problem)
    return expression, f"{line[: option.start()]} {rest}"


def _expression(written: str) -> str | None:
    """Return an expression as it is written; None if it is none, or cannot be a DataFrame."""
    try:
        value = ast.parse(written, mode="eval").body
    except SyntaxError:
        return None
    return None if isinstance(value, ast.Constant | ast.Tuple) else written


def _barrier_np(np: int | None, data: str, default_np: int) -> int | None:
    """Return the number of ranks of %%barrier, or None for the default. Raise OptionsError if the number is not valid.

    `np` is the value of -n, or None without -n. With a DataFrame but without -n, return 0, which means one rank for
    each partition.
    """
    if np is not None and np < 1:
        raise OptionsError(
            f"%%barrier runs in the tasks of a Spark barrier stage, so -n cannot be {np}: use -n {abs(np) or 4}."
        )
    if np is None and not data and default_np < 1:
        raise OptionsError(
            "%%barrier needs a number of ranks (-n 4), or a DataFrame (--data DF) for one rank per partition."
        )
    return 0 if np is None and data else np


def parse_ranks(line: str, size: int) -> tuple[tuple[int, ...], str]:
    """Return the ranks that a `%%ranks` line names, and the rest of the line.

    Raise OptionsError if the line does not begin with ranks, or if a rank does not exist.
    """
    first, _, rest = line.strip().partition(" ")
    ranks: set[int] = set()
    for part in first.split(","):
        low, dash, high = part.partition("-")
        if part == "all":
            ranks |= set(range(size))
        elif low.isdecimal() and (high.isdecimal() if dash else True):
            # For ranks that do not exist, add the number `size`. Since no rank has this number, the check below raises
            # an error that names the existing ranks.
            ranks |= set(range(int(low), min(int(high or low), size) + 1)) or {size}
        else:
            raise OptionsError(f"%%ranks takes the ranks first, as in `%%ranks 0,2-3` or `%%ranks all`, not {first!r}.")
    if not ranks or max(ranks) >= size:
        raise OptionsError(f"%%ranks {first}: the gang has ranks 0 to {size - 1}.")
    return tuple(sorted(ranks)), rest


_titles: collections.Counter[str] = collections.Counter()  # how many runs have had a title that _numbered() was given


def _numbered(title: str) -> str:
    """Return the title of a run without a name, with a number if an earlier run of this session has the same title."""
    _titles[title] += 1
    return title if _titles[title] == 1 else f"{title} ({_titles[title]})"


_told: set[str] = set()  # the variables about which _only_on_ranks() has returned a notice


def _run_on_ranks(shell: Any, line: str, cell: str) -> Any:
    """`%%ranks`: run the cell on some ranks of the gang that was started last."""
    from sparkring.engine.run import gang_selection

    warm = gang_selection.latest_gang("%%ranks")
    ranks, rest = parse_ranks(line, warm.gang.size)
    begins = f"%%ranks {line.split()[0]}"
    return _run_cell(shell, rest, cell, magic="ranks", framework=warm.wanted.framework, ranks=ranks, begins=begins)


def _run_cell(
    shell: Any,
    line: str,
    cell: str,
    *,
    magic: str,
    framework: str,
    ranks: tuple[int, ...] = (),
    begins: str = "",
) -> Any:
    """Run the cell with the options of its line. If `ranks` is not empty, run it on these ranks of the warm gang.

    `line` is what follows the magic, or what follows `begins`: the magic and the ranks as the user has written them.
    """
    from sparkring.engine.run import api, gang_selection
    from sparkring.engine.run.prepare import sent_with
    from sparkring.engine.run.spec import Cell, RunSpec
    from sparkring.notebook.cell import ends_quietly, find_scripts, kept_parameters, python_source, title_of
    from sparkring.views.tables import show_captured

    options = parse(magic, line, gang_selection.default_np())
    if ranks:
        gang_selection.check_ranks_options(options)
    source = python_source(shell, magic, cell)
    scripts = find_scripts(shell, source)
    gang = gang_selection.gang_for(options)
    begins = begins or f"%%{magic}"
    title = options.name or title_of(source) or (begins if ranks else f"{begins} -n {options.np}")
    quiet = ends_quietly(cell)
    work = Cell(f"{source.rstrip()}\nNone\n" if quiet else source, shell.user_ns, scripts)
    frame = None
    if options.data and not options.data.isidentifier():
        frame = evaluated(f"{begins} --data", options.data, compile(options.data, "<--data>", "eval"), shell.user_ns)
    notice = ". ".join(filter(None, [kept_parameters(scripts), _only_on_ranks(shell, source, options, gang)]))
    spec = RunSpec(work, options, framework, title, f"{begins} {line}\n{cell}", gang, ranks, frame=frame, notice=notice)
    if options.dry_run:
        show_captured(sent_with(spec, work, options.place))
        return None
    if not options.name:
        spec = spec._replace(title=_numbered(title))
    if options.background:
        return api.start_spec(spec)
    result = api.run_spec(spec)
    return None if quiet else result


def _only_on_ranks(shell: Any, source: str, options: Options, gang: Any) -> str:
    """Return a notice if the cell assigns to variables of the notebook, for each variable once; otherwise ''.

    On a warm gang, later cells use the values that the ranks have.
    """
    from sparkring.capture.unread_changes import assigned_again
    from sparkring.history import describe

    if gang is not None or options.dry_run:
        return ""
    hidden = getattr(shell, "user_ns_hidden", ())
    values = {name: value for name, value in shell.user_ns.items() if name not in hidden}
    cells = (cell for cell in shell.user_ns.get("In", ()) if not cell.startswith("get_ipython().run_cell_magic"))
    names = [name for name in assigned_again(source, values, cells) if name not in {*options.pull, *_told}]
    _told.update(names)
    return describe.only_on_ranks(names) if names else ""


def _launch_magic(framework: str) -> Magic:
    lesson = FRAMEWORKS[framework].lesson
    assert lesson is not None
    table = options_table(lesson.magic)
    example = textwrap.indent(textwrap.dedent(lesson.example).strip(), "    ")
    help = _HELP.format(**lesson._asdict() | {"example": example, "options": table.help()})
    run = functools.partial(_run_cell, magic=lesson.magic, framework=framework)
    return Magic(lesson.magic, "cell", help, run, table.complete)


MAGICS = (
    *(_launch_magic(name) for name, framework in FRAMEWORKS.items() if framework.lesson is not None),
    Magic("ranks", "cell", _RANKS_HELP, _run_on_ranks, options_table("ranks").complete),
)
