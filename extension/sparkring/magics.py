"""IPython's surface and nothing else: parse the line, capture, run, show."""

from __future__ import annotations

import ast
import re
import textwrap
from typing import Any, NamedTuple

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from sparkring import options as opts
from sparkring import runs
from sparkring.capture import capture
from sparkring.errors import CaptureError, OptionsError
from sparkring.views import show_captured, show_table, summary
from sparkring.worker.shell import LINE_MAGICS

PROVIDED = ("rank", "size", "local_rank", "get_ipython", "display")
RESERVED = {"barrier": ("context", "rows")}  # by magic: what its ranks define whatever the notebook does

_HELP = """Run the cell on {what}.

    %%{magic} {line}
{example}

The cell is the body of the training function. Names that it reads (here {reads}) are taken from
the notebook when it runs: functions and classes by value, modules by reference. `rank`, `size` and
`local_rank` are there unless the notebook defines them. What the ranks print shows here, tagged by
rank; the first rank to fail ends all, and the error names it and the line of the cell.

Returns a RunResult: .value (rank 0's last expression), .values (by rank), .record, .logs(rank).
It is in `_` afterwards.

Options:
{options}
"""


class _Launch(NamedTuple):
    """A launch magic: the framework whose ranks it starts, and what its help says."""

    framework: str
    what: str
    reads: str
    example: str
    line: str = "-n -2"


_LAUNCH_MAGICS = {
    "horovod": _Launch(
        "horovod",
        "a ring of Horovod ranks",
        "model, x, y",
        """
        import horovod.tensorflow.keras as hvd
        hvd.init()
        print("rank", hvd.rank(), "of", hvd.size())
        model.fit(x[rank::size], y[rank::size], callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        """,
    ),
    "torchrun": _Launch(
        "torch",
        "ranks that torch.distributed can join, with the environment that torchrun gives",
        "model, train",
        """
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        train(DistributedDataParallel(model))
        dist.destroy_process_group()
        """,
    ),
    "tensorflow": _Launch(
        "tensorflow",
        "the workers of one TensorFlow cluster, each with its TF_CONFIG",
        "make_model, x, y",
        """
        import tensorflow as tf
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = make_model()
        model.fit(x, y, epochs=3)
        """,
    ),
    "barrier": _Launch(
        "barrier",
        "the tasks of a Spark barrier stage, where `context` is the BarrierTaskContext and `rows` the\n"
        "rows of partition `rank` of --data: iterate over them, or take rows.pandas() or rows.arrow() in batches, or\n"
        "rows.to_pandas() at once",
        "make_model",
        """
        part = rows.to_pandas()
        print("rank", rank, "has", len(part), "rows, all have", context.allGather(str(len(part))))
        make_model().fit(part[["x1", "x2"]], part["y"])
        """,
        "-n 4 --data digits",
    ),
}


@magics_class
class SparkringMagics(Magics):
    """The magics of sparkring."""

    @cell_magic
    def horovod(self, line: str, cell: str) -> Any:
        return self._launch("horovod", line, cell)

    @cell_magic
    def torchrun(self, line: str, cell: str) -> Any:
        return self._launch("torchrun", line, cell)

    @cell_magic
    def tensorflow(self, line: str, cell: str) -> Any:
        return self._launch("tensorflow", line, cell)

    @cell_magic
    def barrier(self, line: str, cell: str) -> Any:
        return self._launch("barrier", line, cell)

    @line_magic
    def runs(self, line: str) -> None:
        """List saved runs, newest first: `%runs`, or `%runs 50` for more than the last 20."""
        words = line.split()
        if words and not words[0].isdigit():
            raise OptionsError(f"%runs takes how many to list, not {words[0]!r}: %runs 50")
        rows = []
        for path in runs.saved()[: int(words[0]) if words else 20]:
            begun, ended = runs.first(path), runs.last(path)
            took = summary.duration(ended.time - begun.time) if ended else ""
            rows.append(
                (
                    path.name,
                    begun.title,
                    took,
                    f"{begun.size} {begun.where}",
                    ended.outcome if ended else "running, or its kernel was killed",
                    summary.first_line(ended.message, 100) if ended else "",
                )
            )
        headers = ("run", "cell", "took", "ranks", "outcome", "")
        show_table(headers, rows, empty=f"no runs saved yet (they go to {runs.home()})")

    @line_magic
    def logs(self, line: str) -> None:
        """Print what a run's ranks wrote: `%logs`, `%logs RUN --rank 1 --tail 20`; RUN as in %runs, else the last."""
        wanted = opts.parse_logs(line)
        path = runs.find(wanted.run)
        if path is None:
            raise OptionsError(
                f"no saved run called {wanted.run!r}: %runs lists them." if wanted.run else "no runs saved yet."
            )
        ranks = range(runs.first(path).size)
        if wanted.rank is not None and wanted.rank not in ranks:
            raise OptionsError(f"run {path.name} has no rank {wanted.rank}: it had ranks 0 to {len(ranks) - 1}.")
        for rank in ranks if wanted.rank is None else [wanted.rank]:
            text = runs.log(path, rank)
            if wanted.tail is not None:
                text = "".join(text.splitlines(keepends=True)[-wanted.tail :])
            if wanted.rank is None:
                print(f"── rank {rank} ── {path / runs.log_name(rank)}")
            print(text, end="" if text.endswith("\n") else "\n")

    @line_magic
    def slots(self, line: str) -> None:
        """Show where ranks can run: this machine's cores, and Spark's task slots and who holds them."""
        from sparkring.launchers import slots_table

        show_table(("where", "slots", "busy", "details"), slots_table(), empty="")

    def _launch(self, magic: str, line: str, cell: str) -> Any:
        from sparkring import runner

        options = opts.parse(magic, line)
        assert self.shell is not None
        namespace = self.shell.user_ns
        source = _cell_source(self.shell, magic, cell)
        captured = capture(
            source,
            namespace,
            provided=PROVIDED,
            reserved=RESERVED.get(magic, ()),
            also=options.push,
            dry_run=options.dry_run,
        )
        if options.dry_run:
            show_captured(captured.names)
            return None
        result = runner.run_cell(
            source,
            captured,
            options,
            framework=_LAUNCH_MAGICS[magic].framework,
            title=options.name or _title(cell),
            code=f"%%{magic} {line}\n{cell}",
            namespace=namespace,
        )
        namespace.update(result.pulled)
        return result


