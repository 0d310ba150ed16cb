"""Tests of the extension in a real kernel. The tests use the kernel through messages, as a notebook does."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop
from nbconvert import HTMLExporter
from texts import mentions
from waiting import DEADLINE_S, PACE, until

import sparkring

SOURCE_ROOT = str(Path(sparkring.__file__).parents[1])
FRAMEWORKS = ["tensorflow", "torch", "horovod", "pyspark", "ipywidgets", "anywidget", "matplotlib"]


@dataclass
class Cell:
    """A cell that has run: its outputs as the notebook would keep them, and how it ended."""

    status: str
    outputs: list[nbformat.NotebookNode]
    reply: dict[str, Any]
    shown: dict[str, nbformat.NotebookNode] = field(default_factory=dict)  # display id → output, as last updated

    @property
    def printed(self) -> str:
        """Return what the cell wrote to stdout and stderr."""
        return "".join(output.text for output in self.outputs if output.output_type == "stream")

    @property
    def displayed(self) -> str:
        """Return what the cell displayed, as text."""
        return "\n".join(
            output.data.get("text/plain", "") for output in self.outputs if output.output_type == "display_data"
        )

    @property
    def result(self) -> str:
        """Return the value of the cell's last expression, as text."""
        return next((o.data["text/plain"] for o in self.outputs if o.output_type == "execute_result"), "")

    @property
    def error(self) -> nbformat.NotebookNode:
        """Return the error with which the cell ended."""
        errors = [output for output in self.outputs if output.output_type == "error"]
        assert errors, (self.status, self.outputs)
        return errors[0]

    def done(self) -> Cell:
        """Return the cell, after checking that it has succeeded."""
        assert self.status == "ok", self.reply.get("evalue")
        return self


class Kernel:
    """A kernel with sparkring loaded, and the notebook's side of its messages."""

    def __init__(self, folder: Path, *, loaded: bool = True) -> None:
        self.sockets = tempfile.mkdtemp(prefix="kernel-")  # the path of a socket must be short
        self.manager = KernelManager(
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # always this Python's kernel
            transport="ipc",
            ip=f"{self.sockets}/socket",
        )
        path = os.pathsep.join(filter(None, [SOURCE_ROOT, os.environ.get("PYTHONPATH")]))
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, "PYTHONPATH": path})
        self.client: BlockingKernelClient = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(DEADLINE_S)
        self.process = psutil.Process(self.manager.provisioner.pid)
        self.shown: dict[str, list[nbformat.NotebookNode]] = {}  # display id → outputs of any cells, as last updated
        if loaded:
            self.run("%load_ext sparkring").done()

    def send(self, code: str) -> str:
        """Send a cell, and return the message's id; receive() collects the outputs."""
        return self.client.execute(textwrap.dedent(code).strip("\n"))

    def receive(self, sent: str, on_output: Callable[[nbformat.NotebookNode], object] | None = None) -> Cell:
        """Collect the cell's outputs until it has ended; `on_output` is called with each output as it comes."""
        outputs: list[nbformat.NotebookNode] = []
        shown: dict[str, nbformat.NotebookNode] = {}
        while True:
            message = self.client.get_iopub_msg(timeout=DEADLINE_S)
            kind, content = message["msg_type"], message["content"]
            if kind == "update_display_data":  # perhaps from an earlier cell, whose run continues in the background
                for output in self.shown[content["transient"]["display_id"]]:
                    output.data = nbformat.from_dict(content["data"])
            if message["parent_header"].get("msg_id") != sent:
                continue
            if kind == "status" and content["execution_state"] == "idle":
                break
            if kind in ("stream", "display_data", "execute_result", "error"):
                output = nbformat.v4.output_from_msg(message)
                outputs.append(output)
                if "display_id" in content.get("transient", {}):
                    shown[content["transient"]["display_id"]] = output
                    self.shown.setdefault(content["transient"]["display_id"], []).append(output)
            elif kind != "update_display_data":
                continue
            if on_output is not None:
                on_output(output)
        reply = self.reply_to(sent)
        return Cell(reply["status"], outputs, reply, shown)

    def interrupt(self) -> None:
        """Interrupt the cell, as Stop does, a moment after its last output.

        ipykernel and IPython lose an interrupt, or cannot show it, if it arrives while the main thread is still in
        print(flush=True) or between two statements: about once in a thousand times if it follows the output at once.
        """
        time.sleep(0.3)
        self.manager.interrupt_kernel()

    def reply_to(self, sent: str) -> dict[str, Any]:
        """Return the kernel's own answer to a request."""
        while True:
            message = self.client.get_shell_msg(timeout=DEADLINE_S)
            if message["parent_header"].get("msg_id") == sent:
                return dict(message["content"])

    def run(self, code: str) -> Cell:
        """Run a cell to its end. If ipykernel 6 does not run it because a cell has just failed, send it again."""
        while (cell := self.receive(self.send(code))).status == "aborted":
            time.sleep(0.1)
        return cell

    def value(self, expression: str) -> str:
        """Return what the notebook shows for an expression."""
        return self.run(expression).done().result

    def ranks(self) -> list[str]:
        """Return the processes that the kernel has started and that are still running."""
        found = []
        for child in self.process.children(recursive=True):
            try:
                found.append(f"{child.pid} {child.status()} {child.cmdline()[:3]}")
            except psutil.NoSuchProcess:
                continue
        return found

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel()
        self.manager.cleanup_resources()
        shutil.rmtree(self.sockets, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[None]:
    """Make the event loop that Jupyter's blocking calls share, and close it after the last test."""
    found = ensure_event_loop()
    yield
    found.close()


@pytest.fixture(scope="module")
def shared(loop: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Start one kernel for all tests that leave it unchanged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARKRING_HOME", str(tmp_path_factory.mktemp("home")))
        kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    kernel.run("_bare = {*globals(), '_bare', '_name'}").done()
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(shared: Kernel) -> Iterator[Kernel]:
    """Return the shared kernel, in which no names are defined. After the test, no rank may be left."""
    # %reset would collect garbage, which takes a long time after the first completion.
    shared.run("for _name in {*globals()} - _bare: del globals()[_name]").done()
    yield shared
    assert not shared.ranks()


@pytest.fixture
def kernels(tmp_path: Path) -> Iterator[Callable[..., Kernel]]:
    """Return a function that starts a kernel for one test."""
    started: list[Kernel] = []

    def start(**options: Any) -> Kernel:
        folder = tmp_path / f"notebook-{len(started)}"
        folder.mkdir()
        started.append(Kernel(folder, **options))
        return started[-1]

    yield start
    for found in started:
        found.close()


@pytest.fixture(scope="module")
def spark_kernel(
    loop: None,
    lasting_processes: list[psutil.Process],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Kernel]:
    """Start a kernel with a SparkSession of two slots, called `spark`, for all tests that need a session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARKRING_HOME", str(tmp_path_factory.mktemp("home")))
        kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    lasting_processes.append(kernel.process)
    kernel.run("""
        import os
        from sparkring.cluster.session import find_java
        if find_java():
            os.environ["JAVA_HOME"] = find_java()
        from pyspark.sql import SparkSession
        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        for name in ("host", "bindAddress"):
            builder = builder.config(f"spark.driver.{name}", "127.0.0.1")
        spark = builder.getOrCreate()
    """).done()
    pids = [int(line.split()[0]) for line in kernel.ranks()]
    assert pids
    yield kernel
    kernel.close()
    until(lambda: not any(map(psutil.pid_exists, pids)), "Spark's JVM ends with the kernel")


# ── Loading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_loads_twice_and_can_be_taken_away(kernels: Callable[..., Kernel]) -> None:
    kernel = kernels(loaded=False)
    assert "not found" in kernel.run("%%horovod\n1").printed

    assert not kernel.run("%load_ext sparkring").done().outputs
    assert kernel.value("sparkring.__name__") == "'sparkring'"
    kernel.run("%load_ext sparkring").done()
    kernel.run("%reload_ext sparkring").done()
    assert kernel.run("%%horovod\n1").done().result == "rank 0: 1"

    kernel.run("%unload_ext sparkring").done()
    for code in ("%%horovod\n1", "%runs", "%logs", "%shards x", "%checkpoints x", "%slots", "%doctor"):
        assert "not found" in kernel.run(code).printed
    assert complete(kernel, "%%horovod --ti") == []

    kernel.run("%load_ext sparkring").done()
    assert kernel.run("%%horovod\n2").done().result == "rank 0: 2"


def test_loading_imports_no_framework(kernels: Callable[..., Kernel]) -> None:
    kernel = kernels(loaded=False)
    found = f"[name for name in {FRAMEWORKS} if name in __import__('sys').modules]"
    assert kernel.value(found) == "[]"
    kernel.run("import sparkring").done()
    assert kernel.value(found) == "[]"
    kernel.run("%load_ext sparkring").done()
    assert kernel.value(found) == "[]"
    kernel.run("%%horovod -n -2\nrank").done()
    assert not set(FRAMEWORKS[:4]) & set(eval(kernel.value(found)))


# ── Help and Tab ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%runs --help", "List saved runs"),
        ("%logs -h", "Print what the ranks of a run wrote"),
        ("%slots --help", "Show where ranks can run"),
        ("%gang start --help", "Start, list and stop warm gangs"),
        ("%shards --help", "Preview which rows"),
        ("%doctor --help", "Check whether launches"),
        ("%checkpoints --help", "Show the checkpoints"),
        ("%%ranks --help\n1", "Run the cell on some ranks"),
        ("%%torchrun -n -2 --help\n1 / 0", "Run the cell on"),
    ],
)
def test_a_line_that_asks_for_help_gets_it(kernel: Kernel, line: str, said: str) -> None:
    cell = kernel.run(line).done()
    assert cell.printed.startswith(said)
    assert {output.get("name") for output in cell.outputs} == {"stdout"}  # in one piece or several


def test_a_front_end_that_needs_a_view_of_the_widget_saves_nothing_of_it(kernel: Kernel) -> None:
    """VS Code is such a front end, recognised by a variable that it sets. The view exists only during the run."""
    view, seen = "application/vnd.jupyter.widget-view+json", []
    kernel.run("__vsc_ipynb_file__ = '/home/ada/x.ipynb'").done()
    cell = kernel.receive(
        kernel.send("%%horovod -n -1\nprint('hello')"),
        lambda output: seen.append(dict(output.get("data", {}))),
    ).done()
    views = [data for data in seen if view in data]
    assert [(set(data), data["text/plain"]) for data in views] == [({view, "text/plain"}, "")]
    assert views[0][view]["model_id"]
    kept = [output.get("data", {}) for output in cell.outputs]
    assert [data for data in kept if view in data] == []
    assert "object at 0x" not in str(cell.outputs)


def test_in_colab_each_run_has_a_widget_of_its_own(kernel: Kernel) -> None:
    """Colab isolates outputs, so a run's view is its panel. The view stays, and its snapshot has the whole run."""
    view = "application/vnd.jupyter.widget-view+json"
    kernel.run("""
        import sys, types
        modules = {name: types.ModuleType(name) for name in ("google.colab", "google.colab.output")}
        modules["google.colab.output"].enable_custom_widget_manager = lambda: None
        sys.modules.update(modules)
    """).done()
    shown = []
    for number in (1, 2):
        cell = kernel.run(f"%%horovod -n -1\nprint({number})").done()
        shown += [output.data[view]["model_id"] for output in cell.outputs if view in output.get("data", {})]
    assert len(set(shown)) == 2
    told = kernel.run(f"""
        from ipywidgets.widgets.widget import _instances
        [(_instances[model].run == message["run"], message["state"])
         for model in {shown} for message in _instances[model].snapshot if message["kind"] == "state"]
    """)
    assert told.result == "[(True, 'finished'), (True, 'finished')]"
    kernel.run("for name in modules: del sys.modules[name]").done()


def complete(kernel: Kernel, code: str, cursor: int | None = None) -> list[str]:
    """Return what Tab offers at the cursor, which by default is at the end of the code."""
    sent = kernel.client.complete(code, len(code) if cursor is None else cursor)
    return list(kernel.reply_to(sent)["matches"])


def test_help_shows_an_example_and_every_option(kernel: Kernel) -> None:
    (page,) = kernel.run("%%horovod?").done().reply["payload"]
    text = page["data"]["text/plain"]
    assert "%%horovod -n -2\n    import horovod" in text
    for option in ("--np", "--timeout", "--push", "--pull", "--env", "--logs all|rank0|callbacks", "--dry-run"):
        assert option in text


@pytest.mark.parametrize(
    ("magic", "example"), [("torchrun", "init_process_group"), ("tensorflow", "MultiWorkerMirroredStrategy")]
)
def test_the_other_launch_magics_teach_and_complete(kernel: Kernel, magic: str, example: str) -> None:
    (page,) = kernel.run(f"%%{magic}?").done().reply["payload"]
    assert f"%%{magic} -n -2" in page["data"]["text/plain"]
    assert example in page["data"]["text/plain"]
    assert complete(kernel, f"%%{magic} --timeo") == ["--timeout"]


def test_barrier_teaches_and_completes(kernel: Kernel) -> None:
    (page,) = kernel.run("%%barrier?").done().reply["payload"]
    text = page["data"]["text/plain"]
    assert "%%barrier -n 4 --data digits\n    part = rows.to_pandas()" in text
    assert "context.allGather" in text
    assert complete(kernel, "%%barrier --d") == ["--data", "--dry-run"]
    assert complete(kernel, "%%horovod --da") == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "needs a number of ranks (-n 4), or a DataFrame"),
        ("-n -2", "tasks of a Spark barrier stage, so -n cannot be -2: use -n 2"),
        ("-n 0", "-n 4"),
        ("-n 2 --data digits", "the notebook has no variable `digits`"),
        ("--data 2x", "--data needs a DataFrame, such as --data df or --data df.limit(8): '2x'"),
        ("--data digits.limit(2) -n 2", "`digits.limit(2)` raised NameError: name 'digits' is not defined"),
    ],
)
def test_barrier_lines_that_make_no_sense(kernel: Kernel, line: str, said: str) -> None:
    cell = kernel.run(f"%%barrier {line}\nrank")
    assert cell.error.traceback == [f"OptionsError: {cell.error.evalue}"]
    assert said in cell.error.evalue


