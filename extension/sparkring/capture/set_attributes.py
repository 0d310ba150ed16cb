"""Finds attributes of modules that the notebook has set. Ranks import these modules anew, without these changes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence

from sparkring.capture.picklability import by_reference

_ASSIGNMENT = re.compile(
    r"^[ \t]*([^\W\d]\w*)((?:\.[^\W\d]\w*)+(?:\[[^]\n]*\])*)[ \t]*(?:[-+*/%&|^@]|//|\*\*|<<|>>)?=(?!=)", re.MULTILINE
)
# How pandas and matplotlib show things, and the environment, which ranks get.
_HARMLESS = re.compile(r"\.options\.(display|plotting)\.|\.rcParams\[|\.environ\[")


def notices(sources: Sequence[str], names: Iterable[str], namespace: Mapping[str, object]) -> list[str]:
    """Return a notice if earlier cells have set attributes of modules, or of classes in modules, among `names`.

    `sources` is the code that the ranks run: attributes that it sets itself are left out.
    """
    imported = {name for name in names if by_reference(namespace.get(name))}
    cells: object = namespace.get("In")  # IPython's list of the cells that have run
    if not imported or not isinstance(cells, list):
        return []
    ours = {path for source in sources for path in _assigned(source)}
    paths = dict.fromkeys(path for cell in cells if isinstance(cell, str) for path in _assigned(cell))
    attributes = [path for path in paths if path not in ours and path.partition(".")[0] in imported]
    if not attributes:
        return []
    roots = dict.fromkeys(path.partition(".")[0] for path in attributes)
    return [
        f"the notebook has set {_quoted(attributes)}. The ranks import {_quoted(roots)} anew, without this change: "
        "make it in this cell, too"
    ]


@functools.lru_cache(maxsize=4_096)  # all cells of a notebook are looked through for each launch
def _assigned(source: str) -> tuple[str, ...]:
    paths = (f"{root}{rest}" for root, rest in _ASSIGNMENT.findall(source))
    return tuple(path for path in paths if not _HARMLESS.search(path))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
