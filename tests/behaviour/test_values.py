"""Values that are sent to the ranks and values that come back, on every launcher."""

from __future__ import annotations

import builtins
import os
import pickle
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from texts import mentions

import sparkring
from sparkring.errors import ResultError, RunFailed
from sparkring.history import events, run_store


def notebook(source: str) -> dict[str, Any]:
    """Return a notebook's namespace after a cell with `source`."""
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    exec(source, namespace)
    return namespace


def test_values_come_in_rank_order(ring):
    """The value of each rank's last expression is at the rank's index."""
    result = ring.run("rank * 10 + size", n=3)
    assert result.values == [3, 13, 23]
    assert result.value == 3
    assert result.record.outcome == "finished"
    assert [rank.state for rank in result.record.ranks] == ["finished"] * 3


@pytest.mark.any_launcher
def test_a_cell_without_an_expression_gives_none(ring):
    """A cell that ends with a statement has no value."""
    assert ring.run("x = 1").values == [None, None]


def test_place_is_injected(ring):
    """rank, size and local_rank are defined, and agree with sparkring.world()."""
    result = ring.run("""
        from sparkring import world
        (rank, size, local_rank), (world().rank, world().size, world().local_rank)
    """)
    assert result.values == [((0, 2, 0), (0, 2, 0)), ((1, 2, 1), (1, 2, 1))]


@pytest.mark.any_launcher
def test_the_notebook_comes_before_what_is_injected(ring):
    """If the notebook has a variable `rank`, the cell reads the notebook's."""
    assert ring.run("rank, size", namespace={"rank": "mine"}).values == [("mine", 2)] * 2


@pytest.mark.standalone("the notebook's modules are not on the executors")
def test_functions_classes_modules_and_data_are_captured(ring):
    """All that the cell reads is sent: functions and classes by value, modules by reference.

    What functions and classes read is sent, too.
    """
    namespace = notebook("""
import math as m
import numpy as np
offset = 3
def shifted(x): return x + offset
class Point:
    def __init__(self, x): self.x = shifted(x)
data = np.arange(1000.0)
""")
    result = ring.run("[Point(rank).x, m.floor(m.pi), float(data.sum()), shifted(1)]", namespace=namespace)
    assert result.values == [[3, 3, 499500.0, 4], [4, 3, 499500.0, 4]]


@pytest.mark.any_launcher
def test_what_values_are_made_of_is_found_by_name(ring, notebook_cell):
    """pickle finds the notebook's classes, and inspect finds their lines; submodules and names in strings are sent."""
    namespace = notebook_cell("""
        import logging.handlers
        class Point:
            def shifted(self): return eval("offset + 1")
            def port(self): return logging.handlers.DEFAULT_TCP_LOGGING_PORT
        point, offset, limit = Point(), 3, 4
    """)
    result = ring.run(
        """
        import inspect, pickle
        again = pickle.loads(pickle.dumps([point]))[0]
        same = type(again) is type(point)
        ports = again.port(), logging.handlers.SYSLOG_UDP_PORT
        same, again.shifted(), ports, inspect.getsource(again.port), "{limit}".format(**globals())
        """,
        namespace=namespace,
    )
    line = "    def port(self): return logging.handlers.DEFAULT_TCP_LOGGING_PORT\n"
    assert result.values == [(True, 4, (9020, 514), line, "4")] * 2
    told = {name.name: name.via for name in result.record.captured}
    assert told == {"point": None, "logging": None, "limit": None, "Point": "point", "offset": "point"}


@pytest.mark.any_launcher
def test_a_class_of_the_cell_comes_back(ring):
    """An object whose class only the cell defines is rebuilt in the notebook."""
    assert ring.run("class Pair:\n    left = 7\nPair()").value.left == 7


@pytest.mark.any_launcher
def test_pull_brings_names_of_rank_0(ring):
    """--pull copies the named variables of rank 0."""
    assert ring.run("best, name = rank + 5, 'a'", pull=("best", "name")).pulled == {"best": 5, "name": "a"}


