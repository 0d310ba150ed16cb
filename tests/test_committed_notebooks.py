"""The committed notebooks have their outputs, and contain nothing that identifies the machine that ran them."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_core.utils import ensure_event_loop
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
WIDGET = "application/vnd.jupyter.widget-view+json"
IMAGE = '<img src="data:image/png;base64,AA/spindle+A/home/ada/B=">'  # base64 data that contains the names by chance
SILENT_MAGICS = ("%load_ext", "%config")


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    """Return the module notebooks/write_outputs.py, which `make notebooks` runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("write_outputs")


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[None]:
    """Make the event loop that Jupyter's blocking calls share, and close it after the last test."""
    found = ensure_event_loop()
    yield
    found.close()


@pytest.fixture(params=NAMES)
def notebook(request: pytest.FixtureRequest) -> NotebookNode:
    return nbformat.read(FOLDER / f"{request.param}.ipynb", as_version=nbformat.NO_CONVERT)


def code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def may_fail(cell: NotebookNode) -> bool:
    return "raises-exception" in cell.metadata.get("tags", ())


def has_something_to_show(source: str) -> bool:
    """Return whether a cell has outputs, such as a panel, the answer of a magic, or a value."""
    first, _, rest = source.partition("\n")
    if first.startswith("%%"):
        return bool(re.search(r" (-n|--np|--dry-run)\b", first)) or has_something_to_show(rest)
    lines = source.splitlines()
    if any(line.startswith("%") and not line.startswith(SILENT_MAGICS) for line in lines):
        return True
    body = ast.parse("\n".join(line for line in lines if not line.startswith("%"))).body
    outside = [each for each in body if not isinstance(each, ast.FunctionDef | ast.ClassDef)]
    called = {
        node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        for each in outside
        for node in ast.walk(each)
        if isinstance(node, ast.Call)
    }
    last = body[-1] if body else None
    is_value = isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call | ast.Constant)
    return bool(called & {"print", "show", "show_digits", "show_versions", "printSchema", "Markdown"}) or is_value


def test_what_has_something_to_show() -> None:
    shown = (
        "%gang",
        "%%horovod -n -2\nx = 1",
        "print(1)",
        "sparkring.show_versions()",
        "for i in x:\n    print(i)",
        "x.spec",
        "%%ranks 0\nx",
    )
    silent = (
        "%load_ext sparkring\nimport os",
        "def f():\n    print(1)",
        "x = f(1)",
        "folder.cleanup()",
        "%%ranks 0\nx=1",
    )
    assert all(map(has_something_to_show, shown))
    assert not any(map(has_something_to_show, silent))


def test_is_a_notebook_of_ours(notebook: NotebookNode) -> None:
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    ids = [cell.id for cell in notebook.cells]
    assert len(ids) == len(set(ids))


def test_leads_on(notebook: NotebookNode) -> None:
    """The last cell links to the notebooks to read next, and all of them exist."""
    linked = re.findall(r"\]\((\w+)\.ipynb\)", notebook.cells[-1].source)
    assert linked
    assert set(linked) <= set(NAMES)


def test_has_its_outputs(notebook: NotebookNode, tool: Any) -> None:
    """All cells have run in order, with their current code, and have their outputs. Otherwise, run `make notebooks`."""
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert notebook.metadata.sparkring.code == tool.code_digest(notebook)
    assert not [cell.id for cell in cells if has_something_to_show(cell.source) and not cell.outputs]
    assert any(
        kind.startswith("image/") for cell in cells for output in cell.outputs for kind in output.get("data", ())
    )


def test_fails_only_where_it_is_meant_to(notebook: NotebookNode) -> None:
    meant = {cell.id for cell in code(notebook) if may_fail(cell) and cell.execution_count}
    failed = {cell.id for cell in code(notebook) for output in cell.outputs if output.output_type == "error"}
    assert failed == meant


def test_tells_nothing_of_a_machine(notebook: NotebookNode, tool: Any) -> None:
    assert tool.left_behind(notebook) == []
    assert "widgets" not in notebook.metadata
    assert set(notebook.metadata.language_info) == {"name"}
    assert not [cell.id for cell in notebook.cells if "execution" in cell.metadata]
    assert not [cell.id for cell in code(notebook) for output in cell.outputs if WIDGET in output.get("data", {})]
    assert len(nbformat.writes(notebook).encode()) < tool.LARGEST_BYTES


# Which outputs the command keeps


