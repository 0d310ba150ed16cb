"""Sends functions of sparkring to executors that do not have it, by pickling them by value."""

from __future__ import annotations

import pkgutil
from typing import Any


def by_value(package: str, file: str) -> dict[str, Any]:
    """Execute a file of `package` under a module name that does not exist, and return its namespace.

    Because of this name, cloudpickle pickles the file's functions by value, so executors need not be able to import the
    module.
    """
    source = pkgutil.get_data(package, file)
    assert source is not None
    namespace: dict[str, Any] = {"__name__": f"sparkring_{file.removesuffix('.py')}"}
    exec(compile(source, f"sparkring_{file}", "exec"), namespace)
    return namespace
