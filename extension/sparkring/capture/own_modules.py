"""Finds the modules that the user has written, and packs their files for ranks on other machines.

These are the modules in the notebook's folder, in other folders on sys.path, and of editable installs. Modules of
installed packages are not sent, and neither are packages with compiled parts, which may not run elsewhere.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import pickle
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from typing import Any, NamedTuple

from sparkring.capture.syntax import parsed
from sparkring.wire.messages import ModuleFiles

MOST_BYTES, MOST_FILES = 20_000_000, 2_000  # of one module with everything in its folder
_MOST_BYTES_OF_DATA = 1_000_000  # of a file that is not Python code
_OTHERS = ("sparkring", "pyspark", "py4j", "cloudpickle", "dbruntime", "IPython")

# What has been sent is sent again with later cells, also if only the ranks have imported it.
_used: set[str] = set()
# Modules that the notebook has imported, but that the user has not written: a notebook has thousands of them.
_others: dict[str, Any] = {}


class OwnModule(NamedTuple):
    """A module on sys.path with the files in its folder, as pairs of a path and its size.

    The paths begin with the name of the module, and are relative to `folder`. `problem` says why it cannot be sent.
    """

    name: str
    folder: str
    files: tuple[tuple[str, int], ...]
    problem: str = ""

    @property
    def title(self) -> str:
        return f"{self.name}.py" if self.files and self.files[0][0] == f"{self.name}.py" else f"{self.name}/"

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.files)


def own_modules(sources: Iterable[str] = ()) -> list[OwnModule]:
    """Return the user's modules that the notebook has imported, those that `sources` import, and what these import.

    The notebook's cells count as sources, also those that have only defined functions.
    """
    _used.update(name for source in (*sources, *cells()) for name in _imported(source))
    waiting = [*_used, *(name for name, module in sys.modules.copy().items() if _others.get(name) is not module)]
    modules: dict[str, OwnModule] = {}
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        module = None if "." in name else _own(name)
        if module is None:
            _others[name] = sys.modules.get(name)
        else:
            modules[name] = module
            if not module.problem:
                waiting += (other for path in _paths(module) for other in _imports_at(path))
    return sorted(modules.values())


def cells() -> list[str]:
    """Return the notebook's cells that have run, as IPython lists them."""
    return [cell for cell in getattr(sys.modules.get("__main__"), "In", None) or () if isinstance(cell, str)]


def packed(modules: Iterable[OwnModule]) -> ModuleFiles | None:
    """Return the message with the files of the modules that can be sent; None if there are none."""
    sendable = [module for module in modules if not module.problem]
    if not sendable:
        return None
    versions = tuple((path, os.stat(path).st_mtime_ns) for module in sendable for path in _paths(module, code=False))
    return _packed(tuple(sendable), versions)


def imports(modules: Iterable[OwnModule], sources: Iterable[str]) -> frozenset[str]:
    """Return the top-level modules that `sources` and these modules import, in any of their statements."""
    paths = (path for module in modules if not module.problem for path in _paths(module))
    in_sources = (name for source in sources for name in _imported(source))
    return frozenset((*in_sources, *(name for path in paths for name in _imports_at(path))))


def problems(modules: Iterable[OwnModule], sources: Iterable[str]) -> list[str]:
    """Return a notice for each module that `sources` import, but that cannot be sent."""
    imported = {name for source in sources for name in _imported(source)}
    return [
        f"`{module.name}` is not sent to the ranks, because {module.problem}: install it for their Python, or put it "
        "in a folder that they share with the notebook"
        for module in modules
        if module.problem and module.name in imported
    ]


@functools.lru_cache(maxsize=2)
def _packed(modules: tuple[OwnModule, ...], versions: tuple[tuple[str, int], ...]) -> ModuleFiles:
    """Return the message. It is kept until one of the files has another version."""
    files: dict[str, bytes] = {}
    for module in modules:
        for path, _ in module.files:
            with open(os.path.join(module.folder, path), "rb") as file:
                files[path] = file.read()
    return ModuleFiles(tuple(module.name for module in modules), zlib.compress(pickle.dumps(files), 1))


