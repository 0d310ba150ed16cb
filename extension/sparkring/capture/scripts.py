"""Reads the scripts that a cell's `%run` lines name.

The driver reads them and sends them with the cell. On the ranks, `worker/rank/script.py` runs them.
"""

from __future__ import annotations

import ast
import glob
import importlib.util
import itertools
import json
import os
import re
import shlex
import warnings
from collections.abc import Callable, Collection
from pathlib import Path

from sparkring.capture.syntax import parsed
from sparkring.errors import OptionsError
from sparkring.wire.messages import Script as Script

# Matches one word of a line, including its quotes. Words are split as in a shell.
_WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:\\.|[^"\\])*"|'[^']*'|["'\\])+""")
_QUOTED = re.compile(r"""["'\\]""")
# The comment or the Markdown heading that marks a notebook's cell with parameters.
_HEADING = re.compile(
    r"#+\s*(?:%%\s*)?\**(?:(?:notebook|default|input|job|run|papermill|widget)\s+)?parameters?\**\s*:?", re.IGNORECASE
)
# The options of IPython's %run that work only in the notebook, each with the part of IPython that it needs.
_ELSEWHERE = {flag: of for flags, of in (("db", "debugger"), ("plrsTD", "profiler"), ("tN", "timer")) for flag in flags}


def path_in(line: str) -> str:
    """Return the path in a `%run` line as written, or '' if there is none. Raises OptionsError for a wrong option."""
    return _parsed(line)[1]


def find_script(
    line: str, expand: Callable[[str], str], transform: Callable[[str], str], given: Collection[str] = ()
) -> Script:
    """Read the script that a `%run` line names, and return it with the options and arguments of the line.

    `expand` fills in the notebook's variables in the path; `transform` turns IPython cells into Python. `given` is the
    same as in read_script(). Raises OptionsError, which says what is wrong with the line or with the script.
    """
    flags, target, arguments = _parsed(line)
    if not target:
        raise OptionsError("name a script, as in `%run train.py --lr 0.1`")
    written = expand(_unquoted(target))
    inside = "i" in flags
    if "m" in flags:
        if inside:
            raise OptionsError("-m runs a module in its own namespace: leave out -i")
        _find_module(written)
        name = written.rpartition(".")[2] if "n" in flags else "__main__"
        script = Script(line, written, "", (), module=written)
    else:
        script = read_script(written, transform, given)
        name = Path(script.path).stem if "n" in flags else "__main__"
    return script._replace(
        line=line,
        arguments=arguments,
        name=name,
        inside=inside or is_for_ipython(script.path),
        any_exit="e" in flags,
        patterns="G" not in flags,
    )


def read_script(written: str, transform: Callable[[str], str] | None = None, given: Collection[str] = ()) -> Script:
    """Read the script at a path. Raises OptionsError if the script cannot be read or is not Python.

    `given` are names that already have values. If the script is a notebook, its cells with parameters (with the tag
    `parameters`, or with this heading) do not assign defaults to these names.
    """
    path = os.path.abspath(os.path.expanduser(written))
    if not os.path.exists(path) and os.path.isfile(f"{path}.py"):  # the suffix may be left out, as in IPython
        written, path = f"{written}.py", f"{path}.py"
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise OptionsError(f"there is no file {path}") from None
    except OSError as error:
        raise OptionsError(f"{path} cannot be read: {error.strerror}") from None
    if not is_for_ipython(path):
        transform = str
    elif transform is None:
        raise OptionsError(f"{path} is not a Python script")
    parts: list[tuple[str, str]] = []
    parameters: list[int] = []
    replaced: set[str] = set()
    is_notebook = path.lower().endswith(".ipynb")
    for name, source, has_parameters in _cells(path, data) if is_notebook else [(path, _decoded(path, data), False)]:
        code = _checked(name, transform(source))
        if has_parameters:
            parameters.append(len(parts))
            replaced |= defaults_in(code) & set(given)
            code = without_defaults(code, given)
        parts.append((name, code))
    return Script("", written, path, tuple(parts), parameters=tuple(parameters), replaced=tuple(sorted(replaced)))


