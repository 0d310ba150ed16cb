"""How a long command is watched, and which lines of its log are shown when it fails."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

from sparkring.tools import watch as tools_watch
from sparkring.tools.pace import BuildPace
from sparkring.tools.watch import StepProgress, telling_lines, watch


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_terminal_gets_one_line_rewritten() -> None:
    clock, stream = Clock(), Terminal()
    progress = StepProgress(stream, clock)
    progress.step("Building")
    clock.now = 3
    progress.tick()
    for clock.now, share in ((30, 0.25), (60, 0.1), (95, 0.9)):
        progress.tick(share)
    clock.now = 97
    progress.done()
    shown = stream.getvalue()
    assert shown.count("\n") == 1
    assert shown.split("\r\033[K") == [
        "",
        "Building …",
        "Building … 3 s",
        "Building … 25 %, 30 s, about 90 s left",
        "Building … 10 %, 60 s, about 9 min left",
        "Building … 90 %, 95 s, almost done",
        "Building: 97 s\n",
    ]


def test_a_file_gets_a_line_every_ten_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = StepProgress(stream, clock)
    progress.step("Building")
    for clock.now in range(1, 26):
        progress.tick()
    progress.done()
    assert stream.getvalue().splitlines() == ["Building …", "Building … 10 s", "Building … 20 s", "Building: 25 s"]


def test_the_status_and_the_output_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr, flush=True); sys.exit(3)"
    assert watch([sys.executable, "-c", code], os.environ, log, StepProgress(io.StringIO())) == 3
    assert log.read_text() == "before\nout\nerr\n"


def test_what_is_printed_is_read_while_the_command_runs(tmp_path: Path) -> None:
    log, go_on = tmp_path / "log", tmp_path / "go-on"
    log.touch()
    # Runs until it has been seen at 42 %, so that no machine is too slow or too fast for this test.
    code = (
        "import os, sys, time\n"
        "print('  [  7%] a.o\\n  [ 42%] b.o\\n  [ 40%] c.o', flush=True)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    )

    class Release(BuildPace):
        def read(self, fresh: str, passed_s: float) -> float | None:
            found = super().read(fresh, passed_s)
            if "b.o" in fresh:
                go_on.touch()
            return found

    pace = Release(tmp_path / "pace.json")
    assert (
        watch(
            [sys.executable, "-c", code, str(go_on)], os.environ, log, StepProgress(io.StringIO()), share_of=pace.read
        )
        == 0
    )
    pace.keep()
    assert set(json.loads((tmp_path / "pace.json").read_text())["shares"]) == {"7", "40", "42"}


def test_the_first_complaints_are_told_and_pips_echo_is_not() -> None:
    log = """
      [ 10%] Building CXX object horovod.cc.o
      /src/horovod.cc:12:3: fatal error: absl/status.h: No such file or directory
      make: *** [all] Error 2
    CMake Error at CMakeLists.txt:3 (find_package):

      By not providing FindGloo
    error: subprocess-exited-with-error
    ERROR: Failed building wheel for horovod
    """
    assert telling_lines(log) == [
        "/src/horovod.cc:12:3: fatal error: absl/status.h: No such file or directory",
        "CMake Error at CMakeLists.txt:3 (find_package):",
        "By not providing FindGloo",
    ]


def test_without_a_known_complaint_the_end_is_told() -> None:
    assert telling_lines("one\ntwo\nthree\n", limit=2) == ["two", "three"]


def test_as_a_script_it_passes_on_the_status_and_says_why(tmp_path: Path) -> None:
    log = tmp_path / "pip.log"
    code = "import sys; print('ERROR: No matching distribution found for flux'); sys.exit(4)"
    script = [sys.executable, tools_watch.__file__, str(log), "Installing"]
    answer = subprocess.run([*script, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (4, "")
    assert answer.stderr.splitlines() == [
        "Installing …",
        "Installing failed:",
        "  ERROR: No matching distribution found for flux",
        f"  The full log is {log}",
    ]


def test_as_a_script_it_needs_only_the_standard_library(tmp_path: Path) -> None:
    # -S leaves site-packages out, as in a Python that has nothing installed.
    script = [sys.executable, "-S", tools_watch.__file__, str(tmp_path / "log"), "Greeting"]
    answer = subprocess.run([*script, sys.executable, "-c", "print('hi')"], capture_output=True, text=True, check=False)
    assert answer.returncode == 0
    assert (tmp_path / "log").read_text() == "hi\n"