def only_spark_s(kernel: Kernel) -> bool:
    """Return whether the kernel has started only Spark, and no ranks."""
    return not [line for line in kernel.ranks() if "pyspark" not in line and "spark_daemon" not in line]


@pytest.mark.slow
def test_barrier_gives_each_rank_its_partition(spark_kernel: Kernel) -> None:
    kernel = spark_kernel
    kernel.run("%%barrier -n 2\ncontext.allGather(str(rank))").done()
    assert kernel.value("_.values") == "[['0', '1'], ['0', '1']]"
    kernel.run("digits = spark.range(0, 6, 1, 2)").done()
    cell = kernel.run("%%barrier --data digits --pull here\nhere = [row.id for row in rows]\nsum(here)").done()
    assert "finished" in cell.displayed
    assert kernel.value("_.values, here") == "([3, 12], [0, 1, 2])"
    data = "digits.where('id > 0').repartition( 2 ).selectExpr('id - 1')"
    kernel.run(f"%%barrier --name x --data {data} --pull here # two\nhere = sum(sum(row) for row in rows)\nhere").done()
    assert kernel.value("sum(_.values), len(_.values)") == "(10, 2)"
    cell = kernel.run(f"%%barrier --data {data}.count() -n 2\nrank")
    assert mentions(cell.error.evalue, "`int`", "not", "Spark DataFrame")
    cell = kernel.run("%%barrier --data digits\ndigits.count()")
    assert mentions(cell.error.evalue, "`digits`", "Spark DataFrame")
    cell = kernel.run("%%barrier --data digits --dry-run\nlist(rows), context")
    assert cell.done().result == ""
    assert only_spark_s(kernel)


def test_torchrun_gives_the_environment_of_torchrun(kernel: Kernel) -> None:
    kernel.run(
        "%%torchrun -n -2\nimport os\n"
        "[os.environ[name] for name in ('RANK', 'WORLD_SIZE')] + ['MASTER_PORT' in os.environ]"
    ).done()
    assert kernel.value("_.values") == "[['0', '2', True], ['1', '2', True]]"


def test_foreach_runs_the_cell_for_each_item(kernel: Kernel) -> None:
    """Targets and items have Python's syntax. One error lists all failures. An error in the line has no traceback."""
    kernel.run(
        "from itertools import product\nshops, rates, x, title, seen = ['a', 'b'], [1, 2], 'x', 'shops', []"
    ).done()
    cell = kernel.run(
        """
        %%foreach shop, (i, rate) in ((f"{x[0]}", x[1]) for x in product(shops, enumerate(rates))) -n -2 --name {title}
        sparkring.log(score=i * rate); seen.append(shop)
        if shop == "b" and i: 1 / 0
        shop * rate
        """
    )
    assert cell.error.ename == "ItemsFailed"
    assert "1 of 4 items failed" in cell.error.evalue
    assert mentions(cell.error.evalue, "line 3", '`if shop == "b" and i: 1 / 0`', "item 3", "shop='b'", "i=1", "rate=2")
    assert mentions(cell.displayed, "3 of 4 items finished", "1 failed")
    pages = [shown(output.data["text/html"]) for output in cell.outputs if output.output_type == "display_data"]
    assert mentions(pages[-1], "`seen`", "items' processes", "not")
    assert kernel.value("sparkring.last_result.values") == "['a', 'aa', 'b', None]"
    assert kernel.value("sparkring.last_result.best('score', mode='max').value") == "'aa'"
    assert kernel.value("'shop' in globals()") == "False"
    assert "shops" in kernel.run("%runs 1").displayed
    search = "sparkring.search(q=[3, 1, 2], sampler='grid', minimize='loss', prune=False)"
    assert "best loss 1 (trial 1)" in kernel.run(f"%%foreach q in {search} -n -2\nsparkring.log(loss=q)").displayed
    wrong = kernel.run("%%foreach x in shop_list -n -2\nx").error
    assert mentions(wrong.evalue, "%%foreach", "`shop_list`", "NameError", "name 'shop_list'", "not")
    wrong = kernel.run("%%foreach x in sparkring.search(x=[1, 2]) -n -2\nx").error
    assert mentions(wrong.evalue, 'minimize="val_loss"', 'maximize="accuracy"')
    kernel.run("left = iter(shops)").done()
    assert "of the iterator `left`" in kernel.run("%%foreach x in left --plan\nx").error.evalue
    plan = kernel.run("%%foreach x in iter(shops) -n -2 --plan\nx")
    assert "on this machine" in plan.result
    assert kernel.value("_.result.values, next(left)") == "(['a'], 'a')"
    assert complete(kernel, "%%foreach x in sho") == ["shops"]
    assert complete(kernel, "%%foreach x in shops.cop") == ["shops.copy"]
    assert complete(kernel, "%%foreach x in shops --retr") == ["--retries"]


