"""Tests of %run lines: which script a line names, and what running the script does to a rank's `__main__`."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from sparkring.capture.cell import capture
from sparkring.capture.scripts import Script, find_script, read_script, split_arguments
from sparkring.errors import CaptureError, OptionsError
from sparkring.notebook.extension import MAGICS
from sparkring.worker.rank.script import run_script


def find(line: str, **variables: str) -> Script:
    """Return the script of a line, for a notebook with `variables` and cells that are plain Python."""
    return find_script(line, lambda text: text.format(**variables), str)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the notebook's folder, with a script and a notebook."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my jobs").mkdir()
    (tmp_path / "my jobs" / "job.py").write_text("")
    (tmp_path / "train.py").write_text("x = 1\n")
    cells = [
        {"cell_type": "markdown", "source": ["*text*"]},
        {"cell_type": "code", "source": ["a = 1\n", "await_ = 2"]},
        {"cell_type": "code", "source": "b = a + before"},
    ]
    (tmp_path / "steps.ipynb").write_text(json.dumps({"nbformat": 4, "cells": cells}))
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.py", {"written": "train.py", "arguments": "", "name": "__main__", "inside": False}),
        (" train.py --lr 0.1 -n x ", {"written": "train.py", "arguments": " --lr 0.1 -n x ", "name": "__main__"}),
        ("train", {"written": "train.py", "name": "__main__"}),
        ("-n train.py", {"name": "train", "inside": False}),
        ("-i -e train.py a", {"inside": True, "any_exit": True, "patterns": True, "arguments": " a"}),
        ("-ieG train.py", {"inside": True, "any_exit": True, "patterns": False}),
        ("-- train.py", {"written": "train.py"}),
        ("'my jobs/job.py' 'a b'", {"written": "my jobs/job.py", "arguments": " 'a b'"}),
        ("my\\ jobs/job.py", {"written": "my jobs/job.py"}),
        ("{where}/job.py {lr}", {"written": "my jobs/job.py", "arguments": " {lr}"}),
        ("-m json.tool --indent 2", {"module": "json.tool", "arguments": " --indent 2", "title": "-m json.tool"}),
        ("-mjson.tool -x", {"module": "json.tool", "arguments": " -x"}),
        ("-n -m json.tool", {"module": "json.tool", "name": "tool"}),
        ("steps.ipynb", {"written": "steps.ipynb", "inside": True}),
    ],
)
def test_lines(line: str, expected: dict[str, Any]) -> None:
    """Lines mean the same as in IPython. All words after the script's name are arguments of the script."""
    script = find(line, where="my jobs")
    assert {name: getattr(script, name) for name in expected} == expected
    assert script.line == line


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "name a script, as in `%run train.py --lr 0.1`"),
        ("-i", "name a script"),
        ("-m", "name a script"),
        ("trian.py", "there is no file {folder}/trian.py"),
        ("'my jobs'", "{folder}/my jobs cannot be read: Is a directory"),
        ("-d train.py", "-d needs the debugger of the notebook's IPython: leave it out"),
        ("-ip train.py", "-p needs the profiler of the notebook's IPython: leave it out"),
        ("-t -N3 train.py", "-t needs the timer of the notebook's IPython: leave it out"),
        ("-x train.py", "%run has no option -x: write the script's options after its name"),
        ("--lr 1 train.py", "%run has no option --lr: write the script's options after its name"),
        ("-i -m json.tool", "-m runs a module in its own namespace: leave out -i"),
        ("-m no_such_package.train", "there is no module no_such_package.train"),
        ("'train.py", "No closing quotation in 'train.py"),
        ("broken.py", "{folder}/broken.py line 2: '(' was never closed (SyntaxError)"),
        ("latin.py", "{folder}/latin.py is not text that Python can read: …"),
        ("empty.ipynb", "{folder}/empty.ipynb is not an nbformat 4 notebook"),
        ("return.py", "{folder}/return.py line 1: 'return' outside function (SyntaxError)"),
    ],
)
def test_lines_that_are_refused(folder: Path, line: str, said: str) -> None:
    """An OptionsError says what is wrong, before anything is started."""
    (folder / "broken.py").write_text("x = 1\ny = (\n")
    (folder / "latin.py").write_bytes(b"x = '\xe4'\n")
    (folder / "return.py").write_text("return 3\n")
    (folder / "empty.ipynb").write_text("{}")
    with pytest.raises(OptionsError) as caught:
        find(line)
    wanted = said.format(folder=folder)
    assert str(caught.value).startswith(wanted.removesuffix("…"))
    assert wanted.endswith("…") or str(caught.value) == wanted or line in ("-i", "-m")


