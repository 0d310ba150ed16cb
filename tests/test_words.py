"""Names say what they hold, no two classes share a name, and tests hold what matters, not sentences."""

import ast
import pathlib
import re
from collections import Counter

import sparkring

PACKAGE = pathlib.Path(sparkring.__file__).parent
SOURCES = {
    path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py") if "node_modules" not in path.parts
}
VAGUE = {"found", "told", "said", "each"}
MAY_BIND = re.compile(r"\b(?:found|told|said|each)(?: *[:=,)]| in\b)")  # parsing all files would take too long


def vague_names(text):
    """Yield the line and the name of each local and parameter that has a vague name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id in VAGUE and not isinstance(node.ctx, ast.Load):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in VAGUE:
            yield node.lineno, node.arg


def test_no_name_is_vague():
    vague = [
        f"{path}:{line} {name}"
        for path, text in SOURCES.items()
        if MAY_BIND.search(text)
        for line, name in vague_names(text)
    ]
    assert not vague, "name these locals and parameters for what they hold"


def test_no_classes_share_a_name():
    names = Counter(name for text in SOURCES.values() for name in re.findall(r"(?m)^\s*class (\w+)", text))
    assert [name for name, count in names.items() if count > 1] == [], "give the classes unique names"


# How many expectations of the tests still hold a sentence: four words in a row. Others hold what matters in it, with
# mentions() and patterns, or a typed field. Lower the number when you can.
SENTENCES = 101
TESTS = pathlib.Path(__file__).parent
FOUR_WORDS = re.compile(r"(?:[A-Za-z][A-Za-z'’-]*[,;:.]? ){3}[A-Za-z][A-Za-z'’-]*")


def expectations(tree):
    """Yield what is asserted, without the assertions' messages, and the patterns of errors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.test
        elif isinstance(node, ast.keyword) and node.arg == "match":
            yield node.value


def test_no_more_expectations_hold_sentences():
    sentences = [
        f"{path.relative_to(TESTS)}:{expected.lineno}"
        for path in sorted(TESTS.rglob("*.py"))
        for expected in expectations(ast.parse(path.read_text()))
        if any(
            isinstance(node, ast.Constant) and isinstance(node.value, str) and FOUR_WORDS.search(node.value)
            for node in ast.walk(expected)
        )
    ]
    assert len(sentences) <= SENTENCES, f"hold fields, numbers and names, not sentences: {sentences}"
