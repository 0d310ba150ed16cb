"""`%%foreach TARGETS in ITEMS`, which runs the cell for each item, several items at once. The items are independent."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from sparkring.engine.foreach.options import ForeachOptions, checked_foreach
from sparkring.errors import OptionsError
from sparkring.notebook.cell_options import rows_of
from sparkring.notebook.expressions import complete_expression, evaluated, split_options
from sparkring.notebook.magic import Magic
from sparkring.notebook.options_table import Option, OptionsTable

_HELP = """Run the cell for each item. The items are independent of each other, and several run at once.

    %%foreach store, lr in product(stores, [0.1, 0.01]) -n -4
    frame = pd.read_parquet(f"{{root}}/{{store}}")
    model = train(frame, lr)
    sparkring.log(mape=score(model))
    model.coef_                           # the value of the last expression is the item's value

`TARGETS in ITEMS` is the part of a Python for loop between `for` and `:`. ITEMS may be any iterable, even an endless
generator, since an item is taken only when a process is free for it. With sparkring.partitions(df), each item is a
partition of a Spark DataFrame, as a pandas DataFrame. With a grouped Spark DataFrame, each item is a pair of a key and
a pandas DataFrame:

    %%foreach store, frame in df.groupBy("store") -n 4
    len(frame)

With `df.groupby("store")` on a pandas DataFrame, each item is also a pair of a key and a DataFrame.

With -n -4, at most four items run at once, in processes on this machine. With -n 4, items run in Spark tasks, which
start when Spark has free slots for them. If ITEMS contains ` -n` or ` --`, as in `a -n`, put ITEMS in parentheses.
Otherwise, that text is read as the beginning of the options.

Each process runs one item after another, and keeps imported modules. Before each item, the names that the cell
reads are reset to the notebook's values, and random numbers are seeded with the item's number. So results do not depend
on which process runs an item, or on when it runs. But if an item changes something in a module, in the environment or
in a file, later items in the same process see the change. With --fresh-process, each item has a process of its own.

If an item fails, the other items still run. At the end, one error says how many items failed, and why. A process that
dies, or whose memory has grown by 512 MB, is replaced. If an item runs out of memory, it is tried again, and from then
on only half as many items run at once.

With --checkpoint-dir, the result of each item is kept in that directory. After Stop, a failure or a killed kernel, run
the cell again: it runs only the items that have no result yet. If you change an item, the code, or a value that the
code uses, the affected items run again. With --keep-results, the results of the changed code are used.

To search for the best values of parameters, iterate over sparkring.search(), which ends poor trials early:

    %%foreach lr, width in sparkring.search(lr=sparkring.log_uniform(1e-5, 0.1), width=[64, 128], minimize="val_loss")

The cell returns a ForeachResult, with .table (a pandas DataFrame), .values, .errors, .best("mape") and .record. After
an error or Stop, sparkring.last_result is the result so far. With --background, the cell returns a BackgroundRun at
once.

With --plan, only the first item runs. Its memory, CPU use, time and reads are measured. The cell returns a Plan, which
says how many items fit at once, what limits this number, and how long all items will take. The item's result is kept
only with --checkpoint-dir.