def test_foreach_over_notebooks(kernel: Kernel, tmp_path: Path) -> None:
    """A notebook runs in the cell's namespace. Names of the clause override its parameters."""

    def write(name: str, *cells: str) -> None:
        made = [nbformat.v4.new_code_cell(cell) for cell in cells]
        made[0].metadata.tags = ["parameters"]
        nbformat.write(nbformat.v4.new_notebook(cells=made), tmp_path / name)

    cells = ("rate: float = 0.5; power = 2", "%matplotlib inline\nscore = scaled(rate) ** power\n!echo hi")
    write("good one.ipynb", *cells)
    write("other.ipynb", "power = 1", "score = rate + float(table.sum())")
    write("bad.ipynb", "power = 3", "score = rate\n1 / 0")
    kernel.run(f"import os, sparkring, numpy as np\nos.chdir({str(tmp_path)!r})\npower, table = 100, np.ones(3)").done()
    kernel.run("def scaled(x):\n    return x * factor\n\nfactor = 10").done()
    cell = kernel.run(
        """
        %%foreach path, rate in [(p, r) for p in ["good one", "other", "bad", "none"] for r in (1, 2)] -n -2
        %run {path}.ipynb
        score, power
        """
    )
    values = [(100, 2), (400, 2), (4.0, 1), (5.0, 1), None, None, None, None]
    assert kernel.value("sparkring.last_result.values") == str(values)
    assert "(bad.ipynb cell 2 line 2: `1 / 0`): items 4, 5" in cell.error.evalue
    assert mentions(cell.error.evalue, "line 2", "%run", f"no file {tmp_path}/none.ipynb")
    kernel.run('%%foreach rate in [3] -n -1\n%run "good one.ipynb"\nscore').done()
    assert kernel.value("_.values") == "[900]"


def test_tab_offers_options_and_their_values(kernel: Kernel) -> None:
    assert complete(kernel, "%%horovod --timeo") == ["--timeout"]
    assert sorted(complete(kernel, "%%horovod --logs ")) == ["all", "callbacks", "rank0"]
    assert complete(kernel, "%%horovod -n -2 --logs r") == ["rank0"]
    assert {"--np", "--timeout", "--pull"} <= set(complete(kernel, "%%horovod -"))
    assert complete(kernel, "%%horovod --logs ca\nprint(1)", cursor=19) == ["callbacks"]


def test_tab_in_the_cell_completes_the_notebooks_names(kernel: Kernel) -> None:
    kernel.run("learning_rate = 0.1").done()
    assert complete(kernel, "%%horovod -n -2\nprint(learning_r") == ["learning_rate"]


# ── Shards ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def uneven(kernel: Kernel, tmp_path: Path) -> Path:
    """Write a data set with row groups of 100, 10 and 10 rows; its path is called `path` in the notebook."""
    kernel.run(f"""
        import pathlib, pyarrow as pa, pyarrow.parquet as pq
        path = pathlib.Path({str(tmp_path)!r}) / "set of rows"
        path.mkdir()
        for number, rows in enumerate((100, 10, 10)):
            pq.write_table(pa.table({{"x": range(rows), "y": [0.5] * rows}}), path / f"part-{{number}}.parquet")
    """).done()
    return tmp_path / "set of rows"


@pytest.mark.parametrize("source", ["'{path}'", "path", "made", "made.dataset", "'{path}/*.parquet'"])
def test_shards_are_shown_before_a_launch(kernel: Kernel, uneven: Path, source: str) -> None:
    """For a path, a variable or shards(), a picture, a table and advice are shown. No rank is started."""
    kernel.run("import sparkring\nmade = sparkring.shards(path, 6)\ndataset = made.dataset").done()
    name = "dataset" if "." in source else source.format(path=uneven)
    cell = kernel.run(f"%shards {name} -n 3 --batch-size 5").done()
    (shown,) = (output.data for output in cell.outputs if output.output_type == "display_data")
    assert mentions(shown["text/plain"], "120 rows", "3 files", "3 row")
    assert mentions(shown["text/plain"], "rank 0 gets 100 rows", "10 times", "rank 1", "gets 10", "20 steps", "2")
    assert shown["text/html"].count("<img") == 2
    assert mentions(shown["text/plain"], "3 ranks", "8 steps of 5 rows", "0 rows left")


def test_shards_take_what_the_object_says(kernel: Kernel, uneven: Path) -> None:
    """Batch size and remainder are those of shards(), unless the line says otherwise; columns are set in shards()."""
    kernel.run("import sparkring\nmade = sparkring.shards(path, 7, remainder='pad', columns=['x'])").done()
    told = kernel.run("%shards made").done().displayed
    assert mentions(told, "1 rank", "18 steps of 7 rows", "6 rows read twice")
    assert "columns x" in told
    assert mentions(
        kernel.run("%shards made --batch-size 10 --remainder drop").done().displayed,
        "12 steps of 10 rows",
        "0 rows left",
    )
    assert "leave out --columns and --where" in kernel.run("%shards made --columns y").error.evalue


def test_shards_of_chosen_columns_and_rows(kernel: Kernel, uneven: Path) -> None:
    """--columns and --where choose the columns and rows that are read."""
    told = kernel.run(f"%shards '{uneven}' -n 2 --columns y --where \"x >= 10\"").done().displayed
    assert mentions(told, "90 rows", "3 files", "3 row")
    assert "columns y · where x >= 10" in told


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%shards", "OptionsError: %shards: the following arguments are required: PATH|DF"),
        ("%shards nowhere -n 2", "OptionsError: %shards nowhere: there is neither a variable nor a file"),
        ("%shards ./nowhere -n 2", "DataError: ./nowhere does not exist"),
        (
            "%shards number",
            "OptionsError: %shards takes a path, a Spark DataFrame or the result of sparkring.shards(…)",
        ),
        ("%shards path --columns z", "has no column `z`"),
        ("%shards dbfs://x/y", "PathError: dbfs://x/y: dbfs: must be followed by one slash"),
    ],
)
def test_shards_that_cannot_be_shown(kernel: Kernel, uneven: Path, line: str, said: str) -> None:
    """The error is one sentence, without a traceback."""
    kernel.run("number = 3").done()
    cell = kernel.run(line)
    assert said in "\n".join(cell.error.traceback)
    assert len(cell.error.traceback) == 1


def test_help_and_tab_of_shards(kernel: Kernel, uneven: Path) -> None:
    """`%shards?` shows the help; Tab offers names and paths first, then options."""
    (page,) = kernel.run("%shards?").done().reply["payload"]
    text = page["data"]["text/plain"]
    assert "%shards /dbfs/data/digits -n 4 --batch-size 256" in text
    assert "--remainder drop|pad|join" in text
    assert {"--batch-size", "--columns"} <= set(complete(kernel, "%shards path -n 4 --"))
    kernel.run("patience, frame_path = 3, path").done()
    assert complete(kernel, "%shards pa") == ["path"]
    part = f"%shards {uneven.parent}"
    assert complete(kernel, part) == [f"{uneven.parent}/"]


# ── Checkpoints ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def saved(kernel: Kernel, tmp_path: Path) -> Path:
    """Make a directory of checkpoints, `path` in the notebook, of steps 10, 20 and, without a commit, 30."""
    kernel.run(f"""
        import pathlib
        from sparkring.checkpointing import folder
        from sparkring.checkpointing.digests import digest_of
        from sparkring.checkpointing.entries import Commit, File, Name
        from sparkring.runtime.storage import locate
        path = pathlib.Path({str(tmp_path)!r}) / "run of today"
        for step in (10, 20, 30):
            name, data = str(Name(step, 1_795_294_802_123, step)), bytes(1000)
            (path / name).mkdir(parents=True)
            (path / name / "rank-0.safetensors").write_bytes(data)
            files = (File("rank-0.safetensors", 1000, digest_of(data)),)
            if step < 30:
                found = Commit(step, 1.7e9 + step, files, {{"loss": 1 / step}}, "line", "run-1", 2, False, "", {{}})
                folder.write_commit(locate(path), name, found)
        (path / "best.keras").write_bytes(b"123")
    """).done()
    return tmp_path / "run of today"


@pytest.mark.parametrize("source", ["'{path}'", "path --metric loss --mode max", "'file://{path}' --check"])
def test_checkpoints_are_shown(kernel: Kernel, saved: Path, source: str) -> None:
    """For a path, a URL or a variable, a picture, a table and the resume point are shown."""
    cell = kernel.run(f"%checkpoints {source.format(path=saved)}").done()
    (shown,) = (output.data for output in cell.outputs if output.output_type == "display_data")
    assert mentions(shown["text/plain"], "resume", "step 20")
    assert mentions(shown["text/plain"], "Step 30", "no commit")
    assert re.search(r"best.keras +Keras model", shown["text/plain"])
    assert (mentions(shown["text/plain"], "best", "step 10", "0.1")) == ("--metric" in source)
    assert (mentions(shown["text/plain"], "2.00 kB", "read", "match")) == ("--check" in source)
    assert len(re.findall('<img alt="[^"]', shown["text/html"])) == 1
    assert "checked" not in cell.printed, "it took a moment"


