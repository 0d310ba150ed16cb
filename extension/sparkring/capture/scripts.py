"""Finds and reads, on the driver, the scripts of a cell's `%run` lines; they are sent to the ranks with the cell.

On the ranks, `worker/rank/script.py` runs them.
"""

from __future__ import annotations

import ast
import glob
import importlib.util
import json
import os
import re
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path

from sparkring.errors import OptionsError
from sparkring.wire.messages import Script as Script

# Words as a shell would split them, with their quotes.
_WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:\\.|[^"\\])*"|'[^']*'|["'\\])+""")
_QUOTED = re.compile(r"""["'\\]""")
_ELSEWHERE = {flag: of for flags, of in (("db", "debugger"), ("plrsTD", "profiler"), ("tN", "timer")) for flag in flags}


def find_script(line: str, expand: Callable[[str], str], transform: Callable[[str], str]) -> Script:
    """The script of a `%run` line.

    `expand` fills in the notebook's variables in the path; `transform` turns IPython cells into Python. Raises
    OptionsError, which says what is wrong with the line or with the script.
    """
    flags, target, arguments = _parsed(line)
    if not target:
        raise OptionsError("name a script, as in `%run train.py --lr 0.1`")
    written = expand(_unquoted(target))
    inside, any_exit, patterns = ("i" in flags, "e" in flags, "G" not in flags)
    if "m" in flags:
        if inside:
            raise OptionsError("-m runs a module in its own namespace: leave -i out")
        _find_module(written)
        name = written.rpartition(".")[2] if "n" in flags else "__main__"
        found = Script(line, written, "", (), module=written)
    else:
        found = read_script(written, transform)
        name = Path(found.path).stem if "n" in flags else "__main__"
    return found._replace(
        line=line,
        arguments=arguments,
        name=name,
        inside=inside or is_for_ipython(found.path),
        any_exit=any_exit,
        patterns=patterns,
    )


def read_script(written: str, transform: Callable[[str], str] | None = None) -> Script:
    """Read the script at a path; OptionsError if it cannot be read or is not Python."""
    path = os.path.abspath(os.path.expanduser(written))
    if not os.path.exists(path) and os.path.isfile(f"{path}.py"):  # as IPython does
        written, path = f"{written}.py", f"{path}.py"
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise OptionsError(f"there is no file {path}") from None
    except OSError as error:
        raise OptionsError(f"{path} cannot be read: {error.strerror}") from None
    if not is_for_ipython(path):
        return Script("", written, path, ((path, _checked(path, _decoded(path, data))),))
    if transform is None:
        raise OptionsError(f"{path} is not a Python script")
    cells = _cells(path, data) if path.lower().endswith(".ipynb") else [(path, _decoded(path, data))]
    return Script("", written, path, tuple((name, _checked(name, transform(source))) for name, source in cells))


def split_arguments(text: str, *, patterns: bool) -> list[str]:
    """Split the arguments as a shell would, with `~` and unquoted patterns expanded."""
    found: list[str] = []
    for word in _WORD.findall(text):
        value = os.path.expanduser(_unquoted(word))
        files = sorted(glob.glob(value)) if patterns and not _QUOTED.search(word) else []
        found += files or [value]
    return found


def _parsed(line: str) -> tuple[set[str], str, str]:
    """The flags of a `%run` line, its script or module, and the text of the script's arguments."""
    flags: set[str] = set()
    for word in _WORD.finditer(line):
        text = word[0]
        if {"m", "--"} & flags or not text.startswith("-"):
            return flags, text, line[word.end() :]
        if text.startswith("--"):
            flags.add(_flag(text))
        for at, flag in enumerate(text[1:].removeprefix("-"), 2):
            flags.add(_flag(flag))
            if flag == "m" and text[at:]:
                return flags, text[at:], line[word.end() :]
    return flags, "", ""


def _flag(flag: str) -> str:
    """Return the flag; OptionsError if it is unknown or does not work on ranks."""
    if flag in _ELSEWHERE:
        raise OptionsError(f"-{flag} needs the {_ELSEWHERE[flag]} of the notebook's IPython: leave it out")
    if flag not in ("--", "n", "i", "e", "G", "m"):
        raise OptionsError(
            f"%run has no option {flag if flag[0] == '-' else f'-{flag}'}: write the script's options after its name"
        )
    return flag


def _unquoted(word: str) -> str:
    try:
        return "".join(shlex.split(word))
    except ValueError as error:
        raise OptionsError(f"{error} in {word}") from None


def _find_module(name: str) -> None:
    """Raise OptionsError if the module's top-level package does not exist; the package is not imported."""
    top = name.partition(".")[0]
    try:
        found = importlib.util.find_spec(top) if top else None
    except ValueError:  # a module without a spec
        found = None
    if found is None:
        raise OptionsError(f"there is no module {name}")


def _decoded(path: str, data: bytes) -> str:
    try:
        return importlib.util.decode_source(data)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise OptionsError(f"{path} is not text that Python can read: {error}") from None


def _checked(name: str, source: str) -> str:
    """Return `source`; OptionsError if it is not Python. Code for IPython may have `await` outside functions."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if is_for_ipython(name) else 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks show the compiler's warnings
            compile(source, name, "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        said = error.msg if isinstance(error, SyntaxError) else error
        raise OptionsError(f"{name}{f' line {line}' if line else ''}: {said} (SyntaxError)") from None
    return source


def _cells(path: str, data: bytes) -> list[tuple[str, str]]:
    """The code cells of a notebook, each with a name for tracebacks."""
    try:
        cells = enumerate(json.loads(data)["cells"], 1)
        return [(f"{path} cell {n}", "".join(cell["source"])) for n, cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError):
        raise OptionsError(f"{path} is not a notebook of nbformat 4") from None


def is_for_ipython(path: str) -> bool:
    """Whether a script's code is for IPython, and so may contain `%` and `!` lines."""
    return re.search(r"\.ipy(nb( cell \d+)?)?$", path, re.IGNORECASE) is not None
