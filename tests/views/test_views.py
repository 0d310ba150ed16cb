import io
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

import sparkring.views as views
from sparkring.capture.cell import CapturedName
from sparkring.history.events import Output, RunFinished
from sparkring.runtime.kernel import tell
from sparkring.views import html, panel, show_run
from sparkring.views.description import Column, Table
from sparkring.views.html import HtmlView
from sparkring.views.markup import enclosed
from sparkring.views.panel import PanelView
from sparkring.views.tables import described, show_captured, show_table, table_html, table_text
from sparkring.views.terminal import TerminalView

ROWS = [("2026-11-20_a", "train <b>", "3.2 s", "\x1b[2Jfailed"), ("2026-11-19_b", "漢字", "12 s", "")]
HEADERS = ("run", "cell", "took", "outcome")


@pytest.fixture
def kernel(monkeypatch):
    import IPython

    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=object()))


def test_a_kernel_shows_html_and_anything_else_text(kernel, monkeypatch):
    assert isinstance(views.open_view(), PanelView)
    import IPython

    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace())
    assert isinstance(views.open_view(), TerminalView)
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    assert isinstance(views.open_view(), TerminalView)


@pytest.mark.parametrize(("name", "value"), [("DATABRICKS_RUNTIME_VERSION", "15.4"), ("SPARKRING_PANEL", "0")])
def test_where_widgets_are_not_kept_or_not_wanted_the_panel_is_html(kernel, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert isinstance(views.open_view(), HtmlView)


def test_quiet_shows_nothing(kernel, replayed, capsys):
    view = views.open_view(quiet=True)
    view.refresh(replayed())
    view.close(replayed())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["none", "closed"])
def test_a_program_without_standard_streams(monkeypatch, stream):
    """It runs without a view, and messages are lost, but raise no error."""
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    assert isinstance(views.open_view(), views.Quiet)
    tell("hello")


def test_views_are_there_without_ipython():
    code = "import sys, sparkring.views.html, sparkring.views.terminal; print('IPython' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_views_that_load_the_widgets_script_are_not_saved(monkeypatch, replayed):
    """In VS Code, show() displays such a view again, during the run or after it. In Colab, the view is the panel."""
    shown = []

    class Handle:
        def __init__(self, data):
            self.data = data

        def update(self, data, **how):
            self.data = data

    def display(data, **how):
        shown.append(Handle(data))
        return shown[-1]

    class Page(SimpleNamespace):
        def begin(self, *what): ...

        tell = end = begin

    monkeypatch.setattr(panel, "_open_page", lambda: Page(run="", page="p", model_id="m"))
    monkeypatch.setattr(panel, "_page_of", lambda run: Page(run=run, page="p", model_id="m"))
    monkeypatch.setattr(panel, "display", display)
    monkeypatch.setattr(html, "_display", lambda *what: None)
    for front_end, left in (("vscode", 0), ("colab", 3), ("jupyter", 0)):
        shown.clear()
        monkeypatch.setattr(panel, "_front_end", lambda name=front_end: name)
        view = PanelView(background=True)
        view.refresh(replayed())
        view.again(replayed())
        during = [each for each in shown if panel._VIEW in each.data]
        over = replayed(RunFinished(1_700_000_009.0, "finished"))
        view.close(over)
        view.again(over)
        assert len(during) == (0 if front_end == "jupyter" else 2)
        assert len([each for each in shown if panel._VIEW in each.data]) == left, front_end


def test_a_table_as_text():
    assert table_text(HEADERS, ROWS).splitlines() == [
        "run           cell        took  outcome",
        "────────────  ─────────  ─────  ───────",
        "2026-11-20_a  train <b>  3.2 s  failed",
        "2026-11-19_b  漢字        12 s",
    ]


def test_a_table_as_html(unfolded):
    page = unfolded(table_html(HEADERS, ROWS))
    assert '<td align="left">train &lt;b&gt;</td><td class="sr-n" align="right">3.2 s</td>' in page
    assert "\x1b" not in page


def test_a_described_table(unfolded):
    """A column is left out if it has too few different values. Numbers of a column have the same form."""
    columns = (
        Column("item", "#", "count"),
        Column("host", "host", needs=2),
        Column("backlog", "backlog", "count", needs=1),
        Column("saved", "saved", "check", needs=1),
        Column("metrics", "", "numbers"),
        Column("error", "error", needs=1, most=6),
    )
    rows = [
        (0, "a", 0, False, {"loss": 0.5, "b": "nan"}, "<i> is long"),
        (1234, "a", None, False, {"loss": 0.03125}, ""),
    ]
    shown = unfolded(enclosed(described(Table(columns, rows))))
    assert re.findall(r"<t[hd]\b[^>]*>([^<]*)<", shown) == [
        "#", "backlog", "loss", "b", "error", "0", "0", "0.5000", "nan", "&lt;i&gt; i…", "1,234", "", "0.0312", "", "",
    ]  # fmt: skip


def test_tables_are_shown_where_python_runs(monkeypatch, capsys, kernel):
    import IPython
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda *what, **how: shown.append((what, how)))
    show_table(HEADERS, ROWS, empty="none")
    [((data,), how)] = shown
    assert (set(data), how) == ({"text/html", "text/plain"}, {"raw": True})
    show_table(HEADERS, [], empty="none saved yet")
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    show_table(("a",), [("1",)], empty="none")
    assert capsys.readouterr().out == "none saved yet\na\n─\n1\n"


def test_what_a_cell_takes_along(capsys):
    show_captured(
        [
            CapturedName("x", "numpy.ndarray", 1_200_000, "by value", None, None, True),
            CapturedName(
                "lock", "_thread.lock", None, "cannot", "it is a `_thread.lock`", "Make it in the cell", True, "f"
            ),
        ]
    )
    assert capsys.readouterr().out.splitlines()[2:] == [
        "x                 numpy.ndarray  1.20 MB  by value",
        "lock (used by f)  _thread.lock            cannot    it is a `_thread.lock`. Make it in the cell",
    ]


def test_a_saved_run_is_text_where_the_user_wants_text(replayed, monkeypatch, capsys):
    monkeypatch.setattr("sparkring.views.front_end.in_notebook", lambda: True)
    monkeypatch.setenv("SPARKRING_VIEW", "text")
    show_run(replayed(Output("stdout", b"hello\n", time=2.0, rank=0), RunFinished(1_700_000_060.0, "finished")))
    assert capsys.readouterr().out.startswith("sparkring: 2 ranks finished")
