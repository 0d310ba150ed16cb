"""Names say what they hold: no new local is called `found` or `each`, and no new class shares its name with another."""

import ast
import pathlib
import re
from collections import Counter, defaultdict

import sparkring

PACKAGE = pathlib.Path(sparkring.__file__).parent
SOURCES = {
    path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py") if "node_modules" not in path.parts
}
VAGUE = {"found", "told", "said", "each"}
MAY_BIND = re.compile(r"\b(?:found|told|said|each)(?: *[:=,)]| in\b)")  # parsing all files would take too long
# How many lines of a folder still bind a vague name; the other folders have none. Lower a number when you can.
LIMITS = {
    "gangs": 8,
    "launchers": 14,
    "worker": 18,
}
# The names that several classes of the package have. Remove a name when it is unique.
SHARED = {
    *("Mark", "Meter", "Output", "Part", "Piece", "Search", "Shared", "Start", "Table"),
}


def vague_names(text):
    """Yield the line and the name of each local and parameter that has a vague name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id in VAGUE and not isinstance(node.ctx, ast.Load):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in VAGUE:
            yield node.lineno, node.arg


def test_no_folder_gets_more_vague_names():
    lines = defaultdict(set)
    for path, text in SOURCES.items():
        if MAY_BIND.search(text):
            lines[path.parts[0]] |= {f"{path}:{line} {name}" for line, name in vague_names(text)}
    more = {folder: sorted(those) for folder, those in lines.items() if len(those) > LIMITS.get(folder, 0)}
    assert not more, "name these locals and parameters for what they hold"


def test_no_further_classes_share_a_name():
    names = Counter(name for text in SOURCES.values() for name in re.findall(r"(?m)^\s*class (\w+)", text))
    assert {name for name, count in names.items() if count > 1} <= SHARED, "give the new classes unique names"
