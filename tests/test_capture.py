"""Tests of capture: which names a cell reads, how values are sent, and the errors for values that cannot be sent."""

from __future__ import annotations

import ast
import builtins
import json
import random
import subprocess
import sys
import textwrap
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st
from packaging.version import Version
from texts import mentions

from sparkring.capture import cell as module
from sparkring.capture import set_attributes, source_lines
from sparkring.capture.cell import CapturedName, capture
from sparkring.capture.first_imports import first_imports
from sparkring.capture.names import names_read
from sparkring.capture.packing import pack_call, unpack_call, unpack_names
from sparkring.capture.rank_use import divides_by_rank
from sparkring.capture.string_names import names_in_strings
from sparkring.capture.unread_changes import assigned_again, changed_only
from sparkring.engine.run.background import BackgroundRun
from sparkring.engine.run.program_gang import ProgramGang
from sparkring.errors import CaptureError

BUILTINS = set(vars(builtins))
Namespace = dict[str, Any]


def notebook(source: str = "", **values: Any) -> Namespace:
    """Return a namespace like that of a notebook in which `source` has run as `__main__`."""
    namespace: Namespace = {"__name__": "__main__", "__builtins__": builtins, **values}
    exec(compile(textwrap.dedent(source), "<notebook>", "exec", dont_inherit=True), namespace)
    return namespace


def travelled(source: str, namespace: Namespace, **options: Any) -> Namespace:
    """Return the namespace that a rank in this process would have for the cell `source`."""
    rank: Namespace = {"__name__": "__main__"}
    unpack_names(capture(textwrap.dedent(source), namespace, **options).payload, rank)
    return rank


