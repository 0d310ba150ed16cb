"""Puts the user's own modules that came with a request where this rank imports them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import sys
import tempfile
import time
import zlib
from collections.abc import Collection, Iterable, Mapping
from importlib.machinery import PathFinder

from sparkring.wire.messages import LackingPackages, ModuleFiles

# What pip would install for the modules that the notebook has, and that this rank's Python lacks.
requirements: dict[str, str] = {}


class SentModules:
    """The modules that the notebook has sent. Their files are below `folder`, which the member removes.

    If it is '', the files are in a folder that is removed when this process exits.
    """

    def __init__(self, folder: str) -> None:
        if not folder:
            self._temporary = tempfile.TemporaryDirectory(prefix="sparkring-")
            folder = self._temporary.name
        self._folder, self._packages = os.path.join(folder, "modules"), os.path.join(folder, "packages")
        self._written: dict[str, bytes] = {}  # by path
        self._waiting: ModuleFiles | None = None
        self._lacking: LackingPackages | None = None

    def take(self, order: ModuleFiles | LackingPackages) -> None:
        """Keep the modules until install()."""
        if isinstance(order, LackingPackages):
            self._lacking = order
        else:
            self._waiting = order

    def install(self) -> None:
        """Make what was sent available. Raise ModuleNotFoundError if a module is needed that this rank does not find.

        Call this when sys.path has the notebook's folders: this machine may share them with the notebook, and a module
        may read large files that are beside it.
        """
        order, self._waiting = self._waiting, None
        lacking, self._lacking = self._lacking, None
        if order is not None:
            self._install(order)
        if lacking is not None:
            self._add(lacking)
        if os.path.isdir(self._packages):
            with contextlib.suppress(ValueError):
                sys.path.remove(self._packages)
            sys.path.append(self._packages)  # last: what this rank's Python has counts
        for module in lacking.needed if lacking is not None else ():
            if module not in sys.modules and importlib.util.find_spec(module) is None:
                raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    def _add(self, lacking: LackingPackages) -> None:
        """Write the files of packages. Those of earlier cells stay, because later cells may use them, too."""
        requirements.update(lacking.requirements)
        files: dict[str, bytes] = pickle.loads(zlib.decompress(lacking.files)) if lacking.files else {}
        for name, contents in files.items():
            path = os.path.join(self._packages, name)
            if not os.path.exists(path):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(contents)
        importlib.invalidate_caches()

    def _install(self, order: ModuleFiles) -> None:
        """Write the files of modules that this rank would not find, or would find with other contents."""
        # The driver, which has sent this, has proved itself, as has all else that ranks unpickle.
        files: dict[str, bytes] = pickle.loads(zlib.decompress(order.files))
        with contextlib.suppress(ValueError):
            sys.path.remove(self._folder)
        sent = {
            path: contents
            for name in order.names
            if not _is_here(name, of_module := dict(_of(name, files)))
            for path, contents in of_module.items()
        }
        self._write(sent)
        if sent:
            sys.path.insert(0, self._folder)
        importlib.invalidate_caches()
        self._find_again({path.partition("/")[0].removesuffix(".py") for path in sent})

    def _find_again(self, names: Collection[str]) -> None:
        """Let imported modules have the files in the folder, where OwnModules then sees that they have changed."""
        for name, module in list(sys.modules.items()):
            root, _, _ = name.partition(".")
            if root in names and not str(getattr(module, "__file__", None)).startswith(self._folder):
                parent = sys.modules.get(name.rpartition(".")[0])
                spec = PathFinder.find_spec(name, getattr(parent, "__path__", None))
                if spec is not None:
                    module.__spec__, module.__file__ = spec, spec.origin
                    if spec.submodule_search_locations is not None:
                        module.__path__ = spec.submodule_search_locations

    def _write(self, files: Mapping[str, bytes]) -> None:
        for path in self._written.keys() - files.keys():
            with contextlib.suppress(OSError):
                os.remove(os.path.join(self._folder, path))
        for path, contents in files.items():
            if self._written.get(path) == contents:
                continue
            target = os.path.join(self._folder, path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            changed = os.stat(target).st_mtime + 1 if os.path.exists(target) else 0.0
            with open(target, "wb") as file:
                file.write(contents)
            # Python uses an old .pyc file if the source has the same size and, in whole seconds, the same time.
            now = max(time.time(), changed)
            os.utime(target, (now, now))
        self._written = dict(files)


def _of(name: str, files: Mapping[str, bytes]) -> Iterable[tuple[str, bytes]]:
    return ((path, contents) for path, contents in files.items() if path == f"{name}.py" or path.startswith(f"{name}/"))


def _is_here(name: str, files: Mapping[str, bytes]) -> bool:
    """Return whether this rank finds the module by itself, with the same contents."""
    spec = PathFinder.find_spec(name)
    if spec is None:
        return False
    locations = list(spec.submodule_search_locations or ())
    folder = os.path.dirname(locations[0] if locations else spec.origin or "")
    try:
        for path, contents in files.items():
            with open(os.path.join(folder, path), "rb") as file:
                if file.read() != contents:
                    return False
    except OSError:
        return False
    return True