@pytest.mark.any_launcher
def test_pulling_a_missing_name_keeps_the_rest(ring):
    """The error names the missing variable, and has the ranks' results. The other variable is copied."""
    with pytest.raises(ResultError, match="`absent`") as caught:
        ring.run("best = 5\nif size > 2:\n    absent = 1\nrank", pull=("best", "absent"))
    assert caught.value.values == {0: 0, 1: 1}
    assert sparkring.last_result.pulled == {"best": 5}


@pytest.mark.any_launcher
def test_a_result_that_cannot_be_pickled(ring):
    """The error names the type and the rank, and has the other ranks' values."""
    with pytest.raises(ResultError, match=r"rank 1 is a _thread\.lock") as caught:
        ring.run("import threading\nthreading.Lock() if rank else 5")
    assert caught.value.values == {0: 5}
    assert sparkring.last_result.values == [5, None]
    assert caught.value.record.outcome == "failed"


@pytest.mark.any_launcher
def test_what_cannot_be_rebuilt_is_saved(ring, tmp_path, monkeypatch):
    """The error has the line that loads the value, which works once its module can be imported. The rest is bound."""
    namespace: dict[str, Any] = {}
    with pytest.raises(ResultError, match="No module named 'only_on_ranks'") as caught:
        ring.run(
            """
            import sys, types, numpy as np
            sys.modules["only_on_ranks"] = module = types.ModuleType("only_on_ranks")
            exec("class Net: pass", vars(module))
            net, history = module.Net(), [1.0]
            net.weights = np.arange(3.0)
            """,
            pull=("net", "history"),
            namespace=namespace,
        )
    assert namespace["history"] == [1.0]
    assert ".pulled (history)" in str(caught.value)
    module = types.ModuleType("only_on_ranks")
    exec("class Net: pass", vars(module))
    monkeypatch.setitem(sys.modules, "only_on_ranks", module)
    line = re.search("can be imported: (file = .*)[.]\n", str(caught.value))[1]
    exec(f"import pickle\n{line}\nfile.close()", namespace)
    assert namespace["net"].weights.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.any_launcher
def test_what_cannot_be_pickled_is_saved_in_part(ring):
    """The attributes that can be pickled are in the run's folder."""
    cell = "import threading, types\ntrainer = types.SimpleNamespace(loss=0.5, lock=threading.Lock())"
    with pytest.raises(ResultError, match=r"Without [.]lock") as caught:
        ring.run(cell, pull=("trainer",))
    path = re.search(r'open\("(.*)", "rb"\)', str(caught.value))[1]
    assert pickle.loads(Path(path).read_bytes()) == {"loss": 0.5}


@pytest.mark.slow
@pytest.mark.any_launcher
def test_a_large_result_arrives_bit_for_bit(ring):
    """An array of 500 MB comes back unchanged."""
    cell = "np.random.default_rng(1).integers(0, 256, 500_000_000, dtype=np.uint8)"
    result = ring.run(f"import numpy as np\n{cell}", n=1)
    assert np.array_equal(result.value, np.random.default_rng(1).integers(0, 256, 500_000_000, dtype=np.uint8))


@pytest.mark.standalone("the value goes through the master's files")
def test_a_large_value_travels_to_the_ranks(ring):
    """An array of 50 MB reaches every rank unchanged."""
    data = np.random.default_rng(2).random(6_250_000)
    assert ring.run("float(data.sum())", namespace={"data": data}).values == [float(data.sum())] * 2


@pytest.mark.any_launcher
def test_await_works_at_the_top_level(ring):
    """A cell may use `await`, in statements and in its last expression."""
    result = ring.run("""
        import asyncio
        async def later(x):
            await asyncio.sleep(0.01)
            return x
        first = await later(rank)
        started = asyncio.ensure_future(later(10))
        first + await started
    """)
    assert result.values == [10, 11]


@pytest.mark.any_launcher
def test_annotations_are_those_of_the_notebook(ring):
    """They are values, unless the cell or an earlier one has imported `annotations` from __future__."""
    cell = "def f(x: int): ...\nf.__annotations__['x']"
    assert ring.run(cell, 1).value is int
    assert ring.run(f"from __future__ import annotations\n{cell}", 1).value == "int"


