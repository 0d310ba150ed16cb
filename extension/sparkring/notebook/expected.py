"""Has a spare process import what the notebook has imported, so that its first launch need not wait for the imports."""

from __future__ import annotations

import os
import sys
from typing import Any

# Ranks may have all of these, even if they do not use them. Other frameworks take more memory, or threads, so they are
# imported ahead of time only if ranks have imported them.
PACKAGES = ("pandas", "sklearn", "torch")
_noted: frozenset[str] = frozenset()


def note_imports(result: Any) -> None:
    """After a cell: if the notebook has imported another of the packages, have a spare process import all of these."""
    global _noted
    if _noted.issuperset(imported := [package for package in PACKAGES if package in sys.modules]):
        return
    _noted = frozenset(imported)
    from sparkring.launchers.spare import setting_of, spares
    from sparkring.runtime import limits
    from sparkring.runtime.storage import root_for_ranks
    from sparkring.worker.rank import imports, preloads

    modules = tuple(
        name
        for name, module in sys.modules.copy().items()  # in the order in which their imports began
        if name in preloads.FRAMEWORKS and name.partition(".")[0] in imported and imports.is_installed(module)
    )
    if "torch" in modules:  # a rank that trains imports the other module, too
        modules = (*(name for name in modules if name != "torch._dynamo"), "torch._dynamo")
    if modules:
        spares.expect(setting_of({**os.environ, **root_for_ranks()}, limits.cores()), modules)
