"""Runs capture scenarios as a user would: the same cell once in the notebook, and once on a rank.

A scenario file holds scenarios in this form; `---` separates cells of the notebook, and `>>>` stands before the cell
that is run in both places. `!refused WORDS` says that the launch is refused with these words.

    ### title
    x = 1
    >>>
    x + 1

Run with the names of scenario files, this prints a JSON object per scenario: its file and title, the `outcome`
(`identical`, `refused` or `different`) and the `expected` one, what the cell gave in the notebook and on the rank, and
what was printed meanwhile.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import sparkring
from sparkring.capture.remote_names import RemoteNames
from sparkring.engine.run import warm_gang
from sparkring.errors import CaptureError

# Each scenario of these files has a new rank, since what a rank imports or sets stays there. The scenarios of the other
# files share a warm rank, which forgets its names between scenarios.
COLD = ("modules", "processes", "state")
_FORGET = """%%ranks all
for _name in set(globals()) - {_kept}:
    globals().pop(_name, None)
"""


class Scenario(NamedTuple):
    """One scenario: `notebook` are cells that run in the notebook first; `refused` is None if it is not refused."""

    title: str
    notebook: tuple[str, ...]
    cell: str
    refused: str | None


def read(path: Path) -> Iterator[Scenario]:
    """Yield the scenarios of a file."""
    for text in path.read_text().split("### ")[1:]:
        title, _, body = text.partition("\n")
        refused = None
        if body.startswith("!refused"):
            first, _, body = body.partition("\n")
            refused = first.removeprefix("!refused").strip()
        notebook, _, cell = body.rpartition(">>>\n")
        yield Scenario(title, tuple(notebook.split("\n---\n")), cell.rstrip() + "\n", refused)


def run(shell: InteractiveShell, scenario: Scenario, magic: str) -> dict[str, Any]:
    """Run one scenario in `shell`, and restore its notebook afterwards; `magic` is the launch line."""
    before = dict(shell.user_ns)
    with capture_output() as printed:
        for cell in scenario.notebook:
            _run_cell(shell, cell)
        error = _run_cell(shell, f"{magic}\n{scenario.cell}", may_fail=True)
        there = repr(sparkring.last_result.values[0]) if error is None else f"{type(error).__name__}: {error}"
        here = ""
        if scenario.refused is None:
            here = repr(_run_cell(shell, scenario.cell, value=True))
        # Not with reset(), which ends the gang and spends a second on collecting garbage.
        shell.user_ns.clear()
        shell.user_ns.update(before)
        shell.user_ns["_oh"].clear()
    expected = "identical" if scenario.refused is None else "refused"
    if isinstance(error, CaptureError) and (scenario.refused or "") in str(error):
        outcome = "refused"
    else:
        outcome = "identical" if error is None and here == there else "different"
    return {
        "title": scenario.title,
        "expected": expected,
        "outcome": outcome,
        "notebook": here,
        "rank": there,
        "printed": printed.stdout,
    }


def _run_cell(shell: InteractiveShell, source: str, *, may_fail: bool = False, value: bool = False) -> Any:
    """Run a cell as a front end does; return its error, or its value if `value` is true."""
    done = shell.run_cell(source, store_history=False)
    error = done.error_before_exec or done.error_in_exec
    if error is not None and not may_fail:
        raise error
    return done.result if value else error


def main(files: list[str]) -> None:
    """Run all scenarios of the files, in one notebook. Those that need new ranks come first."""
    shell = InteractiveShell.instance(user_module=sys.modules["__main__"])
    shell.run_line_magic("load_ext", "sparkring")
    for file in sorted(map(Path, files), key=lambda file: file.stem not in COLD):
        on_gang = file.stem not in COLD
        if on_gang:
            with contextlib.redirect_stdout(io.StringIO()):
                shell.run_line_magic("gang", "start -n -1")
                shell.run_cell("%%ranks all\n_kept = {*globals(), '_kept', '_name'}")
        for scenario in read(file):
            outcome = run(shell, scenario, "%%horovod" if on_gang else "%%horovod -n -1")
            print(json.dumps({"file": file.stem, **outcome}), flush=True)
            if on_gang:
                with contextlib.redirect_stdout(io.StringIO()):
                    shell.run_cell(_FORGET)
                for gang in warm_gang.every():
                    gang.held = RemoteNames()
        if on_gang:
            shell.run_line_magic("gang", "stop")