@pytest.mark.any_launcher
def test_shell_lines(ring):
    """The calls into which IPython turns `!command` and `x = !command` run on the ranks, and expand variables."""
    result = ring.run("""
        get_ipython().system('echo from the shell of {rank}')
        found = get_ipython().getoutput('echo a; echo $rank')
        found
    """)
    assert result.values == [["a", "0"], ["a", "1"]]
    assert "from the shell of 1\n" in result.logs(1)


def test_commands_find_this_python_and_failures_are_told(ring, monkeypatch, tmp_path):
    """A command that fails raises no error, as in IPython; one notice names all ranks on which it has failed."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho another Python\n")
    fake.chmod(0o755)
    if ring.where == "local":  # the kernel's virtual environment is not activated
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    code = "import sys; print(sys.executable)"
    result = ring.run(f"""
        import subprocess, sys
        get_ipython().system("python -c 'import sys; sys.exit({{rank}} + 3)'")
        codes = [_exit_code]
        for word in ("true", "false", "false", "kill -9 $$$$"):
            get_ipython().system(word)
            codes.append(_exit_code)
        failing = get_ipython().getoutput("echo no; exit {{3 * 3}}")
        get_ipython().run_cell_magic("script", "--no-raise-error bash -e", "false\\necho not reached\\n")
        try:
            get_ipython().run_cell_magic("bash", "", "exit 5")
        except subprocess.CalledProcessError as error:
            codes.append(error.returncode)
        pythons = [subprocess.check_output(["python", "-c", {code!r}], text=True).strip()]
        pythons += get_ipython().getoutput('python -c "{code}"')
        [python == sys.executable for python in pythons], codes, failing
    """)
    assert result.values == [([True, True], [rank + 3, 0, 1, 1, -9, 5], ["no"]) for rank in range(2)]
    went_on = ". The cell went on, since such a command raises no error."
    command = "python -c 'import sys; sys.exit({rank} + 3)'"
    told = [notice.text for notice in ring.view.record.notices if notice.text.endswith(went_on)]
    expected = [
        (f"`{command}`", "code 3", "rank 0"),
        (f"`{command}`", "code 4", "rank 1"),
        ("`false`", "code 1", "ranks 0, 1"),
        ("`kill -9 $$$$`", "signal 9", "ranks 0, 1"),
        ("`echo no; exit {3 * 3}`", "code 9", "ranks 0, 1"),
        ("`%%script --no-raise-error bash -e`", "code 1", "ranks 0, 1"),
    ]
    assert [sum(mentions(text, *parts) for text in told) for parts in expected] == [1] * len(told) == [1] * 6


@pytest.mark.standalone("executors have an environment of their own")
def test_environment_variables(ring):
    """The env option sets variables of the ranks' environment before any other code runs on the ranks."""
    result = ring.run("import os\nos.environ['COLOUR'], os.environ['EMPTY']", env=(("COLOUR", "a=b c"), ("EMPTY", "")))
    assert result.values == [("a=b c", "")] * 2


@pytest.mark.standalone("two ranks may share an executor")
def test_each_rank_is_a_process_of_its_own(ring):
    """Ranks share no process with one another or with the driver, and none outlives its run."""
    pids = [*ring.run("import os\nos.getpid()").values, *ring.run("import os\nos.getpid()").values, os.getpid()]
    assert len(set(pids)) == 5


@pytest.mark.standalone("executors have a folder and a path of their own")
def test_the_driver_s_folder_and_path(ring, tmp_path, monkeypatch):
    """A module beside the notebook can be imported on the ranks, and relative paths lead to the same files."""
    (tmp_path / "beside_the_notebook.py").write_text("answer = 42")
    monkeypatch.chdir(tmp_path)
    assert (
        ring.run("import beside_the_notebook, os\nbeside_the_notebook.answer, os.getcwd()").values
        == [(42, str(tmp_path))] * 2
    )


@pytest.mark.standalone("the executors import what starts the ranks")
def test_a_module_of_the_notebook_does_not_shadow_what_starts_the_ranks(ring, tmp_path, monkeypatch):
    """A json.py beside the notebook does not keep the ranks from starting."""
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    assert ring.run("rank").values == [0, 1]