def on_rank(payload: bytes, cell: str, tmp_path: Path, start: str = "") -> str:
    """Return what `cell` prints in a new process, which first runs `start` and loads `payload` into `__main__`."""
    path = tmp_path / "payload"
    path.write_bytes(payload)
    start += "import os, pathlib; data = pathlib.Path(os.environ['PAYLOAD']).read_bytes()\n"
    start += (
        "from sparkring.capture.packing import unpack_names; unpack_names(data, globals()); del data, unpack_names\n"
    )
    code = start + f"exec(compile({textwrap.dedent(cell)!r}, '<cell>', 'exec'), globals())"
    environment = {"PYTHONPATH": str(Path(module.__file__).parents[1]), "PAYLOAD": str(path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def error(source: str, namespace: Namespace, **options: Any) -> CaptureError:
    with pytest.raises(CaptureError) as raised:
        capture(textwrap.dedent(source), namespace, **options)
    return raised.value


def row(source: str, namespace: Namespace, name: str, **options: Any) -> CapturedName:
    return {each.name: each for each in capture(source, namespace, **options).names}[name]


# ── Which names a cell reads ─────────────────────────────────────────────────────────────────────────────────────────

# source, required names, optional names, all without builtins
CONSTRUCTS = {
    "read": ("x", "x", ""),
    "bound then read": ("x = 1\nx", "", ""),
    "read then bound": ("y = x\nx = 1", "x", ""),
    "reads itself": ("x = x + 1", "x", ""),
    "augmented assignment": ("x += 1", "x", ""),
    "augmented attribute": ("x.n += y", "x y", ""),
    "subscript target": ("x[i] = 1", "x i", ""),
    "unpacking": ("a, *b = c\na, b", "c", ""),
    "chained assignment": ("a = b = c\na, b", "c", ""),
    "delete": ("del x", "x", ""),
    "delete then read": ("x = 1\ndel x\nx", "", "x"),
    "delete an item": ("del x[k]", "x k", ""),
    "annotated": ("x: T = v\nx", "T v", ""),
    "annotated only": ("x: T\nx", "T x", ""),
    "annotations as text": ("from __future__ import annotations\nx: T = v\ndef f(a: U) -> V: ...", "v", ""),
    "f-string": ("f'{x!r:>{w}}'", "x w", ""),
    "nested f-string": ("f'{[f\"{y}\" for y in x]}'", "x", ""),
    "attribute": ("x.y.z", "x", ""),
    "keyword": ("f(x=y)", "f y", ""),
    "lambda": ("g = lambda a, b=c: a + d", "c d", ""),
    "lambda before binding": ("g = lambda: d\nd = 1\ng()", "", "d"),
    "lambda after binding": ("d = 1\ng = lambda: d", "", ""),
    "walrus": ("(n := x)\nn", "x", ""),
    "walrus in a test": ("if (n := x) > 1 and n: pass\nn", "x", ""),
    "walrus that may be skipped": ("x and (n := 1)\nn", "x", "n"),
    "walrus in a conditional": ("(n := 1) if x else 0\nn", "x", "n"),
    "walrus in while": ("while (n := f()): n\nn", "f", ""),
    "walrus in a comprehension": ("[(n := i) for i in x]\nn", "x", "n"),
    "list comprehension": ("[i + y for i in x if z]", "x y z", ""),
    "set comprehension": ("{i for i in x}", "x", ""),
    "dict comprehension": ("{k: v for k, v in x}", "x", ""),
    "generator": ("list(i + y for i in x)", "x y", ""),
    "nested comprehension": ("[[j for j in i if j in y] for i in x]", "x y", ""),
    "comprehension's variable": ("[i for i in x]\ni", "x i", ""),
    "comprehension in a class": ("class A:\n    n = 2\n    m = [i for i in range(x)]", "x", ""),
    "function": ("def f(a=b):\n    return a + c\nf()", "b c", ""),
    "function never called": ("def f(): return c", "c", ""),
    "function reads what is bound": ("c = 1\ndef f(): return c\nf()", "", ""),
    "function called after the binding": ("def f(): return c\nc = 1\nf()", "", ""),
    "function called before the binding": ("def f(): return c\nf()\nc = 1", "", "c"),
    "function called through another": ("def f(): return c\ndef g(): return f()\ng()\nc = 1", "", "c"),
    "function that is never called, of a bound name": ("def f(): return c\nc = 1", "", ""),
    "functions that call each other": ("def f(): g()\ndef g(): f(); c\nf()\nc = 1", "", "c"),
    "function's own names": ("def f():\n    a = 1\n    def g(): return a\n    return g", "", ""),
    "recursion": ("def f(n): return f(n - 1)\nf(1)", "", ""),
    "nested functions": ("def f():\n    def g():\n        return lambda: x\n    return g", "x", ""),
    "decorator": ("@d(x)\ndef f(): return y\ny = 1", "d x", "y"),
    "annotation of a function": ("def f(a: T, *b: U, **c: V) -> W: ...", "T U V W", ""),
    "async function": ("async def f(a=b):\n    async with c as d:\n        await d", "b c", ""),
    "global in a function": ("def f():\n    global x\n    x = 1\nf()\nx", "", "x"),
    "global counter": ("def f():\n    global x\n    x += 1\nf()", "", "x"),
    "global that is only read": ("def f():\n    global x\n    return x", "x", ""),
    "global statement": ("global x\nx = y\nx", "y", ""),
    "nonlocal": ("def f():\n    a = 1\n    def g():\n        nonlocal a\n        a += b\n    g()", "b", ""),
    "class": ("@d\nclass A(B, metaclass=M):\n    x = y\n    z = x\n    def m(self): return w", "d B M y w", ""),
    "class body's own names": ("class A:\n    a = 1\n    b = a\na", "a", ""),
    "class reads, then binds": ("class A:\n    a = a", "a", ""),
    "class body in a function": ("def f():\n    class A:\n        a = b\n        c = a\n    return A", "b", ""),
    "class delete": ("class A:\n    a = 1\n    del a\n    b = a", "a", ""),
    "method": ("class A:\n    def m(self):\n        super().m()\n        return x", "x", ""),
    "class used before the binding": ("class A:\n    def m(self): return x\nA().m()\nx = 1", "", "x"),
    "import": ("import a.b, c as d\nfrom e import f as g\na, d, g", "", ""),
    "import after a read": ("a\nimport a.b", "a", ""),
    "star import": ("from os.path import *\njoin", "join", ""),
    "if": ("if c: x = 1\nx", "c", "x"),
    "if and else": ("if c: x = 1\nelse: x = 2\nx", "c", ""),
    "elif": ("if c: x = 1\nelif d: x = 2\nx", "c d", "x"),
    "if that raises": ("if c: x = 1\nelse: raise e\nx", "c e", ""),
    "twice the same test": ("if rank == 0: m = f()\nif rank == 0: m.save()", "rank f", "m"),
    "if 0": ("if 0: foo\nelse: x\nif 1: y = 1\ny", "x", ""),
    "for": ("for i in x: y = i\ny, i", "x", "y i"),
    "for, from the round before": ("for i in x:\n    print(p)\n    p = i", "x", "p"),
    "for target": ("for a, (b, *c) in x: a, b, c", "x", ""),
    "for attribute target": ("for o.a in x: pass", "o x", ""),
    "for else": ("for i in x: pass\nelse: y = 1\ny", "x", "y"),
    "break": ("for i in x:\n    if i: break\n    y = 1\n    y\ny", "x", "y"),
    "continue": ("for i in x:\n    if i: y = 1\n    else: continue\n    y", "x", ""),
    "break of an outer loop": ("for i in x:\n    for j in i: pass\n    else: break", "x", ""),
    "nested loops": ("for i in x:\n    for j in i:\n        s = s + j", "x", "s"),
    "while": ("while c: c = d\nc", "c d", ""),
    "while true": ("while True:\n    y = x\n    if y: break\ny", "x", "y"),
    "deleted in a loop": ("d = 1\nfor i in x:\n    d\n    del d", "x", "d"),
    "with": ("with open(p) as f, g(f) as h: y = h\ny, f", "p g", ""),
    "with unpacking": ("with a as (b, c): b, c", "a", ""),
    "with suppress": ("with contextlib.suppress(E): y = f()\ny", "contextlib E f", "y"),
    "with that may catch": ("with a: raise E\nx", "a E x", ""),
    "with in a loop": ("for i in x:\n    with a: continue", "x a", ""),
    "try": ("try: x = f()\nexcept E as e: e\nx", "f E", "x"),
    "try with a handler that binds": ("try: x = f()\nexcept E: x = 0\nx", "f E", ""),
    "try with a handler that raises": ("try: x = f()\nexcept E: raise\nx", "f E", ""),
    "try's else": ("try: f()\nexcept E: raise\nelse: x = 1\nx", "f E", ""),
    "try's finally": ("try: f()\nfinally: x = 1\nx", "f", ""),
    "finally reads": ("try: x = f()\nfinally: x", "f", "x"),
    "handler's name is gone after it": ("e = 1\ntry: f()\nexcept E as e: pass\ne", "f E", "e"),
    "NameError is caught": ("try: m\nexcept NameError: m = f()\nm", "f", "m"),
    "match": ("match s:\n  case {'k': v, **r}: v, r\n  case [a, *b] if a: b\n  case C(x=q) | D(q): q", "s C D", ""),
    "match value": ("match s:\n    case m.K: y = 1\ny", "s m", "y"),
    "match with a last case for all": ("match s:\n    case 1: y = 1\n    case _: y = 2\ny", "s", ""),
    "match without one": ("match s:\n    case 1: y = 1\n    case 2: y = 2\ny", "s", "y"),
    "match capture": ("match s:\n    case [1, w] as whole: w, whole", "s", ""),
    "top-level await": ("y = await x\ny", "x", ""),
    "async for": ("async for a in x: a", "x", ""),
    "async with": ("async with x as a: b = a\nb", "x", ""),
    "async comprehension": ("[a async for a in x]", "x", ""),
    "assert": ("assert x, m", "x m", ""),
    "raise from": ("raise E from x", "E x", ""),
    "after a raise": ("raise E\nfoo", "E", ""),
    "dunder names": ("__name__ == '__main__'\n__file__", "", ""),
    "docstring": ("'''text'''\nx", "x", ""),
    "shell command": ("get_ipython().system('ls {a.b} $c {x y}')", "get_ipython", "a c"),
    "timed line": ("get_ipython().run_line_magic('time', 'f(x)')", "get_ipython", "f x"),
}  # fmt: skip


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_names_read(construct: str) -> None:
    """All names that each construct reads are found. Names that the cell may have bound itself are optional."""
    source, required, optional = CONSTRUCTS[construct]
    found = names_read(source)
    assert set(found.required) - BUILTINS == set(required.split()) - BUILTINS
    assert set(found.optional) - BUILTINS == set(optional.split())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="except* needs Python 3.11")
def test_except_star() -> None:
    """`except*` is analysed in the same way as `except`."""
    found = names_read("try: x = f()\nexcept* E as e: x = e\nx")
    assert set(found.required) == {"f", "E"}
    assert not found.optional


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters need Python 3.12")
def test_type_parameters() -> None:
    """Type parameters are not names of the notebook, but the other names that generic code reads are found."""
    found = names_read("class A[T](B):\n    x: T = y\ndef f[U](a: U) -> V: return z\ntype W = list[Q]\ny = 1")
    assert {"B", "V", "z", "Q"} <= set(found.required) | set(found.optional)
    assert "y" in {**found.required, **found.optional}
    assert not {"T", "U"} & {*found.required, *found.optional}


def test_lines() -> None:
    """Each name has the number of the first line that reads it, as the notebook counts lines."""
    found = names_read("\n\nx\n\ndef f():\n    return (1 +\n        y)\nx")
    assert found.required == {"x": 3, "y": 7}


def test_bound_names() -> None:
    """All names that a cell may bind at its top level are found, whichever statement binds them."""
    source = """
    import a.b
    for c in []: d = 1
    with e as f: pass
    try: pass
    except E as g: pass
    def h():
        global i
        i = j = 1
    class K: l = 1
    [(m := n) for n in []]
    match 1:
        case [o, *p]: pass
    """
    assert names_read(textwrap.dedent(source)).bound == set("acdfghiKmop")


@pytest.mark.parametrize("source", ["from os import *", "exec('x = 1')", "globals()['x'] = 1"])
def test_unseen_bindings(source: str) -> None:
    """If a cell may bind names that do not appear in its text, no name is reported as missing."""
    assert names_read(source).star_imports
    capture(f"{source}\nx", notebook())


def test_syntax_errors_pass_through() -> None:
    """A syntax error in the cell is passed on to the caller."""
    with pytest.raises(SyntaxError):
        names_read("x = = 1")


def test_no_warnings_for_the_cell() -> None:
    """Finding the names of a cell does not repeat the compiler's warnings."""

    def warned(read: Callable[[str], object]) -> set[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            read("x is 'a'\nassert (x, 'y')\nfor i in x:\n    '\\d'")
        return {str(warning.message) for warning in found}

    of_compiler = warned(lambda source: compile(source, "cell", "exec"))
    assert len(of_compiler) == 3
    # There may be other warnings, since garbage of earlier tests, such as open files, may be collected at any time.
    assert not of_compiler & warned(names_read)


# ── Names that no one defines ────────────────────────────────────────────────────────────────────────────────────────


def test_missing_name() -> None:
    """The error gives the missing name, its line, and the most similar name."""
    raised = error("\n\nx = fooo + 1", notebook(foo=1))
    assert mentions(str(raised), "line 3", "`fooo`", "`foo`")
    assert raised.line == 3


def test_missing_without_a_near_one() -> None:
    """If no name is similar, none is suggested."""
    assert str(error("qqqqqqq", notebook())).endswith("in the notebook.")


@pytest.mark.parametrize(
    ("cell", "hint"),
    [("sparkring.log(loss=1)", "import sparkring"), ("store = checkpoints()", "from sparkring import checkpoints")],
)
def test_a_missing_import_of_the_package(cell: str, hint: str) -> None:
    assert mentions(str(error(cell, notebook())), f"`{hint}`")


def test_all_missing_names_at_once() -> None:
    """Several missing names are reported in one error, in the order of their lines."""
    raised = error("b_name\na_name", notebook())
    assert [line[:26] for line in str(raised).split("\n")] == [
        f"cell line {n} reads `{m}_name`" for n, m in ((1, "b"), (2, "a"))
    ]


def test_read_before_the_cell_binds_it() -> None:
    """`x = x + 1` needs the notebook's x."""
    assert "before the cell" in str(error("x = x + 1", notebook()))
    assert travelled("x = x + 1", notebook(x=1))["x"] == 1


@pytest.mark.parametrize(
    "source",
    [
        "def f(): return foo",
        "lambda: foo",
        "try: foo\nexcept NameError: pass",
        "try: foo\nexcept (KeyError, NameError): pass",
        "try: foo\nexcept: pass",
        "import contextlib\nwith contextlib.suppress(NameError): foo",
        "if len([1]): foo = 1\nfoo",
        "for i in range(2):\n    if i: foo\n    foo = i",
        "if 0: foo",
        "from os import *\nfoo",
        "len",
    ],
)
def test_not_missing(source: str) -> None:
    """There is no error before the run if a name may be defined when it is read, or if the NameError is caught."""
    capture(source, notebook())


def test_provided_names() -> None:
    """Names that the rank provides are not missing. The notebook's own value takes precedence."""
    assert capture("rank, size", notebook(), provided=("rank", "size")).names == ()
    assert travelled("rank, size", notebook(rank=7), provided=("rank", "size"))["rank"] == 7
    assert capture("rows", notebook(rows=threading.Lock()), reserved=("rows",)).names == ()


def test_helper_that_sets_a_global() -> None:
    """A name is not missing if a function of the notebook sets it when the cell calls the function."""
    namespace = notebook("def init():\n    global model\n    model = 1")
    rank = travelled("init()\nmodel", namespace)
    exec("init()\nassert model == 1", rank)


def test_pushed_names() -> None:
    """Names to push are sent even if the cell does not read them. A name that does not exist is an error."""
    assert travelled("pass", notebook(x=[1]), also=("x",))["x"] == [1]
    assert mentions(str(error("pass", notebook(), also=("y",))), "`y`", "to the ranks")


# ── The same result with only the captured names ─────────────────────────────────────────────────────────────────────

NAMES = st.sampled_from("abcde")
OPERATORS = st.sampled_from(["+", "and", "or", ">"])
VALUES = st.recursive(
    st.one_of(NAMES, st.integers(0, 3).map(str)),
    lambda inner: st.one_of(
        st.tuples(inner, OPERATORS, inner).map(lambda parts: "({} {} {})".format(*parts)),
        st.tuples(NAMES, inner).map(lambda parts: "({} := {})".format(*parts)),
        st.tuples(inner, NAMES).map(lambda parts: "sum([{} for {} in range(2)])".format(*parts)),
        st.tuples(inner, inner, inner).map(lambda parts: "({} if {} else {})".format(*parts)),
        inner.map(lambda value: f"(lambda: {value})()"),
    ),
    max_leaves=4,
)
SIMPLE = st.one_of(
    st.tuples(NAMES, VALUES).map(lambda parts: "{} = {}".format(*parts)),
    st.tuples(NAMES, VALUES).map(lambda parts: "{} += {}".format(*parts)),
    VALUES.map(lambda value: f"out.append({value})"),
    NAMES.map(lambda name: f"del {name}"),
    st.tuples(st.sampled_from("fg"), VALUES).map(lambda parts: "def {}(): return {}".format(*parts)),
    st.tuples(st.sampled_from("fg"), NAMES, VALUES).map(
        lambda parts: "def {}():\n    global {}\n    {} = {}".format(parts[0], parts[1], *parts[1:])
    ),
    st.sampled_from(["f()", "g()", "out.append(f())", "h = f", "h()"]),
    st.tuples(NAMES, VALUES).map(lambda parts: "class K:\n    {0} = {1}\n    out.append({0})".format(*parts)),
    st.tuples(NAMES, NAMES).map(lambda parts: "try: {}\nexcept NameError: {} = 9".format(*parts)),
)


def _block(lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines), "    ")


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    blocks = st.lists(inner, min_size=1, max_size=3).map(_block)
    return st.one_of(
        st.tuples(VALUES, blocks, blocks).map(lambda parts: "if {}:\n{}\nelse:\n{}".format(*parts)),
        st.tuples(VALUES, blocks).map(lambda parts: "if {}:\n{}".format(*parts)),
        st.tuples(NAMES, blocks, st.sampled_from(["break", "continue", "pass"])).map(
            lambda parts: "for {} in range(2):\n{}\n    if a: {}".format(*parts)
        ),
        st.tuples(blocks, blocks, NAMES).map(lambda parts: "try:\n{0}\nexcept TypeError as {2}:\n{1}".format(*parts)),
        st.tuples(blocks, blocks).map(lambda parts: "try:\n{}\nfinally:\n{}".format(*parts)),
        st.tuples(VALUES, blocks, NAMES, blocks).map(
            lambda parts: "match {}:\n    case 1:\n{}\n    case {}:\n{}".format(
                parts[0], textwrap.indent(parts[1], "    "), parts[2], textwrap.indent(parts[3], "    ")
            )
        ),
    )


PROGRAMS = st.lists(st.recursive(SIMPLE, _compound, max_leaves=4), min_size=1, max_size=7).map("\n".join)


def _run(source: str, namespace: Namespace) -> tuple[list[Any], str]:
    out: list[Any] = []
    try:
        exec(source, {**namespace, "out": out, "__builtins__": builtins})
    except Exception as raised:
        return [value for value in out if isinstance(value, int)], f"{type(raised).__name__}: {raised}"
    return [value for value in out if isinstance(value, int)], ""


@example("if (b if b else (a := b)):\n    a = a", {"a", "b"})  # each branch of the test returns by itself
@given(PROGRAMS, st.sets(NAMES))
def test_captured_names_are_enough(source: str, defined: set[str]) -> None:
    """With the captured names alone, a cell does the same as with all names of the notebook."""
    namespace = {name: 10 + at for at, name in enumerate(sorted(defined))} | {"g": lambda: 5, "f": lambda: 6}
    try:
        found = names_read(source)
    except SyntaxError:  # a comprehension whose variable is also bound by a walrus
        reject()
    taken = {name: namespace[name] for name in {*found.required, *found.optional} & {*namespace}}
    assert _run(source, taken) == _run(source, namespace)


# ── Packing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_identity_across_names() -> None:
    """An object that two names share in the notebook is also shared on the rank."""
    shared: list[int] = [1]
    rank = travelled("a, b", notebook(a=shared, b={"a": shared}))
    assert rank["b"]["a"] is rank["a"]


def test_cycles() -> None:
    """Values that contain themselves can be sent."""
    loop: list[Any] = []
    loop.append({"loop": loop})
    rank = travelled("loop", notebook(loop=loop))
    assert rank["loop"][0]["loop"] is rank["loop"]


def test_modules_and_importable_functions_go_by_reference() -> None:
    """Modules, and the functions and classes of modules, are sent by reference; other values are sent by value."""
    import json

    namespace = notebook("def f(): pass\nclass C: pass", json=json, dumps=json.dumps, path=Path, length=len, x=[1])
    rows = {each.name: each for each in capture("json, dumps, path, length, x, f, C", namespace).names}
    by_reference = {name for name, each in rows.items() if each.travels == "by reference"}
    assert by_reference == {"json", "dumps", "path", "length"}
    assert {name: rows[name].type_name for name in ("json", "dumps", "path", "x", "C")} == {
        "json": "module", "dumps": "function", "path": "type", "x": "list", "C": "type",
    }  # fmt: skip
    assert travelled("json", namespace)["json"] is json


def test_numbers_are_kept_as_parameters_but_no_texts() -> None:
    """Texts may be secrets. Of a dict, its numbers are kept."""
    namespace = notebook(lr=0.1, deep=True, token="secret", config={"width": 64, "key": "secret", 3: 4}, rows=[1, 2])
    names = capture("lr, deep, token, config, rows", namespace).names
    assert {name.name: name.numbers for name in names if name.numbers} == {
        "lr": (("", 0.1),), "deep": (("", True),), "config": (("width", 64),),
    }  # fmt: skip
    assert "secret" not in repr(names)


def test_lazily_loaded_modules_go_by_reference() -> None:
    """One such module is `keras` in `from tensorflow import keras`: it has its own type and is loaded on first use."""
    source = """
        import importlib, types

        class Lazy(types.ModuleType):
            def __init__(self):
                super().__init__("lazy")
                del self.__name__  # it has no name before an attribute is read, as in TensorFlow

            def __getattr__(self, name):
                module = importlib.import_module("json")
                self.__dict__.update(vars(module))
                return getattr(module, name)

        lazy = Lazy()
        def dump(): return lazy.dumps([1])
    """
    namespace = notebook(source)
    found = row("lazy", namespace, "lazy")
    assert (found.travels, found.type_name, found.problem) == ("by reference", "module", None)
    rank = travelled("lazy, dump()", namespace)
    assert rank["lazy"] is sys.modules["json"]
    assert rank["dump"]() == "[1]"


def test_table_order_and_sizes() -> None:
    """The largest names are listed first, each with only the size that it adds."""
    big = b"x" * 1000_000
    captured = capture("a, b, c, d", notebook(a=1, b=[big], c=big, d="text" * 10))
    assert [each.name for each in captured.names] == ["b", "d", "a", "c"]  # c is b's first element
    assert captured.names[0].size_bytes is not None
    assert captured.names[0].size_bytes >= 1000_000
    assert sum(each.size_bytes or 0 for each in captured.names) <= len(captured.payload)
    assert captured.large == ()


def test_large_names() -> None:
    """Names whose values have LARGE_BYTES or more are listed, so that the user can be warned about them."""
    captured = capture("a, b", notebook(a=bytes(module.LARGE_BYTES), b=1))
    assert [each.name for each in captured.large] == ["a"]


def test_a_million_elements() -> None:
    """Packing a long list runs no Python code for each element."""
    assert travelled("x", notebook(x=list(range(1_000_000))))["x"][-1] == 999_999


def test_numpy() -> None:
    """Arrays are sent, and the table has the full names of their types."""
    numpy = pytest.importorskip("numpy")
    namespace = notebook(x=numpy.arange(6).reshape(2, 3))
    assert row("x", namespace, "x").type_name == "numpy.ndarray"
    assert (travelled("x", namespace)["x"] == namespace["x"]).all()


def test_torch() -> None:
    """Tensors and modules in this machine's memory can be sent."""
    torch = pytest.importorskip("torch")
    namespace = notebook(
        """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 1)
            def forward(self, x):
                return self.layer(x)
        net = Net()
        """,
        torch=torch, x=torch.ones(3, 2),
    )  # fmt: skip
    rank = travelled("net(x)", namespace)
    assert torch.equal(rank["net"](rank["x"]), namespace["net"](namespace["x"]))


def test_cuda_tensors_stay() -> None:
    """A tensor on a GPU is refused, even inside another value, since the rank has its own GPU."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    raised = error("model", notebook(model=torch.nn.Linear(1, 1).cuda()))
    assert mentions(str(raised), "`model._parameters['weight']`", "GPU's", "`.cpu()`")


DEFINED_IN_THE_NOTEBOOK = """
import dataclasses, enum, abc, typing, collections, functools

class Bad(ValueError):
    def __init__(self, code):
        super().__init__(code)
        self.code = code

@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: list = dataclasses.field(default_factory=list)

class Color(enum.Enum):
    RED = 1
    BLUE = 2

class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...

class Square(Shape):
    __slots__ = ("side",)
    def __init__(self, side): self.side = side
    def area(self): return power(self.side)
    @property
    def twice(self): return 2 * self.area()
    @classmethod
    def of(cls, side): return cls(side)

def power(x): return x ** exponent
exponent = 2
Pair = collections.namedtuple("Pair", "a b")
class Named(typing.NamedTuple):
    a: int
cube = functools.partial(pow, exp=3)
square = Square(3)
red, point, pair = Color.RED, Point(1), Pair(1, 2)
method = square.area
"""


def test_classes_of_the_notebook(tmp_path: Path) -> None:
    """Exceptions, dataclasses, enums, abstract classes, named tuples and partials are sent by value."""
    cell = """
    try:
        raise Bad(3)
    except ValueError as error:
        assert type(error) is Bad and error.code == 3
    assert point == Point(1) and Point(2).y == []
    assert red is Color.RED and Color(2) is Color.BLUE
    assert isinstance(square, Square) and isinstance(square, Shape)
    assert square.twice == 18 and Square.of(2).area() == 4 and method() == 9
    assert pair.b == 2 and type(pair) is Pair and Named(4).a == 4 and cube(2) == 8
    exponent = 3
    assert square.area() == method() == 27
    print("good")
    """
    captured = capture(textwrap.dedent(cell), notebook(DEFINED_IN_THE_NOTEBOOK))
    assert on_rank(captured.payload, cell, tmp_path) == "good\n"


def test_functions_share_the_ranks_main(tmp_path: Path) -> None:
    """On the rank, functions of the notebook share the globals of the cell."""
    namespace = notebook(
        """
        counter = 0
        def count():
            global counter
            counter += 1
        def peek():
            return counter
        """
    )
    cell = """
    count()
    assert counter == 1 and peek() == 1
    counter = 10
    count()
    assert peek() == counter == 11
    import sys
    assert count.__globals__ is peek.__globals__ is sys.modules["__main__"].__dict__ is globals()
    import builtins
    assert __builtins__ is builtins
    print("good")
    """
    captured = capture(textwrap.dedent(cell), namespace)
    assert on_rank(captured.payload, cell, tmp_path) == "good\n"


def test_what_helpers_use_comes_along() -> None:
    """The table lists the names that the notebook's functions use, each with its size and the name that needs it."""
    namespace = notebook("def inner(): return data\ndef helper(): return inner()", data=bytes(100_000))
    rows = {each.name: each for each in capture("helper()", namespace).names}
    assert rows.keys() == {"helper", "inner", "data"}
    assert (rows["data"].via, rows["helper"].via) == ("helper", None)
    assert (rows["helper"].size_bytes or 0) < 10_000 < (rows["data"].size_bytes or 0)
    rank = travelled("helper()", namespace)
    assert rank["helper"]() is rank["data"]


def test_helpers_values_do_not_replace_the_cells() -> None:
    """An object that both a helper and the cell use is one object on the rank."""
    namespace = notebook("state = {'n': 1}\ndef bump():\n    state['n'] += 1\nboxes = [bump, state]")
    rank = travelled("state, bump, boxes", namespace)
    rank["bump"]()
    assert rank["state"] == {"n": 2}
    assert rank["boxes"][1] is rank["state"]
    assert rank["boxes"][0] is rank["bump"]


def test_class_body_inside_a_helper() -> None:
    """Names that the body of a class inside a function reads are sent, too."""
    namespace = notebook("rate = 0.1\ndef make():\n    class A:\n        lr = rate\n    return A")
    assert travelled("make()", namespace)["make"]().lr == 0.1


def test_values_made_by_the_notebooks_code() -> None:
    """If loading a value calls functions of the notebook, these functions find the names that they use."""
    namespace = notebook(
        """
        import math
        def make(x): return Box(scale * x)
        class Box:
            def __init__(self, x): self.x = x
            def __reduce__(self): return make, (math.floor(self.x),)
        scale = 1
        box = Box(2.5)
        """
    )
    assert travelled("box", namespace)["box"].x == 2


def test_redefined_by_the_cell() -> None:
    """If a helper uses a name whose value cannot be sent, but the cell defines the name, the value is left out."""
    namespace = notebook("def use(): return len(rows)", rows=(i for i in ()))
    rank = travelled("rows = [1, 2]\nuse()", namespace)
    rank["rows"] = [1, 2]
    assert rank["use"]() == 2


def test_names_that_ipython_puts_into_a_notebook() -> None:
    """`open`, `exit` and `get_ipython` are the rank's own, in the cell and in helpers."""
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    namespace = notebook("def read(path): return open(path).read()", open=interactiveshell._modified_open)
    rank = travelled("open, read", namespace)
    assert "open" not in rank
    assert rank["read"](__file__).startswith('"""')


def test_commands_in_functions() -> None:
    """The names in the `!` lines of a notebook's functions travel with them: in braces, and after `$`."""
    namespace = notebook("def sh(): return get_ipython().getoutput('cp {src}/a $folder {x y}')", src="s", folder="f")
    rank = travelled("sh()", namespace)
    assert (rank["src"], rank["folder"]) == ("s", "f")


def test_closures_and_decorators() -> None:
    """Functions made by functions keep their variables; a decorator of a module stays a reference."""
    namespace = notebook(
        """
        import functools
        def adder(n):
            def add(x): return x + n
            return add
        add3 = adder(3)
        @functools.lru_cache(maxsize=7)
        def cached(x): return cached(x - 1) + offset if x else 0
        offset = 2
        """
    )
    rank = travelled("add3, cached", namespace)
    assert rank["add3"](1) == 4
    assert rank["cached"](5) == 10
    assert rank["cached"].cache_info()[1:] == (6, 7, 6)


def test_new_types() -> None:
    """A NewType of the notebook arrives, even in annotations, although pickle would send only its name."""
    namespace = notebook("import typing\nUser = typing.NewType('User', int)\ndef f(user: User): return user")
    rank = travelled("f, User", namespace)
    assert rank["f"].__annotations__ == {"user": rank["User"]}
    assert (repr(rank["User"]), rank["User"].__supertype__) == ("__main__.User", int)


def test_standard_streams_become_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """An object that refers to the notebook's stdout refers to the rank's stdout after it has arrived."""
    rank = travelled("x", notebook(x={"out": sys.stdout, "err": sys.stderr}))
    assert rank["x"] == {"out": sys.stdout, "err": sys.stderr}


def test_missing_module_on_the_rank() -> None:
    """The error names a value that cannot be loaded on the rank."""
    import types

    away = types.ModuleType("away_from_here")
    sys.modules["away_from_here"] = away
    try:
        payload = capture("x", notebook(x=away)).payload
    finally:
        del sys.modules["away_from_here"]
    with pytest.raises(CaptureError, match=r"`x` arrived, .*not .*loaded.*No module named 'away_from_here'"):
        unpack_names(payload, {})


# ── What values need in `__main__` ───────────────────────────────────────────────────────────────────────────────────

FOUND_BY_NAME = """
import collections, enum, functools, threading, typing

class Base:
    def __init__(self, x): self.x = x
class Net(Base):
    def value(self): return helper(self.x)
    @staticmethod
    def twice(x): return 2 * x
class Outer:
    class Inner:
        class Innermost: pass
class Color(enum.Enum):
    RED = 1
class Flag(enum.IntFlag):
    A = 1
    B = 2
Pair = collections.namedtuple("Pair", "a b")
class Bad(ValueError): pass
def helper(x): return x + offset
offset = 1
@functools.lru_cache
def cached(x): return x
User = typing.NewType("User", int)
Item = typing.TypeVar("Item")
class Unsendable:
    lock = threading.Lock()
    class Within: pass
values = [Net(1), Net.twice, Outer.Inner(), Outer.Inner.Innermost, Color.RED, Flag.A | Flag.B, Pair(1, 2), Bad("no"),
          functools.partial(helper, 2), cached, User, Item, {"deep": [(Net,)]}]
far = [*map(str, range(5000)), Net(2)]
within = [Unsendable.Within()]
"""


def test_pickle_finds_what_values_are_made_of(tmp_path: Path) -> None:
    """Classes and functions that captured values need are found by name in the rank's `__main__`."""
    cell = """
    import pickle, __main__
    again = pickle.loads(pickle.dumps(values))
    assert [type(each) for each in again] == [type(each) for each in values]
    assert type(values[0]) is __main__.Net is again[-1]["deep"][0][0] and again[0].value() == 2 and again[1](2) == 4
    assert type(again[2]) is Outer.Inner and again[3] is Outer.Inner.Innermost
    assert again[4] is Color.RED and again[5] == Flag(3) and again[6] == Pair(1, 2) and isinstance(again[7], Bad)
    assert again[8]() == 3 and again[9] is cached and again[10] is User and again[11] is Item
    assert type(pickle.loads(pickle.dumps(far))[-1]) is Net and type(within[0]).__qualname__ == "Unsendable.Within"
    class Net: pass
    assert type(values[0]) is not Net and type(values[0]).__bases__ == (Base,)
    print("good")
    """
    cell = textwrap.dedent(cell).replace("Outer.Inner", "__main__.Outer.Inner")
    captured = capture("values, far, within\nclass Net: pass", notebook(FOUND_BY_NAME))
    assert on_rank(captured.payload, cell, tmp_path) == "good\n"
    rows = {each.name: each for each in captured.names}
    assert (rows["Net"].via, rows["Net"].required, rows["Net"].travels) == ("values", False, "by value")
    # If an outer class cannot be sent, pickle does not find the classes inside it, but nothing else is lost.
    assert (rows["Unsendable"].travels, rows["Unsendable"].via) == ("cannot", "within")
    assert rows["within"].travels == "by value"


def test_what_ranks_hold_does_not_come_along() -> None:
    """A warm gang's newer value of a name is kept, even if other values need the name."""
    namespace = notebook("class Net:\n    def f(self): return limit\nlimit = 1\nnet = Net()")
    assert set(travelled("net", namespace)) >= {"net", "Net", "limit"}
    assert not {"Net", "limit"} & set(travelled("net", namespace, held={"Net", "limit"}))


def test_calls_bring_what_their_arguments_are_made_of(tmp_path: Path) -> None:
    """The classes of arguments are sent even if an argument has the same name. Other names are not bound."""
    namespace = notebook(
        "class Net: pass\ndef save(Net, m):\n    import pickle\n    return type(pickle.loads(pickle.dumps(m)))"
    )
    path = tmp_path / "payload"
    path.write_bytes(pack_call(namespace["save"], {"Net": 1, "m": namespace["Net"]()}, namespace).payload)
    code = f"""
    import pathlib
    from sparkring.capture.packing import unpack_call
    function, kwargs = unpack_call(pathlib.Path({str(path)!r}).read_bytes())
    assert kwargs["Net"] == 1 and function(**kwargs) is Net and save is function and "m" not in globals()
    """
    environment = {"PYTHONPATH": str(Path(module.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, check=True)


# ── Source lines ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_source_lines(notebook_cell: Callable[..., Namespace], tmp_path: Path) -> None:
    """inspect and tracebacks find the lines of captured code. They are sent once; lines of libraries are never sent."""
    namespace = notebook_cell("""
        import contextlib
        def outer(x):
            def inner():
                return x / 0  # the fault
            return inner
        class Net:
            def call(self):
                if self:
                    return 1
        net, fault = Net(), outer(1)
        @contextlib.contextmanager
        def opened(): yield
    """)
    cell = """
    import inspect, linecache, traceback
    linecache.checkcache()
    assert inspect.getsource(net.call).splitlines()[1] == "        if self:"
    assert inspect.getsource(fault).startswith("    def inner():")
    assert inspect.getsource(opened) == "@contextlib.contextmanager\\ndef opened(): yield\\n"
    try:
        fault()
    except ZeroDivisionError:
        assert "return x / 0  # the fault" in traceback.format_exc()
    print("good")
    """
    payload = capture("net, fault, opened", namespace).payload
    assert on_rank(payload, cell, tmp_path) == "good\n"
    assert (payload.count(b"# the fault"), payload.count(b"# contextlib")) == (1, 0)
    assert b"class AbstractContextManager" not in payload


def test_the_lines_of_a_cell_full_of_data_stay(notebook_cell: Callable[..., Namespace]) -> None:
    """A cell of some megabytes is not sent along with each function that it defines."""
    namespace = notebook_cell(f"def f(): return 1\ntext = {'x' * source_lines.MOST_CHARS!r}")
    assert len(capture("f", namespace).payload) < 10_000


# ── Submodules ───────────────────────────────────────────────────────────────────────────────────────────────────────

PACKAGE = {"__init__": "", "sub/__init__": "", "sub/deep": "x = 5", "other": "x = 6", "broken": "x = 7"}


@pytest.mark.parametrize(
    "cell",
    [
        "print(pack.sub.deep.x)",
        "def f():\n    return [pack.sub.deep.x for _ in [1]]\nprint(*f())",
        "print(reads())",
        "print(Holder().value())",
        "print(alias.deep.x)",
        "try: pack.broken\nexcept AttributeError: print(5)",
        "print(guarded())",
    ],
)
def test_submodules(cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submodules in attribute chains are imported on the rank. A missing submodule matters only if it is used."""
    for name, source in PACKAGE.items():
        path = tmp_path / f"pack/{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    namespace = notebook("""
        import pack.sub.deep, pack.other, pack.broken
        import pack.sub as alias
        def reads():
            def inner(): return pack.sub.deep.x
            return inner()
        def guarded(): return 5 if True else pack.broken.x
        class Holder:
            def value(self): return pack.sub.deep.x
    """)
    payload = capture(cell, namespace).payload
    (tmp_path / "pack/broken.py").write_text("raise OSError('a library is missing')")
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    for name in [name for name in sys.modules if name.partition(".")[0] == "pack"]:
        del sys.modules[name]
    assert on_rank(payload, f"{cell}\nassert 'pack.other' not in sys.modules", tmp_path, start=start) == "5\n"


# ── Names inside strings ─────────────────────────────────────────────────────────────────────────────────────────────

# source, the names of the notebook that it reads in strings
IN_STRINGS = {
    "query": ("df.query('x > @a and y.str.contains(\"me@b\")')", "a"),
    "query by keyword": ("df.query(expr='x > @a.limit')", "a"),
    "frame's eval": ("df.eval('z = x + @a', inplace=True)", "a"),
    "assigned": ("q = 'x > @a'\nq = q + ' and y < @b'\ndf.query(q)", "a b"),
    "f-string": ("df.query(f'{col} > @a' + ' or @b')", "a b"),
    "in a function": ("def f(): return df.query('@a')", "a"),
    "held by the notebook": ("df.query(text)", "c"),
    "eval": ("eval('a + [b for c in d]')", "a b d"),
    "exec": ("exec('c = a\\nprint(c)')", "a print"),
    "pandas.eval": ("import pandas as pd\npd.eval('a + @b')", "a b"),
    "no code": ("eval('a +')\neval('\\0')", ""),
    "format": ("'{a} {b.x[0]!r:>5} {0}'.format(1, **globals())", "a b 0"),
    "format_map": ("'{a}'.format_map(vars())", "a"),
    "percent": ("'%(a)05d %% %(b)s' % globals()", "a b"),
    "template": ("Template('$a ${b} $$c').substitute(globals())", "a b"),
    "keys": ("globals()['a'], globals().get('b', 0), 'c' in locals(), globals()['__builtins__']", "a b c"),
    "a model's eval": ("model.eval()\nprint('a b @a')", ""),
    "texts that are only shown": ("'''a @a {a}'''\nprint('a', '{a}'.format(a=1), '%(a)s' % b, '$a')\nlog['a']", ""),
}  # fmt: skip


@pytest.mark.parametrize("what", IN_STRINGS)
def test_names_in_strings(what: str) -> None:
    """Strings that are evaluated as code or filled in are searched for names; others are not."""
    source, expected = IN_STRINGS[what]
    found = names_in_strings(ast.parse(source), {"text": "x > @c"})
    assert {each.name for each in found} == set(expected.split())


def test_names_in_strings_come_along(notebook_cell: Callable[..., Namespace]) -> None:
    """Names in strings of the cell and its helpers are sent if possible. Words in a docstring are not."""
    namespace = notebook_cell(
        '''
        def helper(frame):
            """What data and lock are for."""
            return frame.query("x > @low and y < @lock")
        def other(): return eval("data")
        ''',
        low=1, high=2, lock=threading.Lock(), data=bytes(10), df=None,
    )  # fmt: skip
    captured = capture("df.query('x < @high and y > @lock')\nhelper(df)", namespace)
    assert {each.name: (each.required, each.via) for each in captured.names} == {
        "df": (True, None), "helper": (True, None), "high": (False, None), "low": (False, "helper"),
        "lock": (False, None),
    }  # fmt: skip
    assert [each.name for each in captured.left_out] == ["lock"]
    rank: Namespace = {"__name__": "__main__"}
    unpack_names(pack_call(namespace["helper"], {"frame": 1}, namespace).payload, rank)
    assert rank["low"] == 1
    assert not {"lock", "data"} & rank.keys()


# ── What pickle loses, or cannot do ──────────────────────────────────────────────────────────────────────────────────

PECULIAR = """
from __future__ import annotations
import dataclasses, functools, textwrap, typing

def counter():
    n = 0
    def up():
        nonlocal n
        n += 1
        return again(2)
    def get(): return n
    def again(k): return k if k == 0 else again(k - 1)
    return up, get
up, get = counter()

class Hinted: pass
@dataclasses.dataclass
class Config:
    hinted: Hinted
    more: list[Config]
def configured(c: Config) -> typing.Optional[Hinted]: ...

class Circle:
    def __init__(self): self.reads = 0
    @functools.cached_property
    def area(self):
        self.reads += 1
        return 3
circle = Circle()

@functools.singledispatch
def kind(x): return "anything"
@kind.register
def _(x: Circle): return "circle, not " + kind(1)
@kind.register(int)
def _(x): return "number"

class Keyed:
    def __init__(self): self.items = {"a": 1}
    def __getattr__(self, name): return self.items[name]
class Attributes(dict):
    def __getattr__(self, name): return self[name]
class Slotted:
    __slots__ = ("a", "b")
    def __getattr__(self, name): return self.b
keyed, attributes, slotted = Keyed(), Attributes(a=1), Slotted()
attributes["b"], slotted.a = attributes, 1
"""


def test_what_pickle_loses(tmp_path: Path) -> None:
    """Shared variables of closures, cached properties, singledispatch, unguarded `__getattr__`, and hints are kept."""
    cell = """
    assert up() == 0 and up() == 0 and get() == 2
    assert circle.area + circle.area == 6 and circle.reads == 1
    assert (kind(circle), kind(1), kind("")) == ("circle, not number", "number", "anything")
    assert keyed.a == attributes.a == slotted.a == 1 and attributes.b is attributes
    import typing
    assert typing.get_type_hints(Config) == {"hinted": Hinted, "more": list[Config]}
    assert typing.get_type_hints(configured) == {"c": Config, "return": typing.Optional[Hinted]}
    print("good")
    """
    # Type hints are looked up in the cell's namespace. `Hinted` is sent only because `Config` needs it.
    captured = capture(textwrap.dedent(cell.replace("Hinted", "object")), notebook(PECULIAR))
    assert ("Hinted", "Config") in {(each.name, each.via) for each in captured.names}
    assert on_rank(captured.payload, cell, tmp_path) == "good\n"


def test_hints_of_the_cell() -> None:
    """Names in annotations that are strings are sent. Names whose values cannot be sent are left out."""
    namespace = notebook("class A: pass\nclass B: pass", lock=threading.Lock())
    assert travelled("def f(a: 'list[A]', l: 'lock'): ...", namespace).keys() >= {"A"}
    assert travelled("from __future__ import annotations\ndef f(a: A) -> B: ...", namespace).keys() >= {"A", "B"}


def test_implementations_added_to_an_imported_dispatcher() -> None:
    """A `singledispatch` function of a module is imported on the rank, and gets what the notebook has added to it."""
    import pkgutil

    dispatcher = pkgutil.iter_importer_modules
    namespace = notebook("class A: pass\nd.register(A, lambda a, prefix='': 'of A')", d=dispatcher)
    rank = travelled("d, A", namespace)
    assert rank["d"] is dispatcher
    assert rank["d"](rank["A"]()) == "of A"


ARRAYS = """
import numpy as np
base = np.arange(100.0)
part, turned, stepped = base[10:20], base.reshape(10, 10).T, base[::-7]
fixed = base[:3]
fixed.flags.writeable = False
table = np.arange(3_000.0).reshape(3, 1000)
first, last = table[:, 0], table[:, 999]
"""


def test_arrays_that_share_memory() -> None:
    """Views share memory on the rank, whatever their order. Columns that share nothing are sent without their table."""
    pytest.importorskip("numpy")
    namespace = notebook(ARRAYS)
    rank = travelled("stepped, turned, fixed, part, base", namespace)
    for name in ("base", "part", "turned", "stepped", "fixed"):
        assert (rank[name] == namespace[name]).all()
        assert rank[name].flags.writeable == (name != "fixed")
    rank["base"][:] = 7
    assert all((rank[name] == 7).all() for name in ("part", "turned", "stepped", "fixed"))
    assert namespace["base"][1] == 1
    columns = capture("first, last", namespace)
    assert len(columns.payload) < 2_000
    assert (travelled("first, last", namespace)["last"] == namespace["last"]).all()


TENSORS = """
import torch
base = torch.arange(12.0)
part, array, columns = base[2:5], base.numpy(), torch.arange(12).reshape(3, 4)[:, 1:3]
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
model[1].weight = model[0].weight
model(torch.ones(1, 2)).sum().backward()
model[0].bias.label = "bias of 0"
state = model.state_dict()
half, empty, scalar = torch.ones(3, dtype=torch.bfloat16), torch.empty(0), torch.tensor(3)
leaf = torch.ones(2, requires_grad=True)

@torch.compile(backend="eager", fullgraph=True)
def step(x): return compiled(x) + offset
offset = 1
compiled = torch.compile(model, backend="eager")
scripted = torch.jit.script(torch.nn.Linear(2, 2))
step(torch.ones(1, 2))
"""


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
def test_tensors_and_compiled_functions() -> None:
    """Tensors keep their gradients and shared memory. Compiled functions are compiled again."""
    torch = pytest.importorskip("torch")
    namespace = notebook(TENSORS)
    cell = "part, base, array, columns, model, state, half, empty, scalar, leaf, scripted"
    compiled = "step", "compiled"
    if Version(torch.__version__) < Version("2.2"):  # older versions do not keep the arguments of torch.compile
        for name in compiled:
            with pytest.raises(CaptureError, match=rf"`{name}` .*compiled .*torch.compile.* cannot be repeated"):
                travelled(name, namespace)
        compiled = ()
    rank = travelled(", ".join([cell, *compiled]), namespace)
    for name in ("base", "part", "columns", "half", "empty", "scalar", "leaf"):
        assert torch.equal(rank[name], namespace[name])
        assert rank[name].requires_grad == (name == "leaf")
    model = rank["model"]
    assert torch.equal(model[0].weight.grad, namespace["model"][0].weight.grad)
    assert model[1].weight is model[0].weight
    assert model[0].bias.label == "bias of 0"
    x = torch.ones(1, 2)
    if compiled:
        assert rank["compiled"]._orig_mod is model
        assert torch.equal(rank["step"](x), namespace["step"](x))
    assert torch.equal(rank["scripted"](x), namespace["scripted"](x))
    with torch.no_grad():
        rank["base"].fill_(7)
        model[0].weight.fill_(7)
    assert (rank["part"] == 7).all()
    assert (rank["array"] == 7).all()
    assert (rank["state"]["0.weight"] == 7).all()
    assert namespace["base"][0] == 0


def test_an_optimizer_that_horovod_has_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch packs only a part of the state of Horovod's optimizer, so it is refused before the launch."""
    torch, hvd = pytest.importorskip("torch"), pytest.importorskip("horovod.torch")
    monkeypatch.setattr(hvd.global_process_set, "included", lambda: False)  # hvd.init() would start threads
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert travelled("x", {"x": optimizer})["x"].defaults == optimizer.defaults
    raised = error("x.step()", {"x": hvd.DistributedOptimizer(optimizer, model.named_parameters())})
    assert mentions(str(raised), "`x`", "Horovod")


KERAS = """
import numpy as np, tensorflow as tf
from tensorflow import keras
from keras import layers

by = 2.0
class Scale(layers.Layer):
    def __init__(self, power, **options):
        super().__init__(**options)
        self.power = power
    def build(self, shape): self.scale = self.add_weight(name="scale", shape=shape[-1:], initializer="random_normal")
    def call(self, x): return x * self.scale * by ** self.power
class Net(keras.Model):
    def __init__(self, units=3):
        super().__init__()
        self.inner, self.parts = layers.Dense(units, activation=bent), [layers.Dense(2)]
    def call(self, x): return self.parts[0](self.inner(x))
class Plain(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(2)
    def call(self, x): return self.inner(x)
if hasattr(keras, "ops"):  # Keras 2 needs no get_config() here
    Net.get_config = lambda self: {"units": self.inner.units}
class Half(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step): return 0.5 * by
    def get_config(self): return {}
class Counted(keras.metrics.Metric):
    def __init__(self, by, **options):
        super().__init__(**options)
        self.by, self.count = by, self.add_weight(name="count", initializer="zeros")
    def update_state(self, truth, found, sample_weight=None): self.count.assign_add(self.by)
    def result(self): return self.count
    def get_config(self): return {**super().get_config(), "by": self.by}
class Off(keras.losses.Loss):
    def call(self, truth, found): return tf.reduce_mean(truth - found, -1) * by
def times(number): return layers.Lambda(lambda x: x * number)
def bent(x): return x * by
def loss(truth, found): return tf.reduce_mean((truth - found) ** 2) * by
x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")

lambdas = [layers.Lambda(lambda x: x * by), layers.Dense(1, activation=lambda x: x - by)]
model = keras.Sequential([layers.Input((3,)), Scale(2), *lambdas])
optimizer = keras.optimizers.Adam(0.01)
model.compile(optimizer, loss, metrics=["mae"])
model.fit(x, y, verbose=0)
net, untouched, layer, plain = Net(5), Net(), model.layers[0], Plain()
net(x), plain(x)
functional = keras.Model(at := keras.Input((3,)), times(3.0)(times(2.0)(at)))
half, off, counted = keras.optimizers.SGD(Half()), Off(), Counted(2.0)
counted.update_state(0, 0)
functional.compile(half, off, metrics=[counted])

normalization, vectorization = layers.Normalization(), layers.TextVectorization()
discretization = layers.Discretization(num_bins=3)
normalization.adapt(np.arange(30.0).reshape(10, 3))
vectorization.adapt(["a b", "c"])
discretization.adapt(np.arange(10.0))
text = keras.Input((1,), dtype=tf.string)
embedding = keras.Model(text, layers.Embedding(10, 2)(vectorization(text)))
trained = (keras.optimizers if hasattr(keras, "ops") else keras.optimizers.legacy).Adam(0.1)
weight = tf.Variable([1.0, 2.0])
trained.apply_gradients([(tf.ones(2), weight)])

class Stepper(tf.Module):
    def __init__(self): self.state = tf.Variable(1.0)
    @tf.function
    def step(self, x): return x + self.state
@tf.function(input_signature=[tf.TensorSpec([None])])
def doubled(x): return x * weight[0] * by
stepper = Stepper()
step = stepper.step
step(1.0), doubled(tf.ones(2))
dataset = tf.data.Dataset.range(10).map(lambda x: x * 2).shuffle(3, seed=1).batch(4)
words = tf.data.Dataset.from_tensor_slices(["a c"]).batch(1).map(vectorization)

def results():
    return [
        model(x), net(x), layer(x), normalization(x), vectorization(["a c"]), discretization([[4.0]]),
        embedding(tf.constant([["a c"]])), step(1.0), doubled(tf.ones(2)), *dataset.map(tf.reduce_max), *words,
        [int(optimizer.iterations), *optimizer.variables[2:]][0], int(trained.iterations), plain(x), functional(x),
        float(half.learning_rate), counted.result(), off(y, 2 * y),
    ]
"""


@pytest.mark.slow
@pytest.mark.versions("of Keras and TensorFlow")
@pytest.mark.filterwarnings("ignore")
def test_keras_models_and_what_tensorflow_has_traced(tmp_path: Path, watch: Any) -> None:
    """Models of the notebook's classes, losses and lambdas, adapted layers, `tf.function` and datasets arrive.

    The test uses the private attributes `_flatten_layers` and `_compile_config` of models, which exist in Keras 2.15
    and 3.15.
    """
    pytest.importorskip("tensorflow")
    namespace = watch.except_for(lambda: notebook(KERAS))  # TensorFlow leaves a file open
    cell = """
    results()
    assert model.optimizer is optimizer and model.loss is loss and type(net) is Net and untouched(x).shape == (4, 2)
    assert functional.optimizer is half and functional.loss is off
    momentum = optimizer.variables[2].numpy()
    model.fit(x, y, verbose=0)
    stepper.state.assign(5.0)
    assert int(optimizer.iterations) == 2 and momentum.any() and float(step(1.0)) == 6.0
    """
    drawn = random.getstate()
    captured = capture(textwrap.dedent(cell), namespace)
    assert random.getstate() == drawn
    printing = "\nimport numpy as np\nprint([np.asarray(each).tolist() for each in found])"
    found = on_rank(captured.payload, f"found = results(){textwrap.dedent(cell)}{printing}", tmp_path)
    there = [namespace["np"].asarray(each).tolist() for each in namespace["results"]()]
    assert found.splitlines()[-1] == repr(there)


# The notebook's code, and the error about its `x`.
NOT_FROM_TENSORFLOW = {
    "model": ("class Net(keras.Model):\n    def __init__(self, f): super().__init__()\nx = Net(len)",
              "`x` is a Keras model, `Net`, that cannot be rebuilt from its configuration ("),
    "dataset": ("x = tf.data.Dataset.from_generator(lambda: [1], output_types=tf.int32)",
                "`x` is a tf.data.Dataset that depends on this process (PyFunc is stateful); make it in the cell, or"),
    "iterator": ("x = [iter(tf.data.Dataset.range(3))]", "`x[0]` is an iterator over a dataset; call `iter()` on"),
    "concrete function": ("x = tf.function(abs).get_concrete_function(1)", "`x` is a concrete function, which is"),
    "strategy": ("x = tf.distribute.get_strategy()", "`x` is a tf.distribute strategy; make it in the cell"),
    "table": ("x = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(['a'], [1]), 0)",
              "`x` is a tf.lookup table; make it in the cell"),
}  # fmt: skip


def test_what_is_wrong_is_found_beside_a_proxy() -> None:
    """TensorFlow's dicts and tuples are proxies. wrapt 1 and 2 fail differently if an object has no __dict__."""
    proxies = [pytest.importorskip("wrapt").ObjectProxy(wrapped) for wrapped in ({1: 2}, (1,))]
    text = str(
        error("holder", notebook("import threading\nholder = [[[threading.Lock()]], *proxies]", proxies=proxies))
    )
    assert "`holder[0][0][0]` is a `_thread.lock`" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", NOT_FROM_TENSORFLOW)
def test_tensorflow_objects_that_cannot_travel(what: str) -> None:
    """Objects that cannot be sent are refused before the launch, and the error says what to do."""
    pytest.importorskip("tensorflow")
    source, expected = NOT_FROM_TENSORFLOW[what]
    found = str(error("x", notebook(f"import tensorflow as tf\nfrom tensorflow import keras\n{source}")))
    assert expected in found.replace("EagerPyFunc", "PyFunc")  # the name in newer versions of TensorFlow


# ── What cannot be sent ──────────────────────────────────────────────────────────────────────────────────────────────

TRAINER = """
import threading
import warnings
class Loader:
    def __init__(self): self._lock = threading.Lock()
class Trainer:
    __slots__ = ("loader",)
    @property
    def trap(self): raise SystemExit("a property was read")
    def __init__(self): self.loader = Loader()
trainer = Trainer()
"""

LOCK = "import threading\nlock = threading.Lock()\n"

# The notebook's code, and the error about its `x`.
CANNOT = {
    "lock": (LOCK + "x = lock", "`x` is a `_thread.lock`; make it in the cell"),
    "reentrant lock": ("import threading\nx = threading.RLock()", "`x` is a `_thread.RLock`"),
    "event": ("import threading\nx = threading.Event()", "`x._cond._lock` is a `_thread.lock`"),
    "queue": ("import queue\nx = [queue.Queue()]", "`x[0].mutex` is a `_thread.lock`"),
    "thread": ("import threading\nx = threading.Thread()", "`x` is a thread; start it in the cell"),
    "generator": ("x = (i for i in ())", "`x` is a generator"),
    "generator within": ("x = {'a': [1, (i for i in ())]}", "`x['a'][1]` is a generator"),
    "file for reading": ("x = open(__file__)", "`x` is an open file; pass its path"),
    "binary file": ("x = {'f': open(__file__, 'rb')}", "`x['f']` is an open file"),
    "unbuffered file": ("x = open(__file__, 'rb', buffering=0)", "`x` is an open file"),
    "socket": ("import socket\nx = [socket.socket()]", "`x[0]` is a socket; connect in the cell"),
    "database": (
        "import sqlite3\nx = sqlite3.connect(':memory:')",
        "`x` is a `sqlite3.Connection`, which cannot be packed",
    ),
    "frame": ("import sys\nx = sys._getframe()", "`x` is a `frame`, which cannot be packed (TypeError"),
    "three attributes deep": (TRAINER + "x = trainer", "`x.loader._lock` is a `_thread.lock`"),
    "method": (
        TRAINER + "class T(Trainer):\n    def fit(self): ...\nx = T().fit",
        "`x.__self__.loader._lock` is a `_thread.lock`",
    ),
    "in a cycle": (TRAINER + "x = []\nx += [x, {'x': x}, trainer]", "`x[2].loader._lock` is"),
    "global of a function": (LOCK + "def x(): return lock", "`x` uses the notebook's `lock`, a `_thread.lock`"),
    "attribute of a global": (
        TRAINER + "def x(): return trainer",
        "`x` uses the notebook's `trainer`, and `trainer.loader._lock` is a `_thread.lock`",
    ),
    "global of a global": (
        LOCK + "def y(): return lock\ndef x(): return y()",
        "`x` uses the notebook's `y`, and `y` uses the notebook's `lock`, a `_thread.lock`",
    ),
    "closure": (
        LOCK + "def make(a): return lambda: a\nx = make(lock)",
        "`x` uses `a`, a variable of the enclosing function, and `a` is a `_thread.lock`",
    ),
    "default argument": (LOCK + "def x(a=lock): ...", "`x.__defaults__[0]` is a `_thread.lock`"),
    "class attribute": (LOCK + "class x:\n    a = lock", "`x.a` is a `_thread.lock`"),
    "class of an instance": (LOCK + "class C:\n    a = lock\nx = C()", "`x` is a `C`, and `C.a` is a `_thread.lock`"),
    "partial": (LOCK + "import functools\nx = functools.partial(print, lock)", "`x.args[0]` is a `_thread.lock`"),
    "set": (LOCK + "x = {lock}", "`x (one of its elements)` is a `_thread.lock`"),
    "dict key": (LOCK + "x = {lock: 1}", "`x (its key <lock>)` is a `_thread.lock`"),
    "iterator": (LOCK + "x = iter([lock])", "`x` holds a `_thread.lock`"),
    "reduce that raises": (
        "class C:\n    def __reduce__(self): raise ValueError('not me')\nx = [C()]",
        "`x[0]` is a `C`, which cannot be packed (ValueError: not me)",
    ),
    "getstate that raises": (
        "class C:\n    def __getstate__(self): return 1 / 0\nx = C()",
        "(ZeroDivisionError: division by zero); make it in the cell",
    ),
    "nested too deeply": ("x = []\nfor _ in range(100_000): x = [x]", "`x` is nested too deeply to be packed"),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("what", CANNOT)
def test_cannot_travel(what: str) -> None:
    """The error gives the line, the path to the value, a description of the value, and advice."""
    source, expected = CANNOT[what]
    namespace = notebook(source, __file__=__file__)
    raised = error("\n\nx", namespace)
    assert expected in str(raised)
    assert mentions(str(raised), "line 3", "`x`", "cannot", "ranks", "`x")
    assert raised.line == 3
    while isinstance(namespace["x"], list) and namespace["x"] and what == "nested too deeply":
        # Take the list apart level by level: freeing it at once would recurse just as deeply.
        namespace["x"] = namespace["x"][0]


def test_a_getstate_that_leaves_the_lock_out() -> None:
    """The state of an object may omit an attribute that cannot be sent."""
    namespace = notebook(TRAINER + "Loader.__getstate__ = lambda self: {'lock': None}\nloader = trainer.loader")
    assert vars(travelled("loader", namespace)["loader"]) == {"lock": None}


def test_all_that_cannot_travel_at_once() -> None:
    """Several names that cannot be sent are reported in one error."""
    raised = error("b\nprint(a)", notebook(TRAINER + "a = trainer\nb = (i for i in ())"))
    assert [line[:21] for line in str(raised).split("\n")] == ["cell line 1 reads `b`", "cell line 2 reads `a`"]


def test_optional_names_are_left_out() -> None:
    """A name that the cell itself may bind is left out if its value cannot be sent; the other names arrive."""
    namespace = notebook(TRAINER + "y = [1]")
    cell = "if y: trainer = 1\ntrainer, y"
    captured = capture(cell, namespace)
    assert [(each.name, each.travels) for each in captured.left_out] == [("trainer", "cannot")]
    rank = travelled(cell, namespace)
    assert rank["y"] == [1]
    assert "trainer" not in rank


def test_dry_run_raises_nothing() -> None:
    """At the top of its table, a dry run lists everything that would be an error."""
    namespace = notebook(TRAINER + "big = bytes(1000)")
    captured = capture("trainer, big, foo", namespace, dry_run=True)
    assert [each.name for each in captured.names if not each.via] == ["foo", "trainer", "big"]
    assert captured.names[1].problem == "`trainer.loader._lock` is a `_thread.lock`"
    assert captured.names[1].advice
    assert captured.names[1].size_bytes is None
    assert [each.travels for each in captured.names[:3]] == ["cannot", "cannot", "by value"]


def test_walk_ends_in_endless_objects() -> None:
    """The search for the object at fault ends, even in a very long list."""
    source = "class C:\n    def __reduce__(self): return print, (i for i in ())\nx = [C(), *map(str, range(300_000))]"
    namespace = notebook(source)
    assert "cannot be packed" in str(error("x", namespace))


@pytest.mark.parametrize(
    ("holder", "path"), [("x = {'rows': %s}", "x['rows']"), ("def x(): return %s", "x")], ids=["value", "function"]
)
def test_spark_objects(holder: str, path: str, spark: Any) -> None:
    """Sessions, contexts, DataFrames and RDDs are recognised wherever they are held."""
    frame = spark.range(3)
    for value, noun in [
        (spark, "a SparkSession"),
        (spark.sparkContext, "a SparkContext"),
        (frame, "a Spark DataFrame"),
        (frame.rdd, "an RDD"),
        (spark.sparkContext.broadcast([1]), "a Spark broadcast variable"),
        (frame.id, "a reference to an object in the JVM"),
    ]:
        assert noun in str(error("x", notebook(holder % "value", value=value)))
        assert noun in (row("value", notebook(value=value), "value", dry_run=True).problem or "")
    assert f"`{path}`" in str(error("x", notebook(holder % "value", value=frame)))


@pytest.mark.parametrize(("kind", "noun"), [(BackgroundRun, "a background run"), (ProgramGang, "a warm gang")])
def test_runs_and_gangs_stay_on_the_driver(kind: type, noun: str) -> None:
    """The error says what to do with the object, and does not name a lock or a file inside it."""
    assert f"{noun}; " in str(error("x", notebook(x=kind.__new__(kind))))


# ── Calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_large_buffers_travel_beside_the_payload() -> None:
    """A large array is not copied into the payload. On the rank, names still share the array, which is writable."""
    import numpy

    large = numpy.arange(1_000_000.0)
    captured = capture("a, b, c", notebook(a=large, b={"same": large}, c=large[:10]))
    assert len(captured.payload) < 2_000
    assert [buffer.nbytes for buffer in captured.buffers] == [large.nbytes]
    assert {row.name: row.size_bytes for row in captured.names}["a"] >= large.nbytes
    rank: dict[str, Any] = {}
    unpack_names(captured.payload, rank, [bytearray(buffer) for buffer in captured.buffers])
    assert rank["a"] is rank["b"]["same"]
    assert (rank["a"] == large).all()
    assert (rank["c"] == large[:10]).all()
    rank["a"][0] = 7.0
    assert large[0] == 0.0


def test_calls(tmp_path: Path) -> None:
    """A function and its arguments are sent together, and still share the same objects."""
    namespace = notebook("def train(data, rate=0.1, **more): return data, rate, more['same'] is data, base\nbase = 5")
    data = [1]
    function, kwargs = unpack_call(pack_call(namespace["train"], {"data": data, "same": data}, None).payload)
    assert function(**kwargs) == ([1], 0.1, True, 5)


def test_calls_share_the_ranks_main(tmp_path: Path) -> None:
    """If the notebook's namespace is given, its functions have the rank's `__main__` as their globals."""
    namespace = notebook("def step(): global n; n += 1\ndef train():\n    step()\n    return n\nn = 1")
    path = tmp_path / "payload"
    path.write_bytes(pack_call(namespace["train"], {}, namespace).payload)
    code = f"""
    import pathlib
    from sparkring.capture.packing import unpack_call
    function, kwargs = unpack_call(pathlib.Path({str(path)!r}).read_bytes())
    assert function(**kwargs) == 2 and n == 2 and function.__globals__ is globals()
    """
    environment = {"PYTHONPATH": str(Path(module.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, check=True)


def test_importable_functions_are_called_by_reference() -> None:
    """A function of a module is sent by reference."""
    assert unpack_call(pack_call(textwrap.dedent, {"text": " x"}, None).payload) == (textwrap.dedent, {"text": " x"})


@pytest.mark.parametrize("with_namespace", [True, False])
def test_calls_that_cannot_travel(with_namespace: bool) -> None:
    """Paths begin with the name of the function or the argument, and all problems are in one error."""
    namespace = notebook(TRAINER + "def train(data): return trainer")
    data = [iter([1]), (item for item in ())]
    with pytest.raises(CaptureError) as raised:
        pack_call(namespace["train"], {"data": data}, namespace if with_namespace else None)
    assert mentions(str(raised.value), "`train`", "notebook's `trainer`", "`trainer.loader._lock`", "`_thread.lock`")
    assert "`data[1]` is a generator" in str(raised.value)


def test_an_argument_with_the_functions_name() -> None:
    """A function may have an argument of its own name."""
    function, kwargs = unpack_call(pack_call(sorted, {"sorted": 1}, None).payload)
    assert (function, kwargs) == (sorted, {"sorted": 1})


def test_nothing_heavy_is_imported() -> None:
    """The module imports only the standard library and cloudpickle."""
    code = "import sys, sparkring.capture.cell; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    environment = {"PYTHONPATH": str(Path(module.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert not {"IPython", "pyspark", "torch", "numpy", "tensorflow"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("results.append(1)", ["results"]),
        ("results.append((table, 1))", ["results"]),
        ("for i in range(3):\n    table[i] = i\n    table['x'][i] += 1", ["table"]),
        ("frame.loc[0, 'x'] = 1\nseen.add(2)", ["frame", "seen"]),
        ("results.append(1)\nlen(results)", []),
        ("results.pop()", []),
        ("x = table.setdefault('x', [])", []),
        ("results = []\nresults.append(1)", []),
        ("def f(results):\n    return results\nnumber.append(1)\nother.append(1)", []),
        ("del table['x']", []),
    ],
)
def test_containers_that_a_cell_only_changes(cell, found):
    values = {"results": [], "table": {}, "seen": set(), "frame": pandas.DataFrame(), "number": 1}
    assert changed_only(ast.parse(cell), values) == found


def test_what_a_cell_imports_first():
    """A module that is not installed may be the user's, and change what later imports find."""
    source = 'import os, numpy.linalg as la\nx = "\\d"\nfrom scipy import stats\nimport not_installed\nimport pandas'
    assert first_imports(source) == ["os", "numpy", "numpy.linalg", "scipy", "scipy.stats"]
    assert first_imports("def f():\n    import numpy\nfrom . import numpy") == []
    assert first_imports("import numpy\n1 +") == []


@pytest.mark.parametrize(
    ("code", "divides"),
    [
        ("model = fit(x)", False),
        ("if rank == 0:\n    print(loss)\n    torch.save(model, path)", False),
        ("if not hvd.rank() and path:\n    model.save(path)", False),
        ("rank, world_size = dist.get_rank(), dist.get_world_size()", False),
        ("local_rank = int(os.environ['LOCAL_RANK'])\ndevice = torch.device('cuda', local_rank)", False),
        ("model.to(f'cuda:{local_rank}')\ntorch.cuda.set_device(local_rank)", False),
        ("model.fit(x, verbose=1 if hvd.rank() == 0 else 0)", False),
        ("dist.init_process_group('gloo', rank=rank, world_size=size)", False),
        ("sampler = DistributedSampler(data, num_replicas=size, rank=rank)", False),
        ("rank, loss", False),
        ("print(f'{rank}: {loss}')", False),
        ("x = x[rank::size]", True),
        ("torch.manual_seed(dist.get_rank())", True),
        ("if rank == 0:\n    lr = 0.1", True),
        ("if rank == 0:\n    a()\nelse:\n    b()", True),
        ("lr = lrs[world().rank]", True),
        ("seed = int(os.environ['RANK'])", True),
        ("fit(x, hvd.rank())", True),
        ("def f(", True),
    ],
)
def test_code_that_divides_the_work_by_rank(code, divides):
    """Code that uses its rank only for output, devices and connections does not divide the work."""
    assert divides_by_rank(code) == divides


def fill():
    globals()["model"] = 1


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        ("model = fit()", "does not assign `modle`. Did you mean `model`?"),
        ("for _ in range(3):\n    modle = 1", ""),
        ("x = 1", "does not assign `modle`."),
        ("exec('modle = 1')", ""),
        ("globals()['modle'] = 1", ""),
        ("from math import *", ""),
        ("fill()", ""),
        ("def f():\n    global modle\n    modle = 1\nf()", ""),
        ("import __main__\n__main__.modle = 1", ""),
        ("(modle := 3)", ""),
        ("eval('(modle := 3)')", ""),
        ("import sys\nsetattr(sys.modules[__name__], 'modle', 1)", ""),
        ("fit.eval(modle=1)", "does not assign `modle`."),
    ],
)
def test_names_to_pull_that_the_cell_does_not_bind(cell, error):
    """A name to pull that the ranks cannot have is refused. If the cell may bind names unseen, it is not."""
    namespace = {"fit": len}
    exec("def fill():\n    globals()['modle'] = 1", namespace)
    namespace.update(__name__="__main__")
    if not error:
        capture(cell, namespace, pull=("modle",))
        return
    with pytest.raises(CaptureError) as caught:
        capture(cell, namespace, pull=("modle",))
    assert mentions(str(caught.value), "--pull modle:", error)


def test_a_name_to_pull_that_only_the_notebook_has():
    """Such a name is not on the ranks, unless the cell reads it."""
    with pytest.raises(CaptureError, match=r"--pull x: .* uses `x`"):
        capture("1", {"x": [1]}, pull=("x",))
    assert capture("x.append(1)", {"x": [1]}, pull=("x",)).sent == ["x"]


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("model = fit(model)\nif rank == 0:\n    history = f()", ["model", "history"]),
        ("model, other = fit(), 1", ["model"]),
        ("count += 1", ["count"]),
        ("count = 3", []),
        ("count: int = 3\ncount += 1", []),
        ("count = 0\nfor _ in f():\n    count += 1", []),
        ("for _ in f():\n    count += 1", ["count"]),
        ("while f():\n    if g():\n        model, loss = step(model)", ["model"]),
        ("x, *history = f()", ["x", "history"]),
        ("(model, (x, history)), rank = f()", ["model", "x", "history"]),
        ("try:\n    f()\nfinally:\n    model = g()", ["model"]),
        ("match f():\n    case 1:\n        model = g()", ["model"]),
        ("x = load()", []),
        ("x = load()\nx = x.y", []),
        ("for count in range(3):\n    model = 1 + 1", []),
        ("for count in range(3):\n    count += 1", []),
        ("import fun as model\ndef fun(): pass", []),
        ("fun = make()", []),
        ("model.weights = f()", []),
        ("def f():\n    model = fit()", []),
    ],
)
def test_names_of_the_notebook_that_a_cell_assigns(cell, names):
    """Only assignments count that compute a value, and that do not stand in another cell of the notebook."""
    values = {"model": 1.5, "history": [], "count": 2, "x": 3, "fun": fill, "rank_": 1}
    assert assigned_again(cell, values, ["x = load()\nmodel = make()"]) == names


@pytest.mark.parametrize(
    ("earlier", "cell", "words"),
    [
        ("json.indent = 2", "json.dumps(1)", "`json.indent`. The ranks import `json` anew"),
        ("if True:\n    json.decoder.x += 2", "json.dumps(1)", "`json.decoder.x`. The ranks"),
        ("json.indent = 2\njson.JSONDecoder.lr = 1", "json", "`json.indent`, `json.JSONDecoder.lr`. The ranks"),
        ("json.settings['a b']['lr'] = 2", "json", "`json.settings['a b']['lr']`. The ranks"),
        ("json.environ['lr'] = '2'", "json", None),  # ranks get the environment
        ("Decoder.lr = 1", "Decoder", "`Decoder.lr`. The ranks import `Decoder` anew"),
        ("json.indent = 2", "json.indent = 2\njson.dumps(1)", None),
        ("json.indent == 2", "json", None),
        ("own.indent = 2", "own", None),  # an object of the notebook, which is sent with its attributes
        ("frame.indent = 2", "json", None),
    ],
)
def test_attributes_that_the_notebook_has_set_in_modules(earlier, cell, words):
    own = types.SimpleNamespace()
    namespace = {"In": ["", earlier], "json": json, "Decoder": json.JSONDecoder, "own": own, "frame": json}
    names = ["json"] if "json" in cell else [cell]
    notices = set_attributes.notices([cell], names, namespace)
    assert len(notices) == (words is not None)
    assert words is None or words in notices[0]
