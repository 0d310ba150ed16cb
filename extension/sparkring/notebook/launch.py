"""The magics that run their cell on ranks: one for each framework that has one, and `%%ranks`."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Sequence
from typing import Any

from sparkring.engine.options import LOGS, Options, checked, restarts, timeline
from sparkring.errors import OptionsError
from sparkring.frameworks import FRAMEWORKS
from sparkring.notebook.magic import Magic
from sparkring.notebook.option_types import (
    assignment,
    count,
    number_of_ranks,
    positive_count,
    seconds,
    variable,
    variables,
)
from sparkring.notebook.options_table import Option, OptionsTable

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

_RANKS_HELP = """Run the cell on some ranks of the warm gang: `%%ranks 0,2-3` or `%%ranks all`; options as of %%horovod.

    %gang start -n -4

    %%ranks 0
    print(rank, "of", size, "has", len(x), "rows")

What earlier cells bound on these ranks is there, and what this one binds stays. The values of the ranks that
take part are in the result's .values; --pull brings names of the first of them.
"""

_RANKS = Option(
    "-n",
    "--np",
    type=number_of_ranks,
    metavar="NP",
    help="ranks: -2 two processes here, 2 two Spark barrier tasks; default -1, or the warm gang",
)
_OPTIONS = (
    Option(
        "--timeout",
        type=seconds,
        metavar="S",
        dest="timeout_s",
        help="end the run after S seconds, and say where each rank was",
    ),
    Option(
        "--push",
        type=variables,
        metavar="NAME,…",
        action="append",
        help="notebook variables to take along although the cell does not name them",
    ),
    Option(
        "--pull",
        type=variables,
        metavar="NAME,…",
        action="append",
        help="variables of rank 0 to bring back into the notebook",
    ),
    Option(
        "--env",
        type=assignment,
        metavar="K=V",
        action="append",
        help="an environment variable for the ranks; may be repeated",
    ),
    Option(
        "--gpus",
        type=count,
        metavar="K",
        help="GPUs for each rank, which sees those of all ranks on its node by local rank; 0 hides them",
    ),
    Option(
        "--logs",
        choices=LOGS,
        default="all",
        help="what to show: every rank's output, rank 0's, or only what callbacks send",
    ),
    Option(
        "--stall-after",
        type=seconds,
        metavar="S",
        dest="stall_s",
        default=Options.stall_s,
        help="say where every rank is when some have long been elsewhere; default 30",
    ),
    Option(
        "--checkpoint-dir",
        default="",
        metavar="PATH",
        help="where checkpoints() saves on the ranks; the run continues from the last one found there (dbfs:, any URL)",
    ),
    Option(
        "--max-restarts",
        type=count,
        metavar="K",
        help="start all ranks again, up to K times, when one is lost; default 3 with --checkpoint-dir, else 0",
    ),
    Option(
        "--min-np",
        type=positive_count,
        metavar="K",
        dest="least",
        default=0,
        help="go on with as few as K ranks when Spark has no slots for more, and with all again when it has",
    ),
    Option("--fresh", action="store_true", help="begin anew; the checkpoints that are there stay"),
    Option("--resume", action="store_true", help="go on from a checkpoint although the cell or its data have changed"),
    Option(
        "--timeline",
        action="store_true",
        help="have Horovod record where its time goes, and which ranks the others wait for; kept with the run",
    ),
    Option(
        "--no-autolog",
        action="store_false",
        dest="autolog",
        help="do not add a metrics callback to Keras' fit",
    ),
    Option("--name", default="", metavar="NAME", help="what to call the run in %runs"),
    Option(
        "--background",
        action="store_true",
        help="leave the notebook free: the cell returns at once, with a BackgroundRun; never on the warm gang",
    ),
    Option("--dry-run", action="store_true", help="show what would travel to the ranks, and start nothing"),
    Option("--quiet", action="store_true", help="show nothing but errors"),
)
_BARRIER_RANKS = Option(
    "-n",
    "--np",
    type=number_of_ranks,
    metavar="N",
    help="ranks, each a Spark barrier task; default: as many as the DataFrame has partitions",
)
_BARRIER_DATA = Option(
    "--data",
    type=variable,
    metavar="DF",
    help="the notebook's Spark DataFrame of which each rank gets one partition, as `rows`",
)


@functools.cache
def options_table(magic: str) -> OptionsTable:
    """The options of a launch magic, or of %%ranks."""
    rows: tuple[Option, ...] = (_RANKS, *_OPTIONS)
    if magic == "barrier":
        rows = (_BARRIER_RANKS, *_OPTIONS, _BARRIER_DATA)
    return OptionsTable(f"%%{magic}", *rows)


def parse(magic: str, line: str, default_np: int = Options.np) -> Options:
    """The Options that the line of a launch magic asks for. OptionsError says what is wrong with it."""
    who = f"%%{magic}"
    given = options_table(magic).parse(line)
    np = given["np"]
    if magic == "barrier":
        given["data"] = given["data"] or ""
        np = _barrier_np(np, given["data"], default_np)
    return checked(
        who,
        Options(
            **given
            | {
                "np": default_np if np is None else np,
                "push": _flattened(given["push"]),
                "pull": _flattened(given["pull"]),
                "env": tuple(given["env"] or ()),
                "max_restarts": restarts(given["max_restarts"], given["checkpoint_dir"]),
                "timeline": timeline(who, magic == "horovod", given["timeline"]),
            }
        ),
    )


def _barrier_np(np: int | None, data: str, default_np: int) -> int | None:
    """The ranks of %%barrier: 0, which is one for each partition, where there is a DataFrame and -n says nothing."""
    if np is not None and np < 1:
        raise OptionsError(
            f"%%barrier runs in tasks of a Spark barrier stage, so -n cannot be {np}: use -n {abs(np) or 4}."
        )
    if np is None and not data and default_np < 1:
        raise OptionsError(
            "%%barrier needs a number of ranks (-n 4), or a DataFrame (--data DF), a rank per partition."
        )
    return 0 if np is None and data else np


def _flattened(groups: Sequence[tuple[str, ...]] | None) -> tuple[str, ...]:
    """The names of an option that may be repeated, each once."""
    return tuple(dict.fromkeys(name for group in groups or () for name in group))


def parse_ranks(line: str, size: int) -> tuple[tuple[int, ...], str]:
    """The ranks that a `%%ranks` line names, and the rest of the line. OptionsError if there is no such rank."""
    first, _, rest = line.strip().partition(" ")
    ranks: set[int] = set()
    for part in first.split(","):
        low, dash, high = part.partition("-")
        if part == "all":
            ranks |= set(range(size))
        elif low.isdecimal() and (high.isdecimal() if dash else True):
            # A rank that does not exist stands for all of them: the message below names the ranks that do.
            ranks |= set(range(int(low), min(int(high or low), size) + 1)) or {size}
        else:
            raise OptionsError(f"%%ranks takes the ranks first, as in `%%ranks 0,2-3` or `%%ranks all`, not {first!r}.")
    if not ranks or max(ranks) >= size:
        raise OptionsError(f"%%ranks {first}: the gang has ranks 0 to {size - 1}.")
    return tuple(sorted(ranks)), rest


def _run_on_ranks(shell: Any, line: str, cell: str) -> Any:
    """`%%ranks`: the cell on some ranks of the gang that was started last."""
    from sparkring.engine import gang_selection

    warm = gang_selection.latest_gang("%%ranks")
    ranks, rest = parse_ranks(line, warm.gang.size)
    return _run_cell(shell, rest, cell, magic="ranks", framework=warm.wanted.framework, ranks=ranks)


def _run_cell(shell: Any, line: str, cell: str, *, magic: str, framework: str, ranks: tuple[int, ...] = ()) -> Any:
    """Run the cell as its line says, on `ranks` of the warm gang if any are named."""
    from sparkring.engine import api, gang_selection
    from sparkring.engine.prepare import capture_cell
    from sparkring.engine.spec import Cell, RunSpec
    from sparkring.notebook.cell import find_scripts, python_source, title_of
    from sparkring.views.tables import show_captured

    options = parse(magic, line, gang_selection.default_np())
    if ranks:
        gang_selection.check_ranks_options(options)
    source = python_source(shell, magic, cell)
    scripts = find_scripts(shell, source)
    gang = gang_selection.gang_for(options)
    title = options.name or title_of(source) or f"%%{magic} -n {options.np}"
    work = Cell(source, shell.user_ns, scripts)
    spec = RunSpec(work, options, framework, title, f"%%{magic} {line}\n{cell}", gang, ranks)
    if options.dry_run:
        show_captured(capture_cell(spec, work).table)
        return None
    return api.start_spec(spec) if options.background else api.run_spec(spec)


def _launch_magic(framework: str) -> Magic:
    lesson = FRAMEWORKS[framework].lesson
    assert lesson is not None
    table = options_table(lesson.magic)
    help = _HELP.format(
        magic=lesson.magic,
        line=lesson.line,
        what=lesson.what,
        reads=lesson.reads,
        example=textwrap.indent(textwrap.dedent(lesson.example).strip(), "    "),
        options=table.help(),
    )
    run = functools.partial(_run_cell, magic=lesson.magic, framework=framework)
    return Magic(lesson.magic, "cell", help, run, table.complete)


MAGICS = (
    *(_launch_magic(name) for name, framework in FRAMEWORKS.items() if framework.lesson is not None),
    Magic("ranks", "cell", _RANKS_HELP, _run_on_ranks, options_table("ranks").complete),
)
