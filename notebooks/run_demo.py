"""Run a notebook in a real kernel of this environment, and show its results.

The notebook writes its results to the file whose path is in SPARKRING_DEMO_OUTCOME, as a JSON list of
`{"step": str, "where": str, "ranks": int, "seconds": float, "speedup": float, "accuracy": float | None}`. The executed
notebook is kept as .ipynb and as .html, even if a cell fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from traitlets.config import Config

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r"\s*<div\b[^>]*\bdata-sparkring[^>]*>\s*</div>\s*")  # the empty element for a live panel
WIDGET = "application/vnd.jupyter.widget-view+json"
# The table's columns, and their formats.
COLUMNS = {"step": "s", "where": "s", "ranks": "d", "seconds": ".1f", "speedup": ".1f", "accuracy": ".3f"}


class CellFailed(Exception):
    """A cell did not end, or ended in an error; the message says which cell and why."""


def execute(notebook: nbformat.NotebookNode, folder: Path, log: Path, timeout_s: int) -> None:
    """Run the code cells one by one in `folder`, and print a line for each."""
    code = [(index, cell) for index, cell in enumerate(notebook.cells) if cell.cell_type == "code" and cell.source]
    sockets = tempfile.TemporaryDirectory(prefix="sparkring-kernel-")
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        # The sockets are in the file system. With TCP, any user of this machine could connect to the kernel, and the
        # kernel would print a warning about this.
        config=Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets.name}/kernel"}}),
    )
    # The kernel's children, such as Spark's Java, write to the log. On the terminal, they would break up the lines.
    with sockets, log.open("wb") as sink, client.setup_kernel(stdout=sink, stderr=sink):
        try:
            for number, (index, cell) in enumerate(code, start=1):
                title = shorten(cell.source.strip().splitlines()[0], 72)
                print(f"  [{number:>2}/{len(code)}] {title:<72}", end=" ", flush=True)
                begun = time.monotonic()
                try:
                    client.execute_cell(cell, index)
                except CellExecutionError as error:
                    raise CellFailed(f"cell {number} of {len(code)} ({title}) failed.\n\n{error.traceback}") from error
                except CellTimeoutError as error:
                    reason = f"did not end within {timeout_s} s; --timeout sets a longer limit."
                    raise CellFailed(f"cell {number} of {len(code)} ({title}) {reason}") from error
                except DeadKernelError as error:
                    raise CellFailed(f"the kernel died in cell {number} of {len(code)} ({title}).") from error
                finally:
                    print(f"{time.monotonic() - begun:6.1f} s", flush=True)
        finally:
            for _, cell in code:
                cell.outputs = [output for output in cell.outputs if is_shown(output)]


def is_shown(output: nbformat.NotebookNode) -> bool:
    """Return whether the output shows anything without a kernel."""
    data = output.get("data", {})
    if "text/html" in data:
        return not PLACE.fullmatch(data["text/html"])
    return WIDGET not in data or bool(set(data) - {WIDGET, "text/plain"})


def own_kernel(folder: Path) -> None:
    """Make "python3" mean this interpreter, whatever kernels the user has installed."""
    write_kernel_spec(folder / "kernels" / "python3")
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("JUPYTER_PATH")]))


def keep(notebook: nbformat.NotebookNode, folder: Path, name: str) -> Path:
    """Write the executed notebook as .ipynb and .html, and return the path of the .html file."""
    nbformat.write(notebook, folder / f"{name}.ipynb")
    page = folder / f"{name}.html"
    body, _ = HTMLExporter().from_notebook_node(notebook)
    page.write_text(body, encoding="utf-8")
    return page


def after(outcome: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the last run of the whole notebook and these, which are compared with the first of a step."""
    earlier = json.loads(outcome.read_text(encoding="utf-8")) if outcome.is_file() else []
    new = {(row["step"], row["where"]) for row in rows}
    rows = [row for row in earlier if (row["step"], row["where"]) not in new] + rows
    for row in rows:
        row["speedup"] = next(first["seconds"] for first in rows if first["step"] == row["step"]) / row["seconds"]
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the outcome as aligned columns, with numbers aligned to the right."""
    cells = [
        ["" if row.get(column) is None else format(row[column], form) for column, form in COLUMNS.items()]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *cells, strict=True)]
    right = [form != "s" for form in COLUMNS.values()]
    lines = [
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        )
        for line in [list(COLUMNS), ["─" * width for width in widths], *cells]
    ]
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def shorten(text: str, width: int) -> str:
    """Return the text; if it is longer than `width`, it is cut and ends with an ellipsis."""
    return text if len(text) <= width else text[: width - 1] + "…"


def main() -> int:
    """Run the command, and return its exit status."""
    cli = argparse.ArgumentParser(description="Run a notebook in a real kernel and show its results.")
    cli.add_argument("notebook", nargs="?", type=Path, default=ROOT / "notebooks" / "quickstart.ipynb")
    cli.add_argument("--tag", help="run only the cells that have this tag")
    cli.add_argument("--timeout", type=int, default=600, metavar="S", help="seconds that one cell may take (600)")
    options = cli.parse_args()
    if not options.notebook.is_file():
        print(f"run_demo: there is no notebook {options.notebook}.", file=sys.stderr)
        return 1

    name = options.notebook.stem + (f"-{options.tag}" if options.tag else "")
    folder = ROOT / "build" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    outcome, log = folder / "outcome.json", folder / "kernel.log"
    os.environ["SPARKRING_DEMO_OUTCOME"] = str(outcome)
    own_kernel(folder / "jupyter")

    notebook = nbformat.read(options.notebook, as_version=4)
    if options.tag:
        notebook.cells = [cell for cell in notebook.cells if options.tag in cell.metadata.get("tags", ())]
    print(f"Running {shown(options.notebook)}")
    begun = time.monotonic()
    failure = None
    try:
        execute(notebook, options.notebook.resolve().parent, log, options.timeout)
    except CellFailed as error:
        failure = error
    page = keep(notebook, folder, name)

    if failure:
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(failure))
        print(
            f"\nrun_demo: {text}\n\n  Notebook up to the error: {shown(page)}\n  Output of its processes: {shown(log)}",
            file=sys.stderr,
        )
        return 1
    if outcome.is_file():
        rows = json.loads(outcome.read_text(encoding="utf-8"))
        if options.tag:
            rows = after(folder.with_name(options.notebook.stem) / outcome.name, rows)
        print(f"\n{table(rows)}")
    print(f"\n  All cells ran, in {time.monotonic() - begun:.0f} s. The executed notebook: {shown(page)}")
    return 0


def shown(path: Path) -> str:
    """Return the path relative to the current folder."""
    return os.path.relpath(path)


if __name__ == "__main__":
    sys.exit(main())