def _paths(module: OwnModule, *, code: bool = True) -> list[str]:
    return [os.path.join(module.folder, path) for path, _ in module.files if path.endswith(".py") or not code]


def _own(name: str) -> OwnModule | None:
    """Return the user's module with this name; None if it is not one."""
    # __main__, and generated code, such as that of TensorFlow's AutoGraph, have names with two underscores.
    if name.startswith("__") or name in _OTHERS or name in sys.stdlib_module_names or (spec := _spec(name)) is None:
        return None
    folders = [os.path.abspath(folder) for folder in spec.submodule_search_locations or ()]
    path = folders[0] if folders else os.path.abspath(spec.origin or "")
    parent = os.path.dirname(path)
    if (folders or path.endswith(".py")) and not _is_installed(parent) and os.path.exists(path):
        return _in_folder(name, path) if folders else OwnModule(name, parent, ((f"{name}.py", os.path.getsize(path)),))
    return None


def _spec(name: str) -> ModuleSpec | None:
    """Return the spec of a top-level module, without importing it or reading attributes, which may import something."""
    module = sys.modules.get(name)
    spec = getattr(module, "__dict__", {}).get("__spec__")
    if module is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
    if not isinstance(spec, ModuleSpec) or spec.name != name:
        return None
    has_file = os.path.basename(spec.origin or "") in (f"{name}.py", "__init__.py")
    return spec if has_file or (spec.origin is None and spec.submodule_search_locations) else None


def _in_folder(name: str, folder: str) -> OwnModule:
    files: list[tuple[str, int]] = []
    problem, size_bytes, parent = "", 0, os.path.dirname(folder)
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name.isidentifier() and name != "__pycache__")
        if "pyvenv.cfg" in names:
            folders.clear()
            continue
        for file in sorted(names):
            path = os.path.join(where, file)
            if file.endswith(tuple(EXTENSION_SUFFIXES)):
                problem = f"it has compiled parts ({os.path.relpath(path, parent)})"
            if file.startswith(".") or not os.path.isfile(path):
                continue
            file_bytes = os.path.getsize(path)
            if file.endswith(".py") or file_bytes <= _MOST_BYTES_OF_DATA:
                files.append((os.path.relpath(path, parent), file_bytes))
                size_bytes += file_bytes
        if size_bytes > MOST_BYTES or len(files) > MOST_FILES:
            problem = f"its folder {folder} has more than {MOST_BYTES // 1_000_000} MB or {MOST_FILES:,} files"
            break
    return OwnModule(name, parent, tuple(files), problem)


@functools.lru_cache(maxsize=1_000)
def _is_installed(folder: str) -> bool:
    """Return whether modules in this folder were installed there: by pip, with Python, or with Spark."""
    roots = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    roots += [os.environ.get("SPARK_HOME") or "/databricks", "/databricks"]  # with Spark, and with its notebooks
    if f"{folder}/".startswith(tuple(f"{root}/" for root in roots)) or "-packages/" in f"{folder}/":
        return True
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:  # the module is in a zip
        return True


def _imported(source: str) -> list[str]:
    """Return the top-level modules that code imports, at its top level and elsewhere."""
    try:
        return list(dict.fromkeys(_names_in(parsed(source))))
    except (SyntaxError, ValueError):  # the ranks raise it
        return []


def _names_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name.partition(".")[0] for alias in aliases)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]


def _imports_at(path: str) -> tuple[str, ...]:
    return _imports_of(path, os.stat(path).st_mtime_ns)


@functools.lru_cache(maxsize=MOST_FILES)
def _imports_of(path: str, version: int) -> tuple[str, ...]:
    try:
        with open(path, "rb") as file:
            return tuple(_imported(file.read().decode(errors="replace")))
    except OSError:
        return ()