def test_checkpoints_of_a_store_and_of_the_last_run(kernel: Kernel, saved: Path) -> None:
    """A store has a directory and a metric; without a source, the newest run's directory is shown."""
    kernel.run("class Store: directory, metric, mode = str(path), 'loss', 'max'\nstore = Store()").done()
    assert mentions(kernel.run("%checkpoints store").done().displayed, "best", "step 10")
    assert complete(kernel, "%checkpoints st") == ["store"]
    kernel.run("""
        from sparkring.history.events import RunStarted
        from sparkring.history.record import RunRecord
        from sparkring.history.run_folder import RunFolder
        from sparkring.history.run_store import new_id
        found = RunFolder(new_id())
        started = RunStarted(0.0, "id", "t", "c", 1, "local", "plain", "all", checkpoint_dir=str(path))
        found.seen([started], RunRecord())
        found.ended(RunRecord())
    """).done()
    try:
        assert mentions(kernel.run("%checkpoints").done().displayed, "resume", "step 20")
    finally:
        kernel.run("import shutil\nshutil.rmtree(found.path)").done()


def test_a_check_finds_what_has_changed(kernel: Kernel, saved: Path) -> None:
    """A check notices a single changed byte."""
    kernel.run("file = path / str(Name(20, 1_795_294_802_123, 20)) / 'rank-0.safetensors'").done()
    kernel.run("file.write_bytes(bytes(999) + b'1')").done()
    assert mentions(kernel.run("%checkpoints path").done().displayed, "resume", "step 20")
    told = kernel.run("%checkpoints path --check").done().displayed
    assert mentions(told, "resume", "step 10")
    assert mentions(told, "1 checkpoint", "damaged", "step 20")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%checkpoints", "OptionsError: no saved run had a --checkpoint-dir: name a directory"),
        ("%checkpoints nowhere", "OptionsError: %checkpoints nowhere: there is neither a variable nor a folder"),
        ("%checkpoints number", "OptionsError: %checkpoints takes a path or the result of sparkring.checkpoints(…)"),
        ("%checkpoints dbfs://x/y", "PathError: dbfs://x/y: dbfs: must be followed by one slash"),
        ("%checkpoints path --mode max", "OptionsError: %checkpoints: --mode max needs a metric"),
    ],
)
def test_checkpoints_that_cannot_be_shown(kernel: Kernel, saved: Path, line: str, said: str) -> None:
    """The error is one sentence, without a traceback."""
    kernel.run("number = 3").done()
    cell = kernel.run(line)
    assert said in "\n".join(cell.error.traceback)
    assert len(cell.error.traceback) == 1


def test_no_checkpoints_are_no_mistake(kernel: Kernel, tmp_path: Path) -> None:
    """If a folder does not exist, one sentence is printed, without an error."""
    assert mentions(kernel.run(f"%checkpoints {tmp_path}/none").done().printed, f"{tmp_path}/none", "not")


def test_help_and_tab_of_checkpoints(kernel: Kernel, saved: Path) -> None:
    """`%checkpoints?` shows the help; Tab offers options, names and folders."""
    (page,) = kernel.run("%checkpoints?").done().reply["payload"]
    assert "%checkpoints s3://bucket/run1 --metric val_loss" in page["data"]["text/plain"]
    assert "--mode min|max" in page["data"]["text/plain"]
    assert {"--check", "--metric"} <= set(complete(kernel, "%checkpoints path --"))
    assert sorted(complete(kernel, "%checkpoints path --metric loss --mode ")) == ["max", "min"]
    kernel.run("patience = 3").done()
    assert complete(kernel, "%checkpoints pa") == ["path"]
    assert complete(kernel, f"%checkpoints {saved.parent}") == [f"{saved.parent}/"]


# ── %doctor ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_doctor_in_a_notebook(kernel: Kernel, tmp_path: Path) -> None:
    """The findings are HTML and text, a wrong path is one of them, and the directory stays as it was."""
    cell = kernel.run(f"%doctor {tmp_path}/run1").done()
    (shown,) = (output.data for output in cell.outputs if output.output_type == "display_data")
    assert mentions(shown["text/plain"], "✓ local rank", "127.0.0.1", "returned a value")
    assert mentions(shown["text/plain"], "✓ driver", "/run1", "did not exist", "written", "read", "listed")
    assert shown["text/html"].count("<table") == 4
    assert list(tmp_path.iterdir()) == []
    wrong = kernel.run("%doctor dbfs://x/y").done().displayed
    assert mentions(wrong, "✗ driver", "dbfs://x/y", "one slash")
    assert complete(kernel, f"%doctor {tmp_path.parent}") == [f"{tmp_path.parent}/"]


def test_stop_ends_doctor(kernel: Kernel) -> None:
    """An interrupt ends the check that is under way, and with it the magic."""
    kernel.run("""
        from sparkring.engine.doctor import machine
        real = machine.local_rank
        import queue
        ends = queue.Queue()
        def machine_waits(cancelled):
            print("waiting", flush=True)
            ends.put(cancelled.wait(100))
        machine.local_rank = machine_waits
    """).done()
    waits: list[float] = []

    def interrupt(output: nbformat.NotebookNode) -> None:
        if "waiting" in output.get("text", "") and not waits:
            waits.append(time.monotonic())
            kernel.interrupt()

    cell = kernel.receive(kernel.send("%doctor"), interrupt)
    kernel.run("machine.local_rank = real").done()
    assert mentions(cell.error.evalue, "sparkring: interrupted", "before", "all checks")
    assert kernel.run("print(ends.get(timeout=100))").done().printed == "True\n"


# ── What a cell takes, shows and brings back ──────────────────────────────────────────────────────────────────────────


def test_pull_puts_names_into_the_notebook(kernel: Kernel) -> None:
    kernel.run("base = 10").done()
    cell = kernel.run("%%horovod -n -2 --pull total,who\ntotal, who = base + size, rank\nrank * 2")
    assert cell.done().result == "rank 0: 0\nrank 1: 2"
    assert kernel.value("_.values, total, who") == "([0, 2], 12, 0)"


def test_names_that_the_cell_binds_stay_on_the_ranks(kernel: Kernel) -> None:
    kernel.run("%%horovod\nonly_there = 1\nexit()").done()  # which is a success
    assert kernel.value("'only_there' in globals()") == "False"