def test_what_is_read(folder: Path) -> None:
    """A script is read as Python reads it, in its own encoding; a notebook is read cell by cell."""
    (folder / "latin.py").write_bytes(b"# coding: latin-1\r\nx = '\xe4'\r\n")
    assert read_script("latin.py").source == "# coding: latin-1\nx = 'ä'\n"
    notebook = read_script("steps.ipynb", str.upper)
    assert [(Path(name).name, source) for name, source in notebook.parts] == [
        ("steps.ipynb cell 2", "A = 1\nAWAIT_ = 2"),
        ("steps.ipynb cell 3", "B = A + BEFORE"),
    ]
    with pytest.raises(OptionsError, match="not a Python script"):
        read_script("steps.ipynb")


def test_parameters_that_are_given(folder: Path) -> None:
    """In a cell with the tag `parameters`, the defaults of given names are left out. Lines keep their numbers."""
    source = "lr = 0.1; steps: int = (\n  3\n)\nother = 'é'; lr = 2\nif lr: steps = 1\n"
    cells = [
        {"cell_type": "code", "source": source, "metadata": {"tags": ["parameters"]}},
        {"cell_type": "code", "source": "lr = 3"},
    ]
    (folder / "given.ipynb").write_text(json.dumps({"nbformat": 4, "cells": cells}))
    parts = find_script("given.ipynb", str, str, {"lr", "steps"}).parts
    assert parts[0][1] == "pass; pass\n\n\nother = 'é'; pass\nif lr: steps = 1\n"
    assert parts[1][1] == "lr = 3"
    assert find_script("given.ipynb", str, str).parts[0][1] == source


@pytest.mark.parametrize(
    ("text", "patterns", "expected"),
    [
        ("", True, []),
        ("  --lr  0.1 ", True, ["--lr", "0.1"]),
        ("'a b' \"c d\" e\\ f --x='g h'", True, ["a b", "c d", "e f", "--x=g h"]),
        ("*.ipynb '*.ipynb' no*such", True, ["steps.ipynb", "*.ipynb", "no*such"]),
        ("*.ipynb", False, ["*.ipynb"]),
    ],
)
def test_arguments(text: str, patterns: bool, expected: list[str]) -> None:
    """Arguments are split as by a shell; `~` and unquoted patterns become file names."""
    assert split_arguments(text, patterns=patterns) == expected


# ── What a cell sends for a script, and which names it gets from it ──────────────────────────────────────────────────

RUN = "get_ipython().run_line_magic('run', {!r})"


def captured(*lines: str, after: str = "", **namespace: Any) -> Any:
    """Return what is captured for a cell that runs these scripts, and then the lines `after`."""
    source = "\n".join([*(RUN.format(line) for line in lines), after])
    return capture(source, namespace, scripts=[find(line) for line in lines])


