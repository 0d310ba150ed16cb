"""Python expressions on the line of a magic: where they end, what completes them, and their values."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any, TypeVar

from sparkring.errors import OptionsError, SparkringError
from sparkring.notebook.options_table import OptionsTable

Parsed = TypeVar("Parsed")


def split_options(line: str, parse: Callable[[str], Parsed | None], problem: str) -> tuple[Parsed, str]:
    """Return what `parse` makes of the Python at the beginning of a line, and the text of the options after it.

    `parse` returns None if a text is not what the magic expects. If no beginning of the line is, raise an OptionsError
    with the text `problem`.
    """
    ends = [match.start() for match in re.finditer(r"(?<=\s)(#|-\S+)", line) if _begins_options(match[0])]
    for end in [*ends, len(line)]:
        parsed = parse(line[:end].strip())
        if parsed is not None:
            return parsed, line[end:]
    raise OptionsError(problem)


def _begins_options(word: str) -> bool:
    """Whether options or a comment may begin with `word`.

    `--` is rarely part of an expression. `-n` may be part of an expression, but is always read as the option.
    """
    return word.startswith(("#", "--")) or re.fullmatch(r"-np?(=?-?\d*)?", word) is not None


def variables_like(current: str) -> list[str]:
    """Return the words that complete the name at the end of `current` to the name of a variable of the notebook.

    After a variable and a dot, as in `df.gr`, the name is completed to an attribute of the variable's value.
    """
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    begin, owner, name = re.fullmatch(r"(.*?(?:\b([^\W\d]\w*)\.)?)(\w*)", current).groups()  # type: ignore[union-attr] # it matches any word
    if shell is None or not (owner or name):
        return []
    names = shell.user_ns if owner is None else dir(shell.user_ns.get(owner))
    return [
        begin + candidate
        for candidate in names
        if candidate.startswith(name) and (name or not candidate.startswith("_"))
    ]


def complete_expression(line: str, split: Callable[[str], tuple[object, str]], table: OptionsTable) -> list[str]:
    """Return what Tab offers on a line with an expression and options: variables, or options from `table`.

    `split` returns the expression and the text of the options, or raises OptionsError if there is no expression yet.
    """
    words = line.split()
    current = "" if line[-1:].isspace() or not words else words[-1]
    try:
        _, options = split(line[: len(line) - len(current)])
    except OptionsError:
        return variables_like(current)
    if current.startswith("-") or options.strip():
        return table.complete(f" {options}{current}")
    return table.complete(" ") if not current else variables_like(current)


def evaluated(magic: str, written: str, code: types.CodeType, namespace: dict[str, Any]) -> Any:
    """Return the value of an expression. If it raises an error, raise an OptionsError that describes this error.

    Errors from search() and other functions of this package are not replaced.
    """
    from sparkring.worker.rank.failures import as_failure

    try:
        return eval(code, namespace)
    except SparkringError:
        raise
    except Exception as error:  # of any type: the expression is the user's code
        traceback = error.__traceback__
        deeper = traceback.tb_next.tb_next if traceback is not None and traceback.tb_next is not None else None
        failure = as_failure(error.with_traceback(deeper))
        message = f"{magic}: `{written}` raised {failure.summary}."
        raise OptionsError(message if deeper is None else f"{message}\n\n{failure.traceback.rstrip()}") from None
