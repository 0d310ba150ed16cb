"""The output of ranks arrives completely and in order, however it was written, on every launcher."""

from __future__ import annotations

import io
from pathlib import Path

import psutil
import pytest
from leaks import runs

from sparkring.errors import RunFailed
from sparkring.history import run_store
from sparkring.views import displays
from sparkring.views.terminal import TerminalView


def lines(ring, rank: int, stream: str) -> list[str]:
    """Return the lines of one rank's stream that the view got, in order."""
    return [line.text for line in ring.view.record.recent if (line.rank, line.stream) == (rank, stream)]


@pytest.mark.standalone("executors redirect their workers' output")
def test_every_way_to_print(ring):
    """Lines from print, os.write, C code and child processes arrive in the order in which they were written."""
    result = ring.run("""
        import ctypes, os, subprocess, sys
        libc = ctypes.CDLL(None)
        print("by print", rank)
        os.write(1, b"by os.write\\n")
        libc.puts(b"by C")
        libc.fflush(None)
        subprocess.run(["echo", "by a child"])
        print("last")
        print("error by print", file=sys.stderr)
        os.write(2, b"error by os.write\\n")
        libc.dprintf(2, b"error by C\\n")
        subprocess.run("echo error by a child >&2", shell=True)
    """)
    for rank in (0, 1):
        out = [f"by print {rank}", "by os.write", "by C", "by a child", "last"]
        err = ["error by print", "error by os.write", "error by C", "error by a child"]
        assert lines(ring, rank, "stdout") == out
        assert lines(ring, rank, "stderr") == err
        assert sorted(result.logs(rank).splitlines()) == sorted(out + err)


@pytest.mark.any_launcher
def test_carriage_returns_and_colours(ring):
    """A progress bar shows its last state, colours are kept, and the log has every byte."""
    result = ring.run(r"""
        import sys
        for step in range(3):
            sys.stdout.write(f"\rstep {step}")
            sys.stdout.flush()
        print("\r\x1b[31mdone\x1b[0m")
        print("windows\r")
    """)
    assert lines(ring, 0, "stdout") == ["\x1b[31mdone\x1b[0m", "windows"]
    assert result.logs(0) == "\rstep 0\rstep 1\rstep 2\r\x1b[31mdone\x1b[0m\nwindows\r\n"


@pytest.mark.any_launcher
def test_partial_lines_are_shown_before_they_end(ring, tmp_path):
    """An unfinished line reaches the view while the cell is still running. The cell waits until then."""
    go = tmp_path / "go"

    def look(record):
        if record.ranks and record.ranks[0].partial_stdout == b"half":
            go.touch()

    ring.view.on_refresh = look
    cell = """
        import time
        print("half", end="")
        while not go.exists():
            time.sleep(0.02)
        print(" and half")
    """
    ring.run(cell, namespace={"go": go})
    assert lines(ring, 0, "stdout") == ["half and half"]


@pytest.mark.any_launcher
def test_odd_bytes_and_a_last_line_without_its_end(ring):
    """Bytes that are not UTF-8 are shown as \\xNN; a last line without a newline counts as a line."""
    result = ring.run(r"""
        import os
        print("ünïcode ✓")
        os.write(1, b"bad \xff\xfe\nno end")
    """)
    assert lines(ring, 1, "stdout") == ["ünïcode ✓", "bad \\xff\\xfe", "no end"]
    assert result.logs(1) == "ünïcode ✓\nbad \\xff\\xfe\nno end"


@pytest.mark.any_launcher
def test_long_lines_and_many_lines(ring):
    """A line of 10,000 characters is cut on screen only. All of 10,000 lines arrive, even if the last is unfinished."""
    result = ring.run("""
        print("x" * 10_000)
        print("\\n".join(f"line {i}" for i in range(10_000)), end="")
    """)
    record = ring.view.record
    for rank in (0, 1):
        assert result.logs(rank) == "x" * 10_000 + "\n" + "\n".join(f"line {i}" for i in range(10_000))
        assert record.ranks[rank].line_count == 10_001
        assert record.ranks[rank].tail[-1].text == "line 9999"


@pytest.mark.any_launcher
def test_floods_are_not_lost(ring):
    """None of 200,000 lines from each of two ranks is lost or out of order."""
    result = ring.run("for i in range(200_000):\n    print(rank, i)")
    for rank in (0, 1):
        assert result.logs(rank) == "".join(f"{rank} {i}\n" for i in range(200_000))
        assert result.record.ranks[rank].line_count == 200_000


@pytest.mark.parametrize("close", ["os.close(1)", "sys.stdout.close()"])
@pytest.mark.any_launcher
def test_a_rank_that_closes_stdout(ring, close):
    """Output from before stdout was closed still arrives, and so does the value."""
    result = ring.run(f"import os, sys\nprint('before')\n{close}\nprint('after', file=sys.stderr)\nrank")
    assert result.values == [0, 1]
    assert result.logs(0) == "before\nafter\n"


