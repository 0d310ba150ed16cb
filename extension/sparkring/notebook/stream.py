"""`%%stream DF`, which trains the models of a warm gang on a stream."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from sparkring.engine.run.options import restarts
from sparkring.engine.stream.options import StreamOptions, checked_stream
from sparkring.notebook.cell_options import rows_of
from sparkring.notebook.expressions import complete_expression, evaluated, split_options
from sparkring.notebook.magic import Magic
from sparkring.notebook.options_table import OptionsTable

_HELP = """Train on a stream: run the cell on the warm gang for each micro-batch, in the background.

    %gang start -n -2 --framework torch

    %%torchrun
    model, optimizer = make_model()       # earlier cells define what is trained

    %%stream df --checkpoint-dir dbfs:/ml/live
    x, y = batch["x"], batch["y"]         # this rank's rows of the micro-batch, as arrays
    loss = train_step(model, optimizer, x, y)
    sparkring.log(loss=loss)

DF is a streaming DataFrame (spark.readStream). Without Spark, it is any iterable of batches, or
sparkring.watch("folder/*.parquet") for the files of a folder as they arrive. A batch of an iterable is a dict of
arrays, a pandas DataFrame, an Arrow table, or the path of a Parquet file.

For each micro-batch, each rank has `batch`, a dict of arrays with its rows, and `batch_id`. The ranks' numbers of rows
differ by at most 1. If there are fewer rows than ranks, each rank gets one row, so some rows are used more than once.
For a micro-batch without rows, the cell does not run. Variables keep their values from one micro-batch to the next.
Random numbers are seeded with the number of the micro-batch.

The cell returns a BackgroundRun at once. Between two micro-batches, other cells can use the gang, as in `%%ranks 0`.
The panel's Stop button, .stop() and `%runs --stop RUN` end the stream after the current micro-batch.

With --checkpoint-dir, the state is saved after every micro-batch, together with its number and the position of the
stream. If a rank is lost, new ranks are started, the cells that define the names used in the stream's cell are run on
them again (and cells such as `dist.init_process_group()`), the last checkpoint is restored, and the stream continues.
If the kernel has been killed, run the cells again. Each micro-batch then counts exactly once. The state consists of
the models, optimizers and similar objects that the cell uses, and of the variables that it both reads and assigns, as
in `seen += 1`. To choose other variables, use --state.

With --by store, there is a small model for each store: the cell runs once for each store in the micro-batch, with
`key` and the rows of this store. Each key begins with copies of the values that the state's variables have when the
stream begins, and keeps its own values from then on. The keys are divided among the ranks.

Options:
{options}
"""

_NAMES = (
    "np trigger_s available_now checkpoint_dir save_every keep state sharded max_rows by arrow max_restarts fresh"
    " resume seed push env autolog name notify dry_run quiet"
)
TABLE = OptionsTable("%%stream", *rows_of(StreamOptions, _NAMES))


class Expression(NamedTuple):
    """The text of DF, and the code that computes it."""

    written: str
    code: types.CodeType


def split(line: str) -> tuple[Expression, str]:
    """Return the expression at the beginning of a line, and the text of the options after it.

    Raise OptionsError if the line does not begin with an expression.
    """
    problem = (
        "%%stream begins with a streaming DataFrame or an iterable of batches: for example `%%stream df "
        "--checkpoint-dir dbfs:/ml/live`."
    )
    return split_options(line, _expression, problem)


def _expression(written: str) -> Expression | None:
    try:
        tree = ast.parse(written, mode="eval")
    except SyntaxError:
        return None
    return Expression(written, compile(tree, "<%%stream>", "eval"))


def parse(
    line: str, default_np: int, fill_in: Callable[[str], str] = lambda options: options
) -> tuple[Expression, StreamOptions]:
    """Return the expression and the options of a `%%stream` line.

    Raise OptionsError if the line is not valid. `fill_in` replaces `{name}` and `$name` in the options, as IPython does
    for other magics. The expression stays as it is, because it is Python.
    """
    expression, rest = split(line)
    given = TABLE.parse(fill_in(rest))
    given.setdefault("np", default_np)
    given["max_restarts"] = restarts(given.get("max_restarts"), given.get("checkpoint_dir"))
    return expression, checked_stream("%%stream", StreamOptions(**given))


def complete(line: str) -> list[str]:
    """Return what Tab offers: the notebook's variables within the expression, and options after it."""
    return complete_expression(line, split, TABLE)


def _run(shell: Any, line: str, cell: str) -> Any:
    """`%%stream`: train on a stream in the background, or show what would be sent."""
    from sparkring.engine.run import gang_selection
    from sparkring.engine.run.prepare import sent_with
    from sparkring.engine.run.spec import Cell, RunSpec
    from sparkring.engine.stream.run import StreamSpec, start_stream
    from sparkring.notebook.cell import find_scripts, python_source
    from sparkring.views.tables import show_captured
    from sparkring.worker.rank.batches import BOUND
    from sparkring.worker.rank.expand import expand

    expression, options = parse(line, gang_selection.default_np(), lambda text: expand(text, shell.user_ns))
    source = python_source(shell, "stream", cell)
    work = Cell(source, shell.user_ns, find_scripts(shell, source))
    gang = gang_selection.gang_with("%%stream", options.np)
    if options.dry_run:
        sent = RunSpec(work, options.of_run, gang.wanted.framework, gang=gang, bound=BOUND)
        show_captured(sent_with(sent, work, gang.wanted.place))
        return None
    stream = evaluated("%%stream", expression.written, expression.code, shell.user_ns)
    title = options.name or f"stream {expression.written}"
    spec = StreamSpec(work, stream, expression.written, gang, options, title, f"%%stream {line}\n{cell}")
    return start_stream(spec)


MAGICS = (Magic("stream", "cell", _HELP.format(options=TABLE.help()), _run, complete, raw=True),)