def split_arguments(text: str, *, patterns: bool) -> list[str]:
    """Split the text of a script's arguments as a shell would, with `~` expanded.

    With `patterns`, also replace each unquoted pattern, such as `*.csv`, with the names of the files that match it.
    """
    arguments: list[str] = []
    for word in _WORD.findall(text):
        value = os.path.expanduser(_unquoted(word))
        files = sorted(glob.glob(value)) if patterns and not _QUOTED.search(word) else []
        arguments += files or [value]
    return arguments


def _parsed(line: str) -> tuple[set[str], str, str]:
    """Return the flags of a `%run` line, its script or module, and the text of the script's arguments."""
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
    """Return `flag`. Raises OptionsError if it is unknown or does not work on ranks."""
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
    """Raise OptionsError if the module's top-level package does not exist, without importing the package."""
    top = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top) if top else None
    except ValueError:  # the module is loaded, but has no spec: treat it as missing
        spec = None
    if spec is None:
        raise OptionsError(f"there is no module {name}")


def _decoded(path: str, data: bytes) -> str:
    try:
        return importlib.util.decode_source(data)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise OptionsError(f"{path} is not text that Python can read: {error}") from None


def _checked(name: str, source: str) -> str:
    """Return `source`. Raises OptionsError if it is not Python. Code for IPython may have `await` outside functions."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if is_for_ipython(name) else 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks show the compiler's warnings
            compile(source, name, "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        message = error.msg if isinstance(error, SyntaxError) else error
        raise OptionsError(f"{name}{f' line {line}' if line else ''}: {message} (SyntaxError)") from None
    return source


def _cells(path: str, data: bytes) -> list[tuple[str, str, bool]]:
    """Return each code cell of a notebook: a name for tracebacks, the code, and whether it has parameters.

    A cell has parameters if it has the tag `parameters`, or if `Parameters` is its first comment or the heading above.
    """
    cells: list[tuple[str, str, bool]] = []
    above = ""
    try:
        for number, cell in enumerate(json.loads(data)["cells"], 1):
            text = "".join(cell["source"])
            if cell["cell_type"] == "code":
                tagged = "parameters" in cell.get("metadata", {}).get("tags", ())
                first = text.lstrip().partition("\n")[0]
                headed = any(_HEADING.fullmatch(line.strip()) for line in (first, above))
                cells.append((f"{path} cell {number}", text, tagged or headed))
            lines = text.strip().splitlines()
            above = lines[-1] if lines and cell["cell_type"] == "markdown" else ""
    except (ValueError, KeyError, TypeError, AttributeError):
        raise OptionsError(f"{path} is not an nbformat 4 notebook") from None
    return cells


def kept_words(written: str, names: Collection[str]) -> str:
    """Say that parameters of the notebook at the path `written` keep the values that the cell has assigned to them."""
    one = len(names) == 1
    named = ", ".join(f"`{name}`" for name in sorted(names))
    return (
        f"%run {written}: {named} {'keeps the value' if one else 'keep the values'} from the cell, and "
        f"{'its default' if one else 'their defaults'} in the notebook's cell with parameters {'is' if one else 'are'} "
        "not assigned"
    )


def defaults_in(source: str) -> set[str]:
    """Return the names to which without_defaults() would not assign, if they were given."""
    return {name for node in parsed(source).body if (name := _default_of(node))}


def without_defaults(source: str, given: Collection[str]) -> str:
    """Replace each top-level assignment to a name in `given`, such as `lr = 0.1`, with `pass`."""
    code = source.encode()
    lines = [0, *itertools.accumulate(map(len, code.splitlines(keepends=True)))]  # where each line begins
    for node in reversed(parsed(source).body):
        if _default_of(node) in given:
            begin = lines[node.lineno - 1] + node.col_offset
            end = lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            code = code[:begin] + b"pass" + b"\n" * code[begin:end].count(b"\n") + code[end:]
    return code.decode()


def _default_of(node: ast.stmt) -> str:
    """Return the name to which a statement assigns, as in `lr = 0.1`; '' for any other statement."""
    match node:
        case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
            return name
    return ""


def is_for_ipython(path: str) -> bool:
    """Return whether a script's code is for IPython, and so may contain `%` and `!` lines."""
    return re.search(r"\.ipy(nb( cell \d+)?)?$", path, re.IGNORECASE) is not None