def test_names_of_scripts(folder: Path) -> None:
    """A script binds names in the cell. It reads the notebook's names only with -i."""
    (folder / "use.py").write_text("import os\ntotal = base + step\ndef f(): return scale\nstep = 1\n")
    notebook = {"base": 1, "scale": 2, "total": 0, "before": 3}
    alone = captured("use.py", after="total", **notebook)
    assert alone.sent == ["total"]  # the notebook's value, in case the script does not bind the name
    assert {"os", "total", "f", "step"} <= alone.binds
    assert captured("use.py", after="total", total=threading.Lock()).sent == []
    inside = captured("-i use.py", **notebook)
    assert set(inside.sent) == {"base", "scale"}
    steps = captured("steps.ipynb", **notebook)
    assert steps.sent == ["before"]
    assert {"a", "b"} <= steps.binds
    assert [(row.name, row.type_name, row.travels) for row in captured("-n train.py", "-m json.tool").table] == [
        ("train.py", "script", "by value"),
        ("-m json.tool", "script", "by reference"),
    ]
    with pytest.raises(CaptureError, match=r"`base` is a `_thread\.lock`"):
        captured("-i use.py", base=threading.Lock(), scale=2)


# ── On the rank ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Return the namespace of a rank's `__main__`."""
    main = types.ModuleType("__main__")
    main.__dict__.update(rank=1, before="kept")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["the rank's"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = list(sys.path)
    yield main.__dict__
    assert sys.modules["__main__"] is main
    assert sys.argv == ["the rank's"]
    assert sys.path == path
    assert (main.__name__, hasattr(main, "__file__")) == ("__main__", False)


PROGRAM = """
import pickle, sys
import beside

class Net:
    pass

found = [__name__, __file__, list(sys.argv), sys.path[0], beside.here, "rank" in globals()]
again = type(pickle.loads(pickle.dumps(Net()))) is Net
if len(sys.argv) > 1:
    sys.exit(eval(sys.argv[1]))
later = True
"""


@pytest.fixture
def program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Script]:
    """Make a folder with a script and a module. Return a function that finds the script of a line."""
    (folder / "src").mkdir()
    (folder / "src" / "beside.py").write_text("here = True\n")
    (folder / "src" / "program.py").write_text(PROGRAM)
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    return find


def test_a_script_runs_as_a_program(cell: dict[str, Any], program: Callable[[str], Script], folder: Path) -> None:
    """A script has its own `__main__`, sys.argv and sys.path[0]. The cell gets only the script's names."""
    path = str(folder / "src" / "program.py")
    run_script(program("src/program.py"))
    assert cell["found"] == ["__main__", path, ["src/program.py"], str(folder / "src"), True, False]
    assert cell["again"]
    assert (cell["later"], cell["before"], cell["rank"]) == (True, "kept", 1)


def test_names_and_namespaces(cell: dict[str, Any], program: Callable[[str], Script]) -> None:
    """-n gives a script its own name, and -i gives it the cell's names."""
    run_script(program("-n src/program.py"))
    assert cell["found"][0] == "program"
    assert "program" not in sys.modules
    run_script(program("-i src/program.py"))
    assert cell["found"][0] == "__main__"
    assert cell["found"][-1]


@pytest.mark.parametrize("code", ["0", "None"])
def test_an_exit_that_is_a_success(cell: dict[str, Any], program: Callable[[str], Script], code: str) -> None:
    """sys.exit() ends the script, and the cell continues with the names that the script has bound."""
    run_script(program("src/program.py"), [code])
    assert "found" in cell
    assert "later" not in cell


@pytest.mark.parametrize("code", ["3", "'no data'"])
def test_an_exit_that_is_a_failure(cell: dict[str, Any], program: Callable[[str], Script], code: str) -> None:
    """An exit code other than 0 is an error, unless -e is given."""
    with pytest.raises(SystemExit) as caught:
        run_script(program("src/program.py"), [code])
    assert caught.value.code == eval(code)
    assert "found" in cell
    run_script(program("-e src/program.py"), [code])


