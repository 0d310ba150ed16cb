"""Finds the installed packages that code imports, and packs those that other Pythons lack, if they are pure Python."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import pickle
import re
import zlib
from collections.abc import Mapping
from importlib import metadata
from typing import NamedTuple

from sparkring.capture.syntax import parsed
from sparkring.capture.versions import installed, minor, modules_of_distribution, package_names
from sparkring.wire.messages import LackingPackages

MOST_BYTES, MOST_FILES = 5_000_000, 1_000  # of one package that is sent
# What a cell may do so that a module can be imported there which was not there before.
_PROVIDES = re.compile(r"\b(pip|conda|mamba|uv|addsitedir|PYTHONPATH|addPyFile|sys\s*\.\s*(path|modules|meta_path))\b")


class CodeImports(NamedTuple):
    """The top-level modules that code and the user's own modules import.

    `anywhere` includes imports in functions and in `try` statements. Without the `needed` ones, the code fails.
    """

    anywhere: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()


def needed(source: str) -> frozenset[str]:
    """Return the top-level modules that a cell imports whatever happens, and that it does not provide itself."""
    try:
        tree = parsed(source)
    except SyntaxError:  # the ranks raise it
        return frozenset()
    if _PROVIDES.search(source):
        return frozenset()
    names: set[str] = set()
    for statement in tree.body:
        match statement:
            case ast.Import(names=aliases):
                names.update(alias.name.partition(".")[0] for alias in aliases)
            case ast.ImportFrom(module=str(module), level=0):
                names.add(module.partition(".")[0])
    return frozenset(names)


def lacking(imports: CodeImports, there: Mapping[str, str]) -> LackingPackages | None:
    """Return what a Python lacks that has the modules `there`; None if it lacks nothing that the code imports.

    Only modules count that are installed here.
    """
    here = installed()
    missing = frozenset(name for name in imports.anywhere if name in here and name not in there)
    return _packed(missing, imports.needed & missing, frozenset(there)) if missing else None


def differences(imports: CodeImports, there: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return the modules that code imports and whose minor version differs `there`, with both versions."""
    here = installed()
    both = sorted(name for name in imports.anywhere if here.get(name) and there.get(name))
    return [(name, here[name], there[name]) for name in both if minor(here[name]) != minor(there[name])]


def requirement(module: str) -> str:
    """Return what pip installs for a module, with the version here, as in "scikit-learn==1.3.2"."""
    package = _distribution(module)
    return module if package is None else f"{package.name}=={package.version}"


@functools.lru_cache(maxsize=8)
def _packed(missing: frozenset[str], needed: frozenset[str], there: frozenset[str]) -> LackingPackages:
    files: dict[str, str] = {}
    sent = []
    for module in sorted(missing):
        of_package = _files(module, there)
        if of_package is not None:
            files |= of_package
            sent.append(module)
    contents: dict[str, bytes] = {}
    for name, path in files.items():
        with open(path, "rb") as file:
            contents[name] = file.read()
    requirements = {module: requirement(module) for module in sorted(missing.difference(sent))}
    packed = zlib.compress(pickle.dumps(contents), 1) if contents else b""
    return LackingPackages(tuple(sent), requirements, tuple(sorted(needed.difference(sent))), packed)


def _files(module: str, there: frozenset[str], above: frozenset[str] = frozenset()) -> dict[str, str] | None:
    """Return the files of a module's package, and of those that it requires and that are not `there`: name and path.

    Return None if one of them cannot be sent, because it has compiled parts, or is large. `above` are the packages that
    require this one.
    """
    package = _distribution(module)
    if package is None:
        return None
    if package.name in above:
        return {}
    files = _own_files(package)
    for required in () if files is None else package.requires or ():
        name, _, condition = required.partition(";")
        match = re.match(r"[\w.-]+", name.strip())
        if match is None or "extra" in condition:
            continue
        with contextlib.suppress(metadata.PackageNotFoundError):  # it is for other versions of Python, or systems
            for other in modules_of_distribution(metadata.distribution(match[0])):
                if other in installed() and other not in there:
                    more = _files(other, there, above | {package.name})
                    if more is None:
                        return None
                    files = {**(files or {}), **more}
    return files


def _own_files(package: metadata.Distribution) -> dict[str, str] | None:
    files: dict[str, str] = {}
    size_bytes = 0
    if "Root-Is-Purelib: true" not in (package.read_text("WHEEL") or "") or is_editable(package):
        return None
    for file in package.files or ():
        name, path = str(file), str(package.locate_file(file))
        if re.search(r"\.(so|pyd|dylib|dll)\b", name):
            return None
        if file.parts[0] == ".." or name.endswith((".pyc", "/RECORD")) or not os.path.isfile(path):
            continue
        files[name] = path
        size_bytes += os.path.getsize(path)
    return files if files and size_bytes <= MOST_BYTES and len(files) <= MOST_FILES else None


def is_editable(package: metadata.Distribution) -> bool:
    """Return whether a package was installed with `pip install -e`."""
    with contextlib.suppress(ValueError):
        about = json.loads(package.read_text("direct_url.json") or "{}")
        return bool(about.get("dir_info", {}).get("editable"))
    return False


@functools.lru_cache(maxsize=1_000)
def _distribution(module: str) -> metadata.Distribution | None:
    for name in package_names(module):
        with contextlib.suppress(metadata.PackageNotFoundError):
            package = metadata.distribution(name)
            if module in modules_of_distribution(package):
                return package
    return next((package for package in metadata.distributions() if module in modules_of_distribution(package)), None)
