"""Run the notebooks and save them with their outputs, so that they can be read without running them.

Everything that depends on the machine or on the time of the run is removed: folders and names of this computer, the
state of widgets (their static view stays), and timings. A notebook is left unchanged if a cell fails unexpectedly, or
if the outputs would still name this machine, contain a secret or be too large.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import nbformat
import psutil
from nbformat import NotebookNode
from run_demo import ROOT, WIDGET, CellFailed, execute, is_shown, own_kernel, shown

PICTURE = r"data:[\w/+.-]+;base64,[\w+/=]+"  # base64, which may look like a name
PATH = r"(?<![\w.~…-])(?<!dbfs:)"  # what must not precede a path's first slash
# /__w is where PyTorch's wheels are built; PyTorch names its sources there in messages.
FOLDER = rf"{PATH}/(?:home|root|tmp|Users|private|var)/[\w.+-]+|(?<![\w:/.…~<&;-])/(?!dbfs/|__w/)[\w.+-]+/[\w.+-]+"
ADDRESS = r"(?<![\w.])(?:10\.\d+|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.\d+\.\d+(?![\w.])"  # RFC 1918
LEFT = re.compile(rf"{PICTURE}|(?P<told>{FOLDER}|{ADDRESS})")
SECRET = re.compile(r"(?i)token|secret|password|passwd|_key$")
LARGEST_BYTES = 600_000
RUNS = "~/.local/share/sparkring"  # where runs are saved on Linux; written in place of this command's folder


class Unfit(Exception):
    """The notebook must not be written; the message says why."""


def code_digest(notebook: NotebookNode) -> str:
    """Return a digest of the code cells. Changes to the text between the code cells do not change the digest."""
    code = [(cell.id, cell.source) for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def names_of_this_machine(home: Path) -> dict[str, str]:
    """Return patterns for folders and names of this computer, each with its replacement; the most specific first."""
    folders = {str(home): RUNS, str(ROOT): "…", sys.prefix: "…", sys.base_prefix: "…", str(Path.home()): "~"}
    temporary = {tempfile.gettempdir(), os.path.realpath(tempfile.gettempdir()), "/tmp"}
    addresses = {
        address.address
        for each in psutil.net_if_addrs().values()
        for address in each
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    }
    hosts = {socket.gethostname(), socket.getfqdn(), socket.gethostname().partition(".")[0]} - {"localhost", ""}
    found = {rf"{PATH}{re.escape(path)}(?![\w.-])": folders[path] for path in by_length(folders) if len(path) > 1}
    found |= {rf"{PATH}{re.escape(path)}/[\w.-]+": "…" for path in temporary}
    return found | {rf"(?<![\w.-]){re.escape(name)}(?![\w-])": "host" for name in by_length(hosts | addresses)}


def by_length(names: Iterable[str]) -> list[str]:
    """Return the names, the longest first, because a name may contain a shorter one."""
    return sorted(names, key=len, reverse=True)


def cleaner(names: dict[str, str]) -> Callable[[str], str]:
    """Return a function that replaces these names in a text, but not in pictures that it contains."""
    groups = [f"({pattern})" for pattern in names]
    pattern = re.compile("|".join([PICTURE, *groups]))
    spoken = [*names.values()]
    return lambda text: pattern.sub(lambda found: spoken[found.lastindex - 1] if found.lastindex else found[0], text)


def clean(notebook: NotebookNode, say: Callable[[str], str]) -> None:
    """Remove what is useless on another machine: the state of widgets, timings, and names of this machine."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [cleaned(output, say) for output in joined(cell.outputs) if is_shown(output)]


def joined(outputs: list[NotebookNode]) -> Iterator[NotebookNode]:
    """Yield the outputs, with consecutive pieces of a stream joined, because the pieces differ from run to run."""
    last = None
    for output in outputs:
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
            continue
        if last is not None:
            yield last
        last = output
    if last is not None:
        yield last