def test_dry_run_shows_a_table_and_starts_nothing(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("import threading\nweights = [0.5] * 1000\nlock = threading.Lock()").done()
    cell = kernel.run(f"""
        %%horovod -n -2 --dry-run
        open({str(tmp_path / "ran")!r}, "w")
        print(weights, lock)
    """).done()
    header, _, *rows = cell.displayed.splitlines()
    assert header.split()[:4] == ["name", "type", "size", "sent"]
    assert [row.split()[0] for row in rows] == ["lock", "weights"]
    assert "cannot" in rows[0]
    assert "by value" in rows[1]
    assert "text/html" in cell.outputs[0].data
    assert not cell.result
    assert not (tmp_path / "ran").exists()


def test_shell_commands_and_line_magics_run_on_the_ranks(kernel: Kernel) -> None:
    cell = kernel.run("""
        %%horovod -n -2
        !echo shell on rank $rank of {size}
        lines = !echo one; echo two
        %matplotlib inline
        %env SAID=yes
        import os
        lines, os.environ["SAID"]
    """)
    cell.done()
    assert mentions(cell.displayed, "rank 0 of 2")
    assert mentions(cell.displayed, "rank 1 of 2")
    assert kernel.value("_.values[1]") == "(['one', 'two'], 'yes')"


def test_a_cell_that_ends_with_a_semicolon(kernel: Kernel) -> None:
    """It shows no value. It also assigns to a variable of the notebook, and the run says so, but only once."""
    kernel.run("count = [0]").done()
    said = "assigns `count` on the ranks only: the notebook's value does not change. --pull count copies rank 0's"
    for number, title in enumerate(("where = %pwd", "where = %pwd (2)")):
        cell = kernel.run("%%horovod -n -2\nwhere = %pwd\ncount = count + [rank]\nrank;").done()
        assert not cell.result
        notices = kernel.value("import sparkring; [each.text for each in sparkring.last_result.record.notices]")
        assert (said in notices) == (number == 0)
        assert kernel.value("import sparkring; sparkring.last_result.record.title") == repr(title)


TRAIN = """
import argparse
import sys

from beside import scale

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)

def main():
    arguments = parser.parse_args()
    if arguments.lr > 1:
        raise ValueError("too fast")
    from multiprocessing import get_context

    with get_context("spawn").Pool(1) as pool:
        return pool.map(scaled, [arguments.lr])[0]

def scaled(x):
    return x * scale

if __name__ == "__main__":
    seen = [sys.argv, "lr" in globals(), "rank" in globals()]
    result = main()
    sys.exit(0)
"""


def test_scripts_run_on_the_ranks(kernel: Kernel, tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "beside.py").write_text("scale = 10")
    kernel.run(f"folder, lr, result = {str(folder)!r}, 0.5, 'the notebook\\'s'").done()
    cell = kernel.run("""
        %%horovod -n -2
        before = [rank]
        %run {folder}/train.py --lr {(lr + rank) / 2}
        before, result, seen, main.__name__, __name__
    """)
    path = str(folder / "train.py")
    cell.done()
    assert eval(kernel.value("_.values")) == [
        ([rank], 2.5 + 5 * rank, [[path, "--lr", str(0.25 + rank / 2)], False, False], "main", "__main__")
        for rank in (0, 1)
    ]
    failed = kernel.run("%%horovod -n -2\n%run {folder}/train.py --lr 2").error.evalue
    assert re.search(r"^\S+/jobs/train\.py:13, in main:$", failed, re.MULTILINE)
    assert re.search(r"^→ 13 +raise ValueError\(\"too fast\"\)$", failed, re.MULTILINE)
    assert mentions(failed, "called from", "cell line 2", "%run {folder}/train.py --lr 2\n")
    log = kernel.run(re.findall(r"^Whole log: (%logs .*)$", failed, re.MULTILINE)[0]).done().printed
    assert f'File "{path}", line 13, in main\n    raise ValueError("too fast")\n' in log
    assert "sparkring" not in log
    rows = kernel.run("%%horovod --dry-run\n%run -i {folder}/beside.py").done().displayed
    assert re.search(r"beside\.py +script +10 B +by value", rows)


def test_output_is_shown_while_the_cell_runs(kernel: Kernel, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    seen: list[str] = []

    def look(output: nbformat.NotebookNode) -> None:
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        # The rank waits for the file, so its first line must be shown before the cell ends.
        if "the first line" in text and not go_on.exists():
            seen.append(text)
            go_on.touch()

    kernel.run("import os, time").done()
    sent = kernel.send(f"""
        %%horovod --timeout {DEADLINE_S}
        print("the first line")
        while not os.path.exists({str(go_on)!r}):
            time.sleep(0.01)
        print("the last line")
    """)
    cell = kernel.receive(sent, look).done()
    assert seen
    assert "the last line" not in seen[0]
    assert "the last line" in cell.displayed


def shown(page: str) -> str:
    """Return the text that a reader of the HTML sees, with single spaces."""
    return " ".join(html.unescape(re.sub(r"(?s)<(style|script)\b.*?</\1>|<[^>]*>", " ", page)).split())


def test_outputs_are_html_and_text_and_convert(kernel: Kernel) -> None:
    code = "%%horovod -n -2\nprint('said by', rank)\nrank"
    cell = kernel.run(code).done()
    place, display = (output for output in cell.outputs if output.output_type == "display_data")
    assert set(place.data) == set(display.data) == {"text/html", "text/plain"}
    assert not shown(place.data["text/html"])
    assert "2 ranks finished" in display.data["text/plain"]
    for kind in ("text/html", "text/plain"):
        text = shown(display.data[kind])
        assert re.search(r"\bfinished\b", text)
        assert re.search(r"\b2 ranks\b", text)
        assert "said by" in text

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code, outputs=cell.outputs)])
    nbformat.validate(notebook)
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert shown(display.data["text/html"]) in shown(page)


def test_the_result_of_a_function_run_from_the_notebook(kernel: Kernel) -> None:
    kernel.run("""
        from sparkdl import HorovodRunner
        scale = 3

        def train(start):
            from sparkdl.horovod import log_to_driver
            log_to_driver(f"rank {rank} says so")
            print("not shown")
            return start + scale * rank
    """).done()
    cell = kernel.run("HorovodRunner(np=-2).run(train, start=7)").done()
    assert cell.result == "7"
    assert "rank 0 says so" in cell.displayed
    assert "rank 1 says so" in cell.displayed
    assert "not shown" not in cell.displayed
    assert kernel.value("import sparkring; sparkring.last_result.values") == "[7, 10]"
    assert kernel.value("sparkring.HorovodRunner is HorovodRunner") == "True"


def test_a_cell_gives_on_a_rank_what_it_gives_in_the_notebook(kernel: Kernel) -> None:
    """pickle, inspect, submodules and names in strings work, in the cell and in functions."""
    kernel.run("""
        import inspect, pickle, traceback, urllib.request
        import pandas as pd

        class Net:
            def call(self, x):
                return x / zero  # the fault
        def large(frame): return frame.query("x > @limit").x.tolist()
        net, zero, limit, scale = Net(), 0, 1, 10
        frame = pd.DataFrame({"x": [1, 2, 3]})
    """).done()
    cell = """
        again = pickle.loads(pickle.dumps([net, Net]))
        try:
            net.call(1)
        except ZeroDivisionError:
            shown = traceback.format_exc().splitlines()[-3].strip()
        host = urllib.request.Request("http://host/").host
        in_strings = large(frame), frame.eval("x * @scale").sum(), eval("scale + limit"), "{scale}".format(**globals())
        repr([type(again[0]) is again[1] is type(net), inspect.getsource(net.call), shown, host, in_strings])
    """
    here = kernel.value(cell)
    assert kernel.value(f"%%horovod\n{textwrap.dedent(cell)}") == f"rank 0: {here}"
    assert "the fault" in here

    error = kernel.run("%%horovod\npick = 'lim' + 'it'\nframe.query(f'x > @{pick}')").error
    assert mentions(error.evalue, "`limit`", "not")


ASKS = """
    import sparkring
    run = sparkring.run(lambda: input("name? ") + "!", np=-1, framework="plain", background={})
    {}
"""


def test_the_front_end_answers_what_a_rank_asks(kernel: Kernel) -> None:
    """The kernel asks as its own input() does. A run in the background is answered by the panel."""
    sent = kernel.send(ASKS.format(False, "run.value"))
    asked = kernel.client.get_stdin_msg(timeout=DEADLINE_S)["content"]
    kernel.client.input("Ann")
    assert (asked["prompt"], kernel.receive(sent).result) == ("name? ", "'Ann!'")
    kernel.run(ASKS.format(True, "")).done()
    told = kernel.run("""
        import time
        from sparkring.views import panel
        while not run.record.questions:
            time.sleep(0.02)
        answer = {"kind": "answer", "run": run.record.run_id, "rank": 0, "number": 1, "text": "Bob"}
        panel._page._heard(None, answer, [])
        run.result().value
    """)
    assert told.result == "'Bob!'"


def test_log_to_driver_prints_on_the_driver(kernel: Kernel) -> None:
    assert kernel.run("import sparkdl.horovod; sparkdl.horovod.log_to_driver('here')").done().printed == "here\n"


@pytest.mark.slow
def test_log_callback_reports_from_the_ranks(kernel: Kernel) -> None:
    cell = kernel.run("""
        %%horovod --logs callbacks
        import numpy as np
        from tensorflow import keras
        from sparkdl.horovod.tensorflow.keras import LogCallback

        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        print("not shown")
        model.fit(np.ones((8, 2)), np.ones(8), epochs=2, verbose=0, callbacks=[LogCallback()])
        LogCallback.__name__
    """)
    cell.done()
    assert "epoch 1 of 2 begins" in cell.displayed
    assert re.search(r"epoch 2 ends after .*: loss ", cell.displayed)
    assert "not shown" not in cell.displayed


# ── Bad input ─────────────────────────────────────────────────────────────────────────────────────────────────────────