@pytest.fixture
def say(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that cleans text as on a computer named spindle, with a typical home folder and environment."""
    monkeypatch.setattr(tool.socket, "gethostname", lambda: "spindle.example.org")
    monkeypatch.setattr(tool.socket, "getfqdn", lambda: "spindle.example.org")
    monkeypatch.setattr(tool.Path, "home", lambda: Path("/home/ada"))
    monkeypatch.setattr(tool.sys, "prefix", "/home/ada/venv")
    monkeypatch.setattr(tool, "ROOT", Path("/home/ada/src/sparkring"))
    return tool.cleaner(tool.names_of_this_machine(Path("/tmp/outputs-x/home")))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("rank 1 on spindle failed", "rank 1 on host failed"),
        ("http://spindle.example.org:4040", "http://host:4040"),
        ("a spindle-shaped spindle2", "a spindle-shaped spindle2"),
        ("log: /tmp/outputs-x/home/runs/a/rank-1.log", "log: ~/.local/share/sparkring/runs/a/rank-1.log"),
        ("/home/ada/src/sparkring/notebooks", "…/notebooks"),
        ("(/home/ada/venv/lib/x.py)", "(…/lib/x.py)"),
        ("<b>/home/ada/data</b>", "<b>~/data</b>"),
        ("/home/adam", "/home/adam"),
        ("file:///tmp/sparkring-shards-abc/tidy", "file://…/tidy"),
        ("dbfs:/tmp/x", "dbfs:/tmp/x"),
        (IMAGE, IMAGE),
    ],
)
def test_names_of_this_machine_are_written_otherwise(say: Callable[[str], str], text: str, wanted: str) -> None:
    assert say(text) == wanted


def test_other_folders_and_addresses_are_noticed(tool: Any) -> None:
    for text in (
        "in /home/bob/x",
        "log:/root/x",
        '"/Users/eve"',
        "/opt/python/lib/x.py",
        "at /tmp/abc",
        "on 172.17.0.2:4040",
    ):
        cells = [new_code_cell("1", id="one", outputs=[new_output("stream", text=text)])]
        assert [found.partition(":")[0] for found in tool.left_behind(new_notebook(cells=cells))] == ["one"]
    for text in (
        "dbfs:/tmp/run1",
        "/dbfs/ml/x",
        "…/lib/x.py",
        "~/x/y",
        "http://host/a/b",
        "</div></b>",
        "rows/s/rank",
        "127.0.0.1:1",
    ):
        cells = [new_code_cell("1", outputs=[new_output("stream", text=text)])]
        assert tool.left_behind(new_notebook(cells=cells)) == []


def test_widgets_go_and_what_they_showed_stays(tool: Any) -> None:
    view = {"model_id": "1", "version_major": 2, "version_minor": 0}
    kept = {"text/html": "<b>finished</b>", "text/plain": "finished"}
    outputs = [
        new_output("display_data", {WIDGET: view, "text/plain": "HBox()"}),
        new_output(
            "display_data", {"text/html": '<div class="x" data-sparkring-run="1">\n</div>', "text/plain": "run"}
        ),
        new_output("display_data", {WIDGET: view, **kept}),
        new_output("execute_result", {"text/plain": "3"}, execution_count=1),
    ]
    made = new_notebook(
        cells=[new_code_cell("run", outputs=outputs, metadata={"execution": {"busy": "now"}, "tags": ["a"]})]
    )
    made.metadata.widgets = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    tool.clean(made, str)
    assert [output.data for output in made.cells[0].outputs] == [kept, {"text/plain": "3"}]
    assert made.cells[0].metadata == {"tags": ["a"]}
    assert "widgets" not in made.metadata


def test_what_was_printed_in_pieces_is_one_output(tool: Any) -> None:
    printed = [("stdout", "a"), ("stdout", "b\n"), ("stderr", "c"), ("stdout", "d")]
    outputs = [new_output("stream", name=name, text=text) for name, text in printed]
    made = new_notebook(cells=[new_code_cell("run", outputs=outputs)])
    tool.clean(made, str.upper)
    found = [(output.name, output.text) for output in made.cells[0].outputs]
    assert found == [("stdout", "AB\n"), ("stderr", "C"), ("stdout", "D")]


def test_a_secret_or_a_large_picture_is_not_written(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUD_TOKEN", "dapi-0123456789")
    for output in (
        new_output("stream", text="with dapi-0123456789"),
        new_output("stream", text="in /home/bob/x"),
        new_output("display_data", {"image/png": "A" * tool.LARGEST_BYTES}),
    ):
        with pytest.raises(tool.Unfit):
            tool.check(new_notebook(cells=[new_code_cell("1", outputs=[output])]))
    tool.check(new_notebook(cells=[new_code_cell("1", outputs=[new_output("stream", text="all is well")])]))


def test_the_digest_is_that_of_the_code(tool: Any) -> None:
    def digest(text: str, source: str) -> str:
        cells = [
            new_markdown_cell(text, id="a"),
            new_code_cell(source, id="b", outputs=[new_output("stream", text="x")]),
        ]
        return str(tool.code_digest(new_notebook(cells=cells)))

    assert digest("one", "x = 1") == digest("two", "x = 1") != digest("one", "x = 2")


def test_a_notebook_is_run_and_written(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a cell fails unexpectedly, the file is left as it was."""
    good, bad = tmp_path / "good.ipynb", tmp_path / "bad.ipynb"
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernelspec, "language_info": {"name": "python"}}
    cells = [new_code_cell("import os\nprint(os.getcwd())", id="a"), new_code_cell("1 + 1", id="b")]
    nbformat.write(new_notebook(cells=cells, metadata=metadata), good)
    nbformat.write(new_notebook(cells=[new_code_cell("1 / 0", id="a")], metadata=metadata), bad)
    before = bad.read_bytes()
    monkeypatch.setenv("SPARKRING_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("JUPYTER_PATH", "")
    monkeypatch.setattr(tool, "ROOT", tmp_path)

    monkeypatch.setattr("sys.argv", ["write_outputs", str(good), str(bad)])
    assert tool.main() == 1
    assert bad.read_bytes() == before
    written = nbformat.read(good, as_version=4)
    assert [cell.execution_count for cell in written.cells] == [1, 2]
    assert written.cells[0].outputs[0].text == "…\n"
    assert written.cells[1].outputs[0].data == {"text/plain": "2"}
    assert written.metadata.sparkring.code == tool.code_digest(written)
    assert "version" not in written.metadata.language_info

    monkeypatch.setattr("sys.argv", ["write_outputs", "--strip", str(good)])
    assert tool.main() == 0
    stripped = json.loads(good.read_text(encoding="utf-8"))
    assert [(cell["outputs"], cell["execution_count"]) for cell in stripped["cells"]] == [([], None)] * 2
    assert "sparkring" not in stripped["metadata"]