@pytest.mark.any_launcher
def test_output_of_forked_children(ring):
    """A forked child's output is shown as its rank's. A child that runs to the cell's end is not a second rank."""
    result = ring.run("""
        import os
        def forked():
            pid = os.fork()
            if pid:
                os.waitpid(pid, 0)
            return pid
        if forked() == 0:
            print("ends by itself")
            os._exit(0)
        forked() > 0, print("at the end of the cell")
    """)
    assert result.values == [(True, None)] * 2
    assert lines(ring, 0, "stdout") == ["ends by itself"] + ["at the end of the cell"] * 2


@pytest.mark.any_launcher
def test_a_forked_child_that_raises_does_not_fail_its_rank(ring):
    """The child's traceback is part of the output, and the rank continues."""
    result = ring.run("""
        import os
        pid = os.fork()
        if not pid:
            raise ValueError("in the child")
        os.waitpid(pid, 0)[1] >> 8
    """)
    assert result.values == [1, 1]
    assert "ValueError: in the child" in result.logs(0)


@pytest.mark.standalone("it descends from the executor, not from the driver")
def test_what_a_rank_started_ends_with_it(ring, wait_until):
    """A sleeping child that called setsid ends with the run, and does not delay it."""
    result = ring.run("""
        import subprocess
        subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
    """)
    assert not any(map(runs, result.values))
    wait_until(lambda: not any(map(psutil.pid_exists, result.values)), "no child is left as a zombie")


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        ("all", {"[0] printed 0", "[1] printed 1", "[0] sent 0", "[1] sent 1"}),
        ("rank0", {"[0] printed 0", "[0] sent 0", "[1] sent 1"}),
        ("callbacks", {"[0] sent 0", "[1] sent 1"}),
    ],
)
def test_what_is_shown(local, logs, expected):
    """--logs decides what is shown. Text that was sent with log_to_driver() is always shown."""
    shown = io.StringIO()
    local.run(
        """
        from sparkring import log_to_driver
        print("printed", rank)
        log_to_driver(f"sent {rank}")
        """,
        logs=logs,
        view=TerminalView(shown),
    )
    assert {line for line in shown.getvalue().splitlines() if line.startswith("[")} == expected


@pytest.mark.any_launcher
def test_what_ranks_show(ring):
    """Figures, tables and HTML arrive in order, with their text in the log, whichever display() function shows them."""
    result = ring.run("""
        import sys
        from pandas import DataFrame
        print("before")
        table = DataFrame({"a": [1, 2]})
        display(table)
        display(5, "text")
        displayHTML("<i>by Databricks' name</i>")
        without_ipython = "IPython" not in sys.modules

        import matplotlib.pyplot as plt
        plt.plot([1, rank])
        plt.title("rise")
        plt.show()
        plt.show()  # nothing is left to show
        from IPython.display import HTML, clear_output, display as theirs, update_display
        handle = theirs(HTML("step 1"), display_id=True)
        handle.update(HTML("step 2"))
        theirs(HTML("a script: <script>draw()</script>"), metadata={"isolated": True})
        plt.figure()  # shown when the cell ends
        print("after")

        from tqdm.notebook import tqdm, trange
        for bar in (tqdm([1], desc="bar", display=False), trange(1, desc="range")):
            list(bar)
        without_ipython, plt.get_backend(), __import__("os").environ["MPLBACKEND"]
    """)
    assert result.values == [(True, "module://sparkring.worker.rank.figures", "Agg")] * 2
    figure = "<Figure size 640x480 with 1 Axes: rise>"
    html = "<IPython.core.display.HTML object>"
    printed = ["before", "   a", "0  1", "1  2", "5", "'text'", "<HTML>", figure, html, html, "after"]
    printed.append("<Figure size 640x480 with 0 Axes>")
    for rank in (0, 1):
        assert lines(ring, rank, "stdout") == printed
        assert [line for line in lines(ring, rank, "stderr") if line.startswith(("bar: 100%", "range: 100%"))]
        shown = [each for each in result.record.displays if each.rank == rank]
        types = ["text/html", "text/html", "image/png", "text/html", "text/html", "image/png"]
        assert [each.mime_type for each in shown] == types
        assert [each.data[1:4] for each in shown if each.mime_type == "image/png"] == [b"PNG"] * 2
        assert b"<td>2</td>" in shown[0].data
        assert shown[3].data == b"step 2"
    assert run_store.load(Path(result.record.log_folder)).displays == result.record.displays
    text = displays.bundle(result.record)["text/plain"]
    shared, own = "[ranks 0, 1]", [f"[rank {rank}] {figure}" for rank in (0, 1)]
    assert sorted(line for line in text.splitlines() if figure in line) == own
    assert sum(line.startswith(shared) for line in text.splitlines()) == 5


def test_figures_of_a_cell_that_failed(local_gang):
    """The next cell does not show the figures. Its displays are numbered from 1, and clear_output() works."""
    gang = local_gang.start(1)
    with pytest.raises(RunFailed):
        gang.cell("import matplotlib.pyplot as plt\nplt.figure()\n1 / 0")
    result = gang.cell("""
        from IPython.display import HTML, clear_output
        display(HTML("gone"))
        clear_output(wait=True)
        display(HTML("here"))
        plt.figure().text(0, 0, r"$\\frac$")  # cannot be drawn
        "the cell's value"
    """)
    assert [(each.number, each.data) for each in result.record.displays] == [(2, b"here")]
    assert result.value == "the cell's value"
    assert "ValueError" in result.logs(0)