for _magic, _launch in _LAUNCH_MAGICS.items():
    getattr(SparkringMagics, _magic).__doc__ = _HELP.format(
        magic=_magic,
        line=_launch.line,
        what=_launch.what,
        reads=_launch.reads,
        example=textwrap.indent(textwrap.dedent(_launch.example).strip(), "    "),
        options=opts.help_table(_magic),
    )


def load(shell: Any) -> None:
    """Register everything in an IPython shell."""
    from sparkring.compat import sparkdl

    shell.register_magics(SparkringMagics)
    sparkdl.install()
    if _complete not in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.append(_complete)


def unload(shell: Any) -> None:
    """Take the magics away."""
    if _complete in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(_complete)
    for kind, names in (("cell", tuple(_LAUNCH_MAGICS)), ("line", ("runs", "logs", "slots"))):
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)


def _completions(context: CompletionContext) -> dict[str, Any]:
    """Tab on the line of a launch magic: its options, and the values of those that have a fixed set."""
    found = re.match(r"%%(\w+)(\s.*)", context.text_until_cursor)
    words = opts.completions(found[1], found[2]) if found and found[1] in _LAUNCH_MAGICS else []
    return {"completions": [SimpleCompletion(word, type="option") for word in words], "suppress": True}


# A matcher and not a hook: Python's keywords and names, which Jedi would add, are no help where an option stands.
_complete: Any = context_matcher(identifier="sparkring", priority=100)(_completions)


def _cell_source(shell: Any, magic: str, cell: str) -> str:
    """The cell as Python, its lines numbered as the notebook shows them: the magic's own line is 1."""
    if not cell.strip():
        raise OptionsError(f"the cell is empty: the lines below %%{magic} are what the ranks run.")
    empty = cell[: len(cell) - len(cell.lstrip())].count("\n")  # lines at the top, which IPython drops
    source: str = "\n" * (1 + empty) + shell.transform_cell(cell)
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        line = error.lineno or 2
        text = ("\n" + cell).split("\n")[line - 1 : line]
        shown = f"\n    {text[0]}\n    {' ' * max(0, (error.offset or 1) - 1)}^" if text else ""
        raise CaptureError(f"cell line {line}: {error.msg} (SyntaxError){shown}", line=line) from None
    for node in ast.walk(tree):
        _refuse_magic(node)
    return source


def _refuse_magic(node: ast.AST) -> None:
    """Magics that need the notebook's own IPython are refused before the launch."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Name("get_ipython")), attr=kind),
            args=[ast.Constant(str(name)), *_],
        ) if kind in ("run_line_magic", "run_cell_magic"):
            if kind == "run_cell_magic" or name not in LINE_MAGICS:
                mark = "%" if kind == "run_line_magic" else "%%"
                raise CaptureError(
                    f"cell line {node.lineno}: {mark}{name} needs the notebook's IPython, which is not there on "
                    f"the ranks. Run it in a cell of its own; on ranks there are !commands and "
                    f"{', '.join('%' + known for known in LINE_MAGICS)}.",
                    line=node.lineno,
                )


def _title(cell: str) -> str:
    """What to call a run without a name: the first line of its cell that says something."""
    for line in cell.splitlines():
        text = line.strip(" \t#")
        if text and not text.startswith(("import ", "from ")):
            return text[:60]
    return cell.strip().splitlines()[0][:60]