NOT_USABLE = {
    "a number that is none": (
        "%%horovod -n x\n1",
        r"OptionsError: .*'x' is not a whole number of ranks \(-2: .*",
    ),
    "too many ranks": ("%%horovod -n -2000\n1", r"OptionsError: .*-2000 is beyond the limit of 1024 ranks.*"),
    "an unknown option": ("%%horovod --nonsense\n1", r"OptionsError: .*--nonsense.* See %%horovod\? for the options\."),
    "a word that is no option": ("%%horovod twice\n1", r"OptionsError: .*twice.*"),
    "an option without its value": ("%%horovod --timeout\n1", r"OptionsError: .*--timeout.*expected one argument.*"),
    "a time that is none": (
        "%%horovod --timeout soon\n1",
        r"OptionsError: .*'soon' is not a number of seconds greater than 0.*",
    ),
    "a choice that is none": ("%%horovod --logs some\n1", r"OptionsError: .*'some'.*all.*rank0.*callbacks.*"),
    "a variable without a value": ("%%horovod --env KEY\n1", r"OptionsError: .*'KEY' is not of the form KEY=VALUE.*"),
    "a quote that does not end": ("%%horovod --name 'it\n1", r"OptionsError: .*No closing quotation.*"),
    "only white space": ("%%horovod -n -2\n   \n\t\n", r"OptionsError: the cell is empty.*"),
    "a syntax error": (
        "%%horovod -n -2\nx = 1\ny = (2\nz = 3\n",
        r"CaptureError: cell line 3: '\(' was never closed \(SyntaxError\)\n    y = \(2\n        \^",
    ),
    "a syntax error below empty lines": (
        "%%horovod -n -2\n\n\nx = = 1\n",
        r"CaptureError: cell line 4: invalid syntax \(SyntaxError\)\n    x = = 1\n        \^",
    ),
    "wrong indentation": (
        "%%horovod\nif True:\nprint(1)",
        r"CaptureError: cell line 3: expected an indented block .* \(SyntaxError\)\n    print\(1\)\n    \^",
    ),
    "a return": (
        "%%horovod -np -2\nx = 1\nreturn x",
        r"CaptureError: cell line 3: 'return' outside function \(SyntaxError\)\n    return x\n    \^\n"
        r"The cell already runs as the body of a function that returns the value of its last expression\. .*",
    ),
    "a yield": (
        "%%horovod\nfor x in range(3):\n    yield x",
        r"CaptureError: cell line 3: 'yield' outside function \(SyntaxError\)\n        yield x\n        \^\n"
        r"The cell is the body of a function .* Collect the values in a list.*",
    ),
    "a name that exists nowhere": (
        "%%horovod -n -2\nx = 1\nprint(learning_rte)",
        r"CaptureError: cell line 3 reads `learning_rte`, which is defined neither in this cell nor in the notebook\. "
        r"Did you mean `learning_rate`\?",
    ),
    "a name below empty lines": (
        "%%horovod\n\n\nnowhere_at_all",
        r"CaptureError: cell line 4 reads `nowhere_at_all`.*",
    ),
    "a lock": (
        "%%horovod -n -2\nprint(lock)",
        r"CaptureError: cell line 2 reads `lock`, which cannot be sent .*: `lock` is a `_thread\.lock`; make it in .*",
    ),
    "a lock deep inside": (
        "%%horovod -n -2\nx = 1\nx = trainer",
        r"CaptureError: cell line 3 reads `trainer`, which cannot be sent .*: `trainer\.state\['guard'\]` is a "
        r"`_thread\.lock`; .*",
    ),
    "an open file": (
        "%%horovod -n -2\nfile.read()",
        r"CaptureError: cell line 2 reads `file`, which cannot be sent .*: `file` is an open file; pass its path and "
        r"open it in the cell\.",
    ),
    "a name to push that is not there": (
        "%%horovod --push learning_rat\n1",
        r"CaptureError: `learning_rat` should be sent to the ranks, but the notebook does not define it\. Did you mean "
        r"`learning_rate`\?",
    ),
    "a cell magic inside": (
        "%%horovod -n -2\n%%time\nx = 1",
        r"CaptureError: cell line 2: %%time needs the notebook's IPython, .* Run it in a separate cell\. .*",
    ),
    "a cell magic further down": ("%%horovod\nx = 1\n%%bash\nls", r"CaptureError: cell line 3: %%bash needs .*"),
    "an unknown magic inside": ("%%horovod\nx = 1\n%nonsense", r"CaptureError: cell line 3: %nonsense needs .*"),
    "a script that is not there": (
        "%%horovod\nx = 1\n%run no/such.py --lr 0.1",
        r"CaptureError: cell line 3: %run no/such\.py --lr 0\.1: there is no file /.*/no/such\.py\.",
    ),
    "help inside": ("%%horovod\nx = 1\nx?", r"CaptureError: cell line 3: %pinfo needs .*"),
    "a run that is not there": (
        "%logs no-such-run",
        r"OptionsError: no saved run called 'no-such-run': %runs lists them\.",
    ),
    "a count that is none": (
        "%runs some",
        r"OptionsError: no saved run called 'some': %runs lists them\.",
    ),
}


@pytest.fixture
def not_usable(kernel: Kernel) -> Iterator[Kernel]:
    """Return the shared kernel with the variables that the cells above read."""
    kernel.run("""
        import threading

        class Trainer:
            def __init__(self):
                self.state = {"guard": threading.Lock()}

        learning_rate, lock, trainer, file = 0.1, threading.Lock(), Trainer(), open("/dev/null")
    """).done()
    yield kernel
    kernel.run("file.close()").done()


@pytest.mark.parametrize("what", NOT_USABLE)
def test_bad_input_is_one_clear_sentence(not_usable: Kernel, what: str) -> None:
    code, wanted = NOT_USABLE[what]
    cell = not_usable.receive(not_usable.client.execute(code))
    assert cell.status == "error"
    assert [output.output_type for output in cell.outputs] == ["error"]  # no panel, as no run was started
    assert cell.error.traceback == [f"{cell.error.ename}: {cell.error.evalue}"]
    assert re.fullmatch(wanted, cell.error.traceback[0])
    assert not not_usable.ranks()


def test_the_next_launch_after_bad_input(not_usable: Kernel) -> None:
    for what in NOT_USABLE:
        not_usable.receive(not_usable.client.execute(NOT_USABLE[what][0]))
    assert not_usable.run("%%horovod -n -2\nrank").done().result == "rank 0: 0\nrank 1: 1"


def test_an_empty_cell_is_refused_by_ipython_itself(kernel: Kernel) -> None:
    cell = kernel.run("%%horovod -n -2\n")
    assert mentions(cell.printed, "UsageError", "%%horovod", "empty")


def test_a_name_to_pull_that_rank_0_lacks(kernel: Kernel) -> None:
    cell = kernel.run("%%horovod -n -2 --pull weigths\nweights = rank")
    assert mentions(cell.error.evalue, "`weigths`", "`weights`")
    cell = kernel.run("%%horovod -n -2 --pull weights\nif rank:\n    weights = 1\nrank + 5")
    assert mentions(cell.error.evalue, "rank 0", "no", "`weights`")
    assert kernel.value("import sparkring; sparkring.last_result.values") == "[5, 6]"


@pytest.mark.slow
def test_spark_objects_stay_on_the_driver(spark_kernel: Kernel) -> None:
    kernel = spark_kernel
    kernel.run("rows = spark.range(3)").done()
    for name, wanted in {
        "spark": "`spark` is a SparkSession; it exists only on the driver.",
        "rows": "`rows` is a Spark DataFrame; it exists only on the driver. Collect it with `.toPandas()`",
    }.items():
        cell = kernel.run(f"%%horovod -n -2\nx = 1\n{name}")
        assert cell.error.traceback == [f"CaptureError: {cell.error.evalue}"]
        assert mentions(cell.error.evalue, "line 3", f"`{name}`", "cannot", "ranks", f"{wanted}")
    assert only_spark_s(kernel)
    kernel.run("%%horovod -n -2\nrank").done()


# ── A rank that fails ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_failing_rank_is_told_with_the_line_of_the_cell(kernel: Kernel) -> None:
    cell = kernel.run("""
        %%horovod -n -2
        print("rank", rank, "is here")

        if rank == 1:
            [][3]
    """)
    assert cell.error.ename == "RunFailed"
    first, place, log = cell.error.traceback[0].split("\n\n")  # the panel shows the rest
    assert first.startswith("RunFailed: ")
    assert place == "cell line 5"
    assert log.startswith("Whole log: %logs ")
    assert mentions(cell.error.evalue.partition("\n")[0], "rank 1", "failed", "IndexError")
    assert re.search(r"^cell line 5:$", cell.error.evalue, re.MULTILINE)
    assert re.search(r"^→ 5 +\[\]\[3\]$", cell.error.evalue, re.MULTILINE)
    assert mentions(cell.error.evalue, "Last lines", "rank 1:\n  rank 1 is here")
    assert "rank 1 failed: IndexError" in cell.displayed
    assert not kernel.ranks()
    kernel.run("%%horovod -n -2\nrank").done()


def test_the_line_of_a_failure_counts_empty_lines_at_the_top(kernel: Kernel) -> None:
    cell = kernel.receive(kernel.client.execute("%%horovod\n\n   \n1 / 0"))
    assert re.search(r"^→ 4 +1 / 0$", cell.error.evalue, re.MULTILINE)


# ── Ends ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def pids_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\bpid (\d+)", text)]


def test_interrupt_ends_the_ranks_and_what_would_follow(kernel: Kernel) -> None:
    pids: set[int] = set()

    def interrupt(output: nbformat.NotebookNode) -> None:
        before = len(pids)
        pids.update(pids_in(output.get("data", {}).get("text/plain", "")))
        if before < 2 == len(pids):
            kernel.interrupt()

    kernel.run("import os, time").done()
    sent = kernel.send("""
        %%horovod -n -2 --timeout 600
        print("pid", os.getpid())
        time.sleep(600)
    """)
    following = [kernel.send("reached = True"), kernel.send("%%horovod\n1")]
    cell = kernel.receive(sent, interrupt)
    assert cell.error.ename == "KeyboardInterrupt"
    assert "interrupted" in cell.displayed
    assert [kernel.receive(each).status for each in following] == ["aborted", "aborted"]
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))
    assert kernel.value("'reached' in globals()") == "False"
    assert kernel.run("%%horovod -n -2\nrank").done().result == "rank 0: 0\nrank 1: 1"


def test_a_killed_kernel_leaves_nothing_alive(kernels: Callable[..., Kernel], wait_until: Callable[..., Any]) -> None:
    """Even a process that a rank has started in a session of its own is ended."""
    kernel = kernels()
    pids: set[int] = set()

    class Enough(Exception):
        pass

    def look(output: nbformat.NotebookNode) -> None:
        pids.update(pids_in(output.get("data", {}).get("text/plain", "")))
        if len(pids) == 3:
            raise Enough

    kernel.run("import os, subprocess, time").done()
    sent = kernel.send("""
        %%horovod -n -2 --timeout 600
        if rank == 0:
            away = subprocess.Popen(["sleep", "600"], start_new_session=True)
            print("pid", away.pid)
        print("pid", os.getpid())
        time.sleep(600)
    """)
    with pytest.raises(Enough):
        kernel.receive(sent, look)
    family = {child.pid for child in kernel.process.children(recursive=True)}
    assert pids <= family
    kernel.process.kill()
    wait_until(lambda: not any(map(psutil.pid_exists, family)), "all that the kernel started has ended", 10.0 * PACE)