Options:
{options}
"""

_NAMES = (
    "fresh_after checkpoint_dir fresh keep_results np_each framework gpus seed push env env_pack autolog name plan"
    " background notify dry_run quiet"
)
TABLE = OptionsTable(
    "%%foreach",
    *rows_of(ForeachOptions, "np retries timeout_each_s fail_fast"),
    Option("--fresh-process", action="store_true", help="start a process for each item"),
    *rows_of(ForeachOptions, _NAMES),
)


class Clause(NamedTuple):
    """The text of TARGETS and of ITEMS, and the compiled `code` that computes ITEMS.

    `makes_items` is false if ITEMS only names an object that already exists, such as the value of a variable.
    """

    targets: str
    items: str
    code: types.CodeType
    makes_items: bool

    @property
    def written(self) -> str:
        return f"{self.targets} in {self.items}"


def split(line: str) -> tuple[Clause, str]:
    """Return the clause at the beginning of a line, and the text of the options after it.

    Raise OptionsError if the line does not begin with a clause.
    """
    problem = (
        "%%foreach begins with `TARGETS in ITEMS`, as a for loop does: for example `%%foreach store in stores -n -4`."
    )
    return split_options(line, _clause, problem)


def _clause(written: str) -> Clause | None:
    source = f"for {written}: pass"
    try:
        match ast.parse(source).body:
            case [ast.For(target=target, iter=items)]:
                code = compile(ast.Expression(items), "<%%foreach>", "eval")
                makes_items = not isinstance(items, ast.Name | ast.Attribute | ast.Subscript)
                return Clause(_text(source, target), _text(source, items), code, makes_items)
    except SyntaxError:
        pass
    return None


def _text(source: str, node: ast.expr) -> str:
    return ast.get_source_segment(source, node) or ast.unparse(node)


def parse(line: str, fill_in: Callable[[str], str] = lambda options: options) -> tuple[Clause, ForeachOptions]:
    """Return the clause and the options of a `%%foreach` line.

    Raise OptionsError if the line is not valid. `fill_in` replaces `{name}` and `$name` in the options, as IPython does
    for other magics. The clause stays as it is, because the clause is Python.
    """
    from sparkring.launchers.local import default_at_once

    clause, rest = split(line)
    given = TABLE.parse(fill_in(rest))
    if given.pop("fresh_process"):
        if "fresh_after" in given:
            raise OptionsError("%%foreach: --fresh-process means --fresh-after 1: choose one.")
        given["fresh_after"] = 1
    options = ForeachOptions(**given)
    if "np" not in given:
        options = replace(options, np=-default_at_once(options.np_each, options.gpus, dict(options.env)))
    return clause, checked_foreach("%%foreach", options)


def complete(line: str) -> list[str]:
    """Return what Tab offers: the notebook's variables within the clause, and options after it."""
    return complete_expression(line, split, TABLE)


def _run(shell: Any, line: str, cell: str) -> Any:
    """`%%foreach`: run the cell for each item, or show what would be sent."""
    from sparkring.engine.foreach import api
    from sparkring.engine.foreach.items import Targets
    from sparkring.engine.foreach.run import ForeachSpec
    from sparkring.engine.run.options import Options
    from sparkring.engine.run.prepare import sent_with
    from sparkring.engine.run.spec import Cell, RunSpec
    from sparkring.notebook.cell import depends_on_items, find_scripts, kept_parameters, python_source
    from sparkring.views.tables import show_captured
    from sparkring.worker.rank.expand import expand

    clause, options = parse(line, lambda text: expand(text, shell.user_ns))
    source, targets = python_source(shell, "foreach", cell), Targets(clause.targets)
    names = targets.names
    scripts = find_scripts(shell, source, names)
    work = Cell(source, shell.user_ns, scripts)
    if depends_on_items(source, names):
        work = work._replace(scripts_of=lambda values: find_scripts(shell, source, names, values))
    if options.dry_run:
        spec = RunSpec(
            work, Options(push=options.push, dry_run=True, env_pack=options.env_pack), options.framework, bound=names
        )
        show_captured(sent_with(spec, work, options.place))
        return None
    items = evaluated("%%foreach", clause.items, clause.code, shell.user_ns)
    if options.plan and isinstance(items, Iterator) and not clause.makes_items:
        raise OptionsError(
            f"%%foreach: --plan would consume the first item of the iterator `{clause.items}`, so that a later run "
            "would miss this item. Use a list, or make the iterator in the clause."
        )
    code, notice = f"%%foreach {line}\n{cell}", kept_parameters(scripts)
    run = ForeachSpec(work, items, options, targets, clause.written, code, notice)
    return api.start_foreach(run) if options.background else api.foreach_spec(run)


MAGICS = (Magic("foreach", "cell", _HELP.format(options=TABLE.help()), _run, complete, raw=True),)