def cleaned(output: NotebookNode, say: Callable[[str], str]) -> NotebookNode:
    """Return the output without a widget's id and without names of this machine."""
    if output.output_type == "stream":
        output.text = say(output.text)
    elif output.output_type == "error":
        output.evalue = say(output.evalue)
        output.traceback = [say(line) for line in output.traceback]
    else:
        output.data.pop(WIDGET, None)
        for kind, value in output.data.items():
            if isinstance(value, str) and is_text(kind):
                output.data[kind] = say(value)
    return output


def is_text(kind: str) -> bool:
    """Return whether values of this MIME type are text, not base64."""
    return kind.startswith("text/") or kind == "image/svg+xml"


def texts(notebook: NotebookNode) -> Iterator[tuple[str, str]]:
    """Yield all texts in the outputs, each with its cell's id."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                yield cell.id, output.text
            elif output.output_type == "error":
                yield cell.id, "\n".join([output.evalue, *output.traceback])
            else:
                yield from ((cell.id, str(value)) for kind, value in output.data.items() if is_text(kind))


def left_behind(notebook: NotebookNode) -> list[str]:
    """Return the parts of the outputs that still name a machine, each with its cell's id."""
    return [
        f"{cell}: {found['told']}" for cell, text in texts(notebook) for found in LEFT.finditer(text) if found["told"]
    ]


def check(notebook: NotebookNode) -> None:
    """Raise Unfit if the outputs name this machine, hold a secret of its environment, or are too large."""
    if found := left_behind(notebook):
        raise Unfit("its outputs still name parts of this machine: " + ", ".join(found[:5]))
    secrets = [value for name, value in os.environ.items() if SECRET.search(name) and len(value) > 7]
    if any(secret in text for _, text in texts(notebook) for secret in secrets):
        raise Unfit("an output holds the value of an environment variable that looks like a secret.")
    size = len(nbformat.writes(notebook).encode())
    if size >= LARGEST_BYTES:
        raise Unfit(f"it would have {size:,} bytes; more than {LARGEST_BYTES:,} cannot be shown on the web.")


def strip(notebook: NotebookNode) -> None:
    """Remove outputs and execution counts."""
    notebook.metadata.pop("sparkring", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None


def run(path: Path, notebook: NotebookNode, say: Callable[[str], str], timeout_s: int) -> None:
    """Run the notebook in its own folder, and prepare it for writing."""
    metadata = dict(notebook.metadata)
    log = ROOT / "build" / "write_outputs.log"
    log.parent.mkdir(exist_ok=True)
    execute(notebook, path.resolve().parent, log, timeout_s)
    notebook.metadata = NotebookNode(metadata)  # without what the kernel says about its Python
    notebook.metadata.sparkring = NotebookNode(code=code_digest(notebook))
    clean(notebook, say)
    check(notebook)


def main() -> int:
    """Run the command, and return its exit status."""
    cli = argparse.ArgumentParser(description="Run notebooks and save them with their outputs.")
    cli.add_argument("notebooks", nargs="*", type=Path, help="default: all in notebooks/")
    cli.add_argument("--strip", action="store_true", help="remove the outputs without running anything")
    cli.add_argument("--timeout", type=int, default=600, metavar="S", help="seconds that one cell may take (600)")
    options = cli.parse_args()
    paths = options.notebooks or sorted((ROOT / "notebooks").glob("*.ipynb"))
    unfit = 0
    with tempfile.TemporaryDirectory(prefix="sparkring-outputs-") as folder:
        os.environ["SPARKRING_HOME"] = f"{folder}/home"  # so that %runs lists only these runs
        own_kernel(Path(folder, "jupyter"))
        say = cleaner(names_of_this_machine(Path(folder, "home")))
        for path in paths:
            notebook = nbformat.read(path, as_version=4)
            print(shown(path))
            try:
                strip(notebook) if options.strip else run(path, notebook, say, options.timeout)
            except (CellFailed, Unfit) as error:
                unfit += 1
                print(f"write_outputs: {shown(path)} is left as it was: {error}", file=sys.stderr)
                continue
            nbformat.write(notebook, path)
            print(f"  {path.stat().st_size / 1000:,.0f} kB\n")
    return 1 if unfit else 0


if __name__ == "__main__":
    sys.exit(main())