# ── Warm gangs ────────────────────────────────────────────────────────────────────────────────────────────────────────

GANG_LINES = {
    "%gang start": r"OptionsError: %gang start needs a number of ranks: .*",
    "%gang start -n 0": r"OptionsError: %gang start needs a number of ranks: .*",
    "%gang nonsense": r"OptionsError: %gang does not take 'nonsense': .*",
    "%gang --stacks": r"OptionsError: %gang --stacks needs a gang that is up and free: .*",
    "%%ranks 0\n1": r"OptionsError: %%ranks needs a gang that is up and free: .*",
}
WITH_A_GANG = {
    "%gang start -n -2": r"OptionsError: a warm gang of 2 ranks on this machine is already up: %gang stop ends it\.",
    "%%ranks\n1": r"OptionsError: %%ranks takes the ranks first, .*",
    "%%ranks x\n1": r"OptionsError: %%ranks takes the ranks first, .*",
    "%%ranks 7\n1": r"OptionsError: %%ranks 7: the gang has ranks 0 to 1\.",
    "%%ranks 0 -n -3\n1": r"OptionsError: %%ranks runs on the gang that was started last, which has -n -2: .*",
    "%%ranks 0 --gpus 1\n1": r"OptionsError: --gpus 1: the ranks of the .* have a different number of GPUs\. .*",
    "%%horovod --gpus 1\n1": r"OptionsError: --gpus 1: the ranks of the .* have a different number of GPUs\. .*",
}


def complaint(kernel: Kernel, code: str) -> str:
    """Run a cell, check that it fails with an error of one line, and return this line."""
    cell = kernel.run(code)
    assert cell.error.traceback == [f"{cell.error.ename}: {cell.error.evalue}"]
    return str(cell.error.traceback[0])


@pytest.fixture
def gang(kernel: Kernel) -> Iterator[Kernel]:
    """Start two warm ranks in the shared kernel, and return the kernel."""
    assert "started in" in kernel.run("%gang start -n -2 --framework plain").done().printed
    yield kernel
    kernel.run("%gang stop").done()


def test_cells_on_a_gang(gang: Kernel) -> None:
    gang.run("rate, model = 0.5, {'steps': 0}").done()
    pids = gang.run("%%ranks all\nimport os\nmodel['steps'] += 1\nos.getpid()").done().result
    assert gang.run("%%ranks all\nos.getpid()").done().result == pids
    assert gang.run("%%ranks all\nmodel['steps'] += 1\nmodel, rate").done().result == "ranks 0, 1: ({'steps': 2}, 0.5)"
    gang.run("rate = 0.25").done()
    assert gang.run("%%ranks 1 --pull model\nmodel['steps'] = 9\nrate").done().result == "rank 1: 0.25"
    assert gang.value("model") == "{'steps': 9}"
    # A value that was pulled does not count as newer than the ranks' own value.
    assert gang.run("%%ranks 1\nmodel['steps'] += 1\nmodel").done().result == "rank 1: {'steps': 10}"
    # Run cells with other magics and another number of ranks.
    assert gang.run("%%torchrun\nimport os\nos.environ['RANK']").done().result == "rank 0: '0'\nrank 1: '1'"
    gang.run("%%horovod -n -1\n'os' in globals()").done()
    assert gang.value("_.values") == "[False]"
    shown = gang.run("%gang").done().displayed
    assert mentions(shown, "gang of 2", "this machine", "-2", "plain", "idle")
    assert re.search(r"^ *0 .* idle", gang.run("%gang --stacks").done().displayed, re.MULTILINE)
    assert "stopped" in gang.run("%gang stop").done().printed
    assert "no gang is" in gang.run("%gang").done().printed + gang.run("%gang").displayed


def test_lines_that_a_gang_cannot_use(kernel: Kernel) -> None:
    for code, wanted in GANG_LINES.items():
        assert re.fullmatch(wanted, complaint(kernel, code))
    kernel.run("%gang start -n -2").done()
    for code, wanted in WITH_A_GANG.items():
        assert re.fullmatch(wanted, complaint(kernel, code))
    kernel.run("%gang stop local").done()


def test_help_and_tab_of_gangs(kernel: Kernel) -> None:
    (page,) = kernel.run("%gang?").done().reply["payload"]
    for word in ("%gang start -n -4", "%gang --stacks", "--idle", "--framework"):
        assert word in page["data"]["text/plain"]
    (page,) = kernel.run("%%ranks?").done().reply["payload"]
    assert "%%ranks 0,2-3" in page["data"]["text/plain"]
    assert sorted(complete(kernel, "%gang st")) == ["start", "stop"]
    assert complete(kernel, "%gang start --id") == ["--idle"]
    assert complete(kernel, "%%ranks 0,1 --pul") == ["--pull"]


def test_stop_ends_the_cell_and_keeps_the_gang(gang: Kernel) -> None:
    gang.run("%%ranks all\nimport time\nkept = rank").done()
    sent = gang.send("%%ranks all\nprint('ready')\ntime.sleep(600)")
    following = gang.send("reached = True")
    interrupts: list[bool] = []

    def interrupt(output: nbformat.NotebookNode) -> None:
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        if "ready" in text and not interrupts:
            interrupts.append(True)
            gang.interrupt()

    cell = gang.receive(sent, interrupt)
    assert cell.error.ename == "KeyboardInterrupt"
    assert "The gang stays up" in cell.error.evalue
    assert gang.receive(following).status == "aborted"
    assert gang.run("%%ranks all\nkept").done().result == "rank 0: 0\nrank 1: 1"


def test_a_rank_killed_between_cells_is_told(gang: Kernel, wait_until: Callable[..., Any]) -> None:
    cell = gang.run("%%ranks all --pull pid\nimport os\npid, weights = os.getpid(), 1").done()
    psutil.Process(int(gang.value("pid"))).kill()
    wait_until(lambda: "rank 0: killed by SIGKILL" in gang.run("%gang").done().displayed, "%gang tells")
    assert "has ended" in complaint(gang, "%gang --stacks")
    cell = gang.run("%%ranks all\nweights")
    assert "reads `weights`" in cell.error.evalue
    assert mentions(cell.error.evalue, "previous one", "ended")
    assert gang.run("%%ranks all\nrank").done().result == "rank 0: 0\nrank 1: 1"


def test_what_ends_a_gang(kernels: Callable[..., Kernel], wait_until: Callable[..., Any]) -> None:
    kernel = kernels()
    for how in ("%reset -f", "%unload_ext sparkring", "restart"):
        kernel.run("%gang start -n -2").done()
        ranks = [int(line.split()[0]) for line in kernel.ranks()]
        assert ranks, how
        if how == "restart":
            kernel.manager.restart_kernel()
            kernel.client.wait_for_ready(DEADLINE_S)
            kernel.process = psutil.Process(kernel.manager.provisioner.pid)
        else:
            kernel.run(how).done()
        wait_until(lambda ranks=ranks: not any(map(psutil.pid_exists, ranks)), f"the ranks have ended: {how}")
        kernel.run("%load_ext sparkring").done()
        assert "no gang is" in kernel.run("%gang").done().printed + kernel.run("%gang").displayed, how


@pytest.mark.slow
@pytest.mark.extended("repetition", "test_held_slots_are_shown_and_a_starving_job_is_explained, without a kernel")
def test_a_job_that_starves_behind_a_gang_is_explained(spark_kernel: Kernel, wait_until: Callable[..., Any]) -> None:
    kernel = spark_kernel
    kernel.run("%gang start -n 2").done()
    wait_until(lambda: "warm gang of 2: 2" in kernel.run("%slots").done().displayed, "Spark has counted the tasks")
    assert "on Spark" in kernel.run("%gang").done().displayed
    interrupts: list[bool] = []

    def interrupt(output: nbformat.NotebookNode) -> None:
        if "waits for task slots: the warm gang of 2 holds 2 of 2" in output.get("text", "") and not interrupts:
            interrupts.append(True)
            kernel.interrupt()

    cell = kernel.receive(kernel.send("spark.range(10).count()"), interrupt)
    assert cell.status == "error"
    assert interrupts
    kernel.run("%gang stop").done()
    assert kernel.value("spark.range(10).count()") == "10"


# ── In the background ─────────────────────────────────────────────────────────────────────────────────────────────────

WAITS = """
import time
from pathlib import Path
print("up", flush=True)
while not Path(go).exists():
    time.sleep(0.05)
found = 40 + rank
"""


@pytest.fixture
def waiting(kernel: Kernel, tmp_path: Path) -> Iterator[tuple[Cell, Path]]:
    """Start a run in the background, called `run`. Return the cell, and the file that its ranks are waiting for."""
    go = tmp_path / "go"
    kernel.run(f"go = {str(go)!r}").done()
    started = kernel.run("%%horovod -n -2 --name later --pull found --background\n" + WAITS).done()
    kernel.run("run = _").done()
    yield started, go
    kernel.run("run.stop()").done()


