"""Parses the user's code without showing the compiler's warnings: the ranks show them when they compile the code."""

from __future__ import annotations

import ast
import warnings


def parsed(source: str) -> ast.Module:
    """Return the syntax tree of `source`. Raises SyntaxError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)