@pytest.mark.standalone("the executors' Python has no sparkring")
def test_ranks_run_the_sparkring_that_was_shipped(ring, request):
    """Executors that do not have sparkring get the driver's own, and cloudpickle with it."""
    if ring.where == "standalone":
        import subprocess

        python = request.getfixturevalue("bare_python")
        done = subprocess.run([python, "-c", "import sparkring"], capture_output=True, text=True, check=False,
                              env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})  # fmt: skip
        assert "No module named 'sparkring'" in done.stderr
    result = ring.run("import sparkring, cloudpickle, sys\nsparkring.__file__, cloudpickle.__file__, sys.executable")
    for package, pickler, python in result.values:
        assert "sparkring.zip" in package if ring.where != "local" else package == sparkring.__file__
        assert "sparkring.zip" in pickler or ring.where == "local"
        assert (python == sys.executable) == (ring.where != "standalone")


def test_many_ranks(local):
    """32 ranks on one machine start and end."""
    assert local.run("rank", n=32).values == list(range(32))


@pytest.mark.any_launcher
def test_the_saved_run_equals_the_live_one(ring):
    """The record that is loaded from the run's folder equals the record that the view got."""
    from pathlib import Path

    from sparkring.history import run_store

    result = ring.run("print('hello', rank)\nfrom sparkring import log\nlog(step=1, loss=0.5)\nrank")
    assert run_store.load(Path(result.record.log_folder)) == result.record == ring.view.record
    assert ring.view.closed == 1


@pytest.mark.any_launcher
def test_a_failed_run_is_saved_as_well(ring):
    """The record of a failed run is loaded unchanged, with the failure."""
    from pathlib import Path

    from sparkring.history import run_store

    with pytest.raises(RunFailed) as caught:
        ring.run("1 / (1 - rank)\nimport time\ntime.sleep(60)")
    assert run_store.load(Path(caught.value.record.log_folder)) == caught.value.record


# ── Captured names in the record ──────────────────────────────────────────────────


@pytest.mark.any_launcher
def test_the_record_says_what_went_along(ring):
    """The live and saved records have the captured names with types and sizes, and the driver's package versions."""
    namespace = notebook("import math\nnumbers = list(range(1000))\ndef double(x): return 2 * x")
    record = ring.run("double(len(numbers)) + math.floor(0.5)", namespace=namespace).record
    told = {name.name: (name.type_name, name.travels) for name in record.captured}
    assert told == {
        "numbers": ("list", "by value"), "double": ("function", "by value"), "math": ("module", "by reference"),
    }  # fmt: skip
    assert all(name.size_bytes for name in record.captured)
    assert dict(record.versions)["python"] == sys.version.split()[0]
    assert dict(record.versions)["sparkring"] == sparkring.__version__
    assert dict(record.versions)["numpy"] == np.__version__
    saved = run_store.load(Path(record.log_folder))
    assert (saved.captured, saved.versions) == (record.captured, record.versions)


@pytest.mark.any_launcher
def test_the_record_says_with_what_a_function_was_called(ring):
    """The record has the function, and its arguments by name."""
    train = notebook("def train(train, rate): return rate")["train"]
    record = sparkring.run(train, np=ring.np(1), framework="plain", train=[1, 2], rate=0.5).record
    told = [(name.name, name.type_name, name.travels) for name in record.captured]
    assert told == [
        ("train()", "function", "by value"), ("train", "list", "by value"), ("rate", "float", "by value"),
    ]  # fmt: skip


@pytest.mark.any_launcher
def test_of_very_many_names_the_first_are_told(ring):
    """The event in the run's file stays short, but all names are sent."""
    namespace = notebook("\n".join(f"name{n} = {n}" for n in range(300)))
    result = ring.run("sum([" + ", ".join(f"name{n}" for n in range(300)) + "])", namespace=namespace, n=1)
    assert result.value == sum(range(300))
    assert len(result.record.captured) == events.CAPTURED_KEPT
    line = (Path(result.record.log_folder) / run_store.EVENTS).read_text().partition("\n")[0]
    assert len(line) < 50_000