def run_of(cell: Cell) -> str:
    """Return the id of the run in the background that a cell has started."""
    return cell.result.split()[1]


def panel(cell: Cell) -> str:
    """Return the current panel of the run that a cell has started."""
    (output,) = (each for each in cell.shown.values() if "data-sparkring-static" in each.data["text/html"])
    return str(output.data["text/plain"])


def says(kernel: Kernel, cell: Cell, words: str) -> bool:
    """Wait for the panel to contain `words`, and return whether it does. The view is redrawn every few seconds."""
    deadline = time.monotonic() + DEADLINE_S
    while words not in panel(cell) and time.monotonic() < deadline:
        kernel.run("import time; time.sleep(0.1)").done()
    return words in panel(cell)


def test_the_notebook_is_free_while_a_run_goes_on(kernel: Kernel, waiting: tuple[Cell, Path]) -> None:
    """The cell returns, and other cells can run. The panel is updated, and pulled names arrive at the end."""
    started, go = waiting
    assert re.fullmatch(
        r"run \S+ in the background: \.result\(\) waits for its result, \.stop\(\) ends it",
        started.result,
    )
    assert kernel.value("run.done, 'found' in globals(), 6 * 7") == "(False, False, 42)"
    assert kernel.run("%%horovod -n -2\nrank").done().result == "rank 0: 0\nrank 1: 1"
    assert says(kernel, started, "2 running")
    # The panel can be shown again, since its output may have been cleared. The output contains a static view, too.
    for code in ("run", "%runs later"):
        shown = kernel.run(code).done()
        place, static = (each.data["text/html"] for each in shown.outputs if each.output_type == "display_data")
        assert f'data-sparkring="{run_of(started)}"' in place
        assert f'data-sparkring-static="{run_of(started)}"' in static
        assert "as of" in static
    assert shown.result == ""
    assert kernel.run("run").done().result == started.result
    assert re.search(r"\blater\b.* 2 local +running *$", kernel.run("%runs").done().displayed, re.MULTILINE)
    go.touch()
    assert kernel.value("run.result().values, found") == "([None, None], 40)"
    assert "2 ranks finished" in panel(started)
    assert "2 ranks finished" in kernel.run("%runs later").done().displayed
    assert kernel.value("import sparkring; sparkring.last_result is run.result()") == "True"


def test_the_notebooks_stop_is_for_what_the_notebook_runs(kernel: Kernel, waiting: tuple[Cell, Path]) -> None:
    """Stop ends a cell that is computing, waiting for the result or running ranks, but not the background run."""
    _, go = waiting
    word = "import time\nprint('in' + 'side', flush=True)\n"
    for code in (f"{word}time.sleep(1000)", f"{word}run.result()", f"%%horovod\n{word}time.sleep(1000)"):
        stopped: list[nbformat.NotebookNode] = []

        def stop(output: nbformat.NotebookNode, stopped: list[nbformat.NotebookNode] = stopped) -> None:
            if not stopped and "inside" in str(output):
                stopped.append(output)
                kernel.interrupt()

        cell = kernel.receive(kernel.send(code), stop)
        assert cell.error.ename == "KeyboardInterrupt"
    assert kernel.value("run.done, [rank.state for rank in run.record.ranks]") == "(False, ['running', 'running'])"
    go.touch()
    assert kernel.value("run.result().record.outcome, found") == "('finished', 40)"


def test_a_run_is_stopped_by_its_name(kernel: Kernel, waiting: tuple[Cell, Path]) -> None:
    started, _ = waiting
    name = started.result.split()[1]
    assert complete(kernel, "%runs --stop ") == [name]
    options = ["--delete", "--delete-older", "--reverse", "--sort", "--stop", "--tensorboard", "--where"]
    assert complete(kernel, "%runs --") == options
    cell = kernel.run("%runs --stop nobody")
    assert cell.error.traceback == [
        f"OptionsError: no run called 'nobody' is running in the background of this notebook; running: {name}."
    ]
    assert kernel.run("%runs --stop later").done().printed.startswith(f"{name}: interrupted")
    assert not kernel.ranks()
    assert "interrupted" in panel(started)
    assert name not in complete(kernel, "%runs --stop ")
    cell = kernel.run("run.result()")
    assert cell.error.ename == "KeyboardInterrupt"
    assert re.search(rf"{name.rpartition('_')[2]} .* interrupted", kernel.run("%runs").done().displayed)


def test_a_failure_in_the_background(kernel: Kernel) -> None:
    """The panel, the result and a printed line report the failure."""
    started = kernel.run("%%horovod -n -2 --background\nraise ValueError('on purpose')").done()
    kernel.run("run = _").done()
    cell = kernel.run("import time\nwhile not run.done: time.sleep(0.05)\ntime.sleep(0.5)").done()
    assert mentions(cell.printed, "sparkring: run", "in the background", "RunFailed", "rank", "failed")
    assert mentions(panel(started), "failed", "ValueError")
    cell = kernel.run("run.result()")
    assert cell.error.traceback == [f"RunFailed: {cell.error.evalue}"]
    assert "on purpose" in cell.error.evalue


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("%%horovod --background --dry-run\n1", "--dry-run starts nothing"),
        ("%%horovod --background\nnobody", "reads `nobody`"),
        ("%%horovod --background --np 2.5\n1", "is not a whole number of ranks"),
    ],
)
def test_what_is_wrong_beforehand_starts_no_run_in_the_background(kernel: Kernel, code: str, said: str) -> None:
    cell = kernel.run(code)
    assert said in cell.error.evalue
    assert [output.output_type for output in cell.outputs] == ["error"]


def test_a_run_in_the_background_leaves_the_warm_gang_alone(gang: Kernel) -> None:
    gang.run("%%horovod\nkept = 5").done()
    gang.run("%%horovod --background\nimport os, __main__\nhasattr(__main__, 'kept')").done()
    assert gang.value("_.result().values") == "[False, False]"
    assert gang.run("%%horovod\nkept").done().result == "ranks 0, 1: 5"
    assert "its own ranks" in gang.run("%%ranks 0 --background\n1").error.evalue


def test_what_ends_a_run_in_the_background(kernels: Callable[..., Kernel], wait_until: Callable[..., Any]) -> None:
    kernel = kernels()
    run = "%%horovod -n -2 --background\nimport time\ntime.sleep(1000)"
    kernel.run(run).done()
    wait_until(kernel.ranks, "ranks are there")
    kernel.run("%unload_ext sparkring").done()
    assert not kernel.ranks()
    kernel.run("%load_ext sparkring").done()
    kernel.run(run).done()
    wait_until(kernel.ranks, "ranks are there again")
    pids = [int(line.split()[0]) for line in kernel.ranks()]
    kernel.close()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "they end with the kernel")


# ── Other kernels ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_second_kernel_sees_the_runs_of_the_first(kernels: Callable[..., Kernel]) -> None:
    first = kernels()
    assert "no runs saved" in first.run("%runs").done().printed + first.run("%runs").displayed
    first.run("%%horovod -n -2 --name mine\nprint('first of', rank)\nprint('last of', rank)").done()
    first.run("%%horovod --quiet\nraise ValueError('on purpose')")
    first.close()

    second = kernels()
    listed = second.run("%runs").done()
    assert "text/html" in listed.outputs[0].data
    header, _, failed, mine = listed.displayed.splitlines()
    assert header.split()[:3] == ["run", "name", "began"]
    assert re.search(r"\bmine\b.* 2 local +finished$", mine.rstrip())
    assert re.search(r"1 local +failed +ValueError: on purpose$", failed.rstrip())
    assert second.run("%logs mine --rank 1").done().printed == "first of 1\nlast of 1\n"
    assert second.run("%logs mine --rank 0 --tail 1").done().printed == "last of 0\n"
    whole = second.run("%logs mine").done().printed
    assert "── rank 0 ──" in whole
    assert "last of 1" in whole
    assert "ValueError: on purpose" in second.run("%logs").done().printed


# ── A terminal ────────────────────────────────────────────────────────────────────────────────────────────────────────


def ipython(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in IPython without a kernel."""
    return subprocess.run(
        [sys.executable, "-m", "IPython", "--colors=NoColor", "--ext=sparkring", "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SOURCE_ROOT, "IPYTHONDIR": str(folder / "ipython")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_in_a_terminal_it_is_plain_text(tmp_path: Path) -> None:
    done = ipython("%%horovod -n -2\nprint('said by', rank)\nrank + 40", tmp_path)
    lines = done.stdout.splitlines()
    assert "[0] said by 0" in lines
    assert "[1] said by 1" in lines
    assert any(line.startswith("sparkring: 2 ranks finished") for line in lines)
    assert "rank 0: 40\nrank 1: 41" in done.stdout
    assert "<" not in done.stdout
    assert not done.stderr

    failed = ipython("%%horovod -n -2\nx = 1\nraise ValueError('on purpose')", tmp_path)
    assert mentions(failed.stdout, "failed", "ValueError")
    assert re.search(r"^→ 3 +raise ValueError", failed.stdout, re.MULTILINE)
    assert "runner.py" not in failed.stdout