def test_modules_and_notebooks(cell: dict[str, Any], program: Callable[[str], Script], folder: Path) -> None:
    """-m runs a module, or a package's `__main__`, as python -m does; a notebook runs in the cell's namespace."""
    package = folder / "src" / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("value = 3\n")
    (package / "__main__.py").write_text("import sys\nfrom . import value\nseen = [__name__, __package__, sys.argv]\n")
    sys.path.insert(0, str(folder / "src"))
    try:
        run_script(find("-m some_package"), ["x"])
        assert cell["seen"] == ["__main__", "some_package", [str(package / "__main__.py"), "x"]]
        assert cell["value"] == 3
        with pytest.raises(ModuleNotFoundError, match=r"some_package\.nothing"):
            run_script(Script("", "", "", (), module="some_package.nothing"))
    finally:
        sys.path.remove(str(folder / "src"))
        for name in [name for name in sys.modules if name.partition(".")[0] == "some_package"]:
            del sys.modules[name]
    cell["before"] = 10
    run_script(find("steps.ipynb"))
    assert (cell["a"], cell["b"]) == (1, 11)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([("code", "# Parameters\nlr = 1")], "# Parameters\npass"),
        ([("markdown", "Text.\n\n## Parameters:"), ("code", "lr = 1")], "pass"),
        ([("markdown", "# **Notebook parameters**"), ("code", "lr = 1")], "pass"),
        ([("markdown", "# Parameters"), ("code", "x = 0"), ("code", "lr = 1")], "lr = 1"),
        ([("code", "# Parameters of the optimizer\nlr = 1")], "# Parameters of the optimizer\nlr = 1"),
    ],
)
def test_which_cells_have_parameters(folder: Path, cells: list[tuple[str, str]], expected: str) -> None:
    """The heading "Parameters", as a comment or in the Markdown cell above, has the same effect as the tag."""
    written = [{"cell_type": kind, "source": source} for kind, source in cells]
    (folder / "headed.ipynb").write_text(json.dumps({"nbformat": 4, "cells": written}))
    assert find_script("headed.ipynb", str, str, {"lr"}).parts[-1][1] == expected


def test_parameters_that_the_cell_assigns(folder: Path) -> None:
    """What the cell assigns before %run is not replaced with defaults, and the output says so once.

    The driver sees what the cell certainly assigns. The rank sees what else the cell has assigned.
    """
    cells = [
        {"cell_type": "code", "source": "lr = 0.1\nsteps = 3", "metadata": {"tags": ["parameters"]}},
        {"cell_type": "code", "source": "lr_used, steps_used = lr, steps\nsteps = 0"},
    ]
    (folder / "train.ipynb").write_text(json.dumps({"nbformat": 4, "cells": cells}))

    def values(cell: str, line: str = "torchrun -n -1") -> tuple[Any, list[str]]:
        shell = types.SimpleNamespace(
            user_ns={"items": [{"lr": 1}, {"lr": 2}]},
            transform_cell=TransformerManager().transform_cell,
            compile=types.SimpleNamespace(flags=0),
        )
        magic, _, rest = line.partition(" ")
        result = MAGICS[magic].run(shell, f"{rest} --quiet", cell)
        lines = [line.text for line in result.record.recent]
        return result.values, [*(notice.text for notice in result.record.notices), *lines]

    last = "\n%run train.ipynb\nlr_used, steps_used"
    kept = (
        "%run train.ipynb: `lr` keeps the value from the cell, and its default in the notebook's cell with parameters"
    )
    assert values(last[1:]) == ([(0.1, 3)], [])
    found, lines = values(f"lr = 5{last}")
    assert found == [(5, 3)]
    assert lines == [f"{kept} is not assigned"]
    found, lines = values(f"globals().update(lr=6){last}")
    assert found == [(6, 3)]
    assert lines == [f"sparkring: {kept} is not assigned"]
    assert values(f"if rank:\n    lr = 7{last}") == ([(0.1, 3)], [])
    found, lines = values(f"lr = item['lr']{last}", "foreach item in items -n -1")
    assert found == [(1, 3), (2, 3)]
    assert lines == [f"{kept} is not assigned"]
    assert values("%run train.ipynb\nlr = 8" + last)[0] == [(8, 3)]
