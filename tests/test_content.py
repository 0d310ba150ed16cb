"""Digests of content: a change of content makes a difference, and the same content is equal in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkring.capture.content import Contents

# Definitions of `value`, with two texts, either of which stands for the @. Both make the same kind of value with
# different contents.
CHANGES = {
    "number": ("value = @", "1", "2"),
    "type of number": ("value = @", "1", "1.0"),
    "boolean": ("value = @", "1", "True"),
    "sign of zero": ("value = @", "0.0", "-0.0"),
    "text": ("value = '@'", "a", "b"),
    "text or bytes": ("value = @", "'a'", "b'a'"),
    "list or tuple": ("value = @", "[1]", "(1,)"),
    "parts of a list": ("value = @", "['ab', 'c']", "['a', 'bc']"),
    "nested list": ("value = [[1, {2: [@]}], None]", "3", "4"),
    "order of a list": ("value = @", "[1, [2]]", "[[2], 1]"),
    "many members": ("value = [*range(1000), @]", "1", "2"),
    "dict": ("value = {'a': 1, 'b': {2, 3}, 'c': @}", "1", "2"),
    "order of a dict": ("value = [{'a': [1], 'b': 2, **@}]", "{'c': 1, 'd': 2}", "{'d': 2, 'c': 1}"),
    "key of a dict": ("value = {(1, @): 1, frozenset('xyz'): 2}", "1", "2"),
    "set": ("value = {'x', 'y', 'z', ('t', @)}", "1", "2"),
    "recursion": ("value = [1]; value += [@, value, {'up': value}]", "1", "2"),
    "nested recursion": ("value = [1]; value += [[value, @], {'up': value}]", "value", "[value]"),
    "date": ("import datetime; value = datetime.date(2020, 1, @)", "1", "2"),
    "time zone": ("import datetime; value = datetime.timezone(datetime.timedelta(hours=@))", "1", "2"),
    "time of a zone": (
        "import datetime, zoneinfo; value = datetime.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo('Europe/@'))",
        "Paris", "Rome",
    ),
    "decimal": ("import decimal; value = decimal.Decimal('1.@')", "1", "2"),
    "fraction": ("import fractions; value = fractions.Fraction(1, @)", "3", "2"),
    "path": ("import pathlib; value = pathlib.Path('a/@')", "b", "c"),
    "uuid": ("import uuid; value = uuid.UUID(int=@)", "1", "2"),
    "range": ("value = range(@)", "1", "2"),
    "slice": ("value = slice(@)", "1", "2"),
    "bytearray": ("value = bytearray([@])", "1", "2"),
    "regular expression": ("import re; value = re.compile('@')", "a+", "a*"),
    "flags of a regular expression": ("import re; value = re.compile('a', @)", "0", "re.I"),
    "deque": ("import collections; value = collections.deque([1, @])", "1", "2"),
    "length of a deque": ("import collections; value = collections.deque([1], @)", "3", "2"),
    "counter": ("import collections; value = collections.Counter('aab@')", "a", "b"),
    "default of a dict": ("import collections; value = collections.defaultdict(@)", "int", "list"),
    "order of an OrderedDict": (
        "import collections; value = collections.OrderedDict(@)", "[(1, 2), (3, 4)]", "[(3, 4), (1, 2)]"
    ),
    "named tuple": ("import collections; value = collections.namedtuple('P', '@ b')(1, 2)", "a", "c"),
    "namespace": ("import types; value = types.SimpleNamespace(lr=@, x='a')", "1", "2"),
    "arguments": ("import argparse; value = argparse.Namespace(lr=@, x='a')", "1", "2"),
    "array": ("import array; value = array.array('i', [@])", "1", "2"),
    "member": ("import enum\nclass Mode(enum.Enum):\n    A = 1\n    B = 2\nvalue = Mode.@", "A", "B"),
    "value of a member": ("import enum\nclass Mode(enum.Enum):\n    A = @\nvalue = Mode.A", "1", "2"),
    "flag": ("import enum\nclass Bit(enum.Flag):\n    A = 1\n    B = 2\n    C = 4\nvalue = Bit.A | Bit.@", "B", "C"),
    "NumPy scalar": ("import numpy as np; value = np.float64(@)", "1", "2"),
    "NumPy scalar's type": ("import numpy as np; value = np.@(1)", "int32", "int64"),
    "long double": ("import numpy as np; value = [np.longdouble(@), np.array([@], np.longdouble)]", "1", "2"),
    "NumPy datetime": ("import numpy as np; value = np.datetime64('2020-01-0@')", "1", "2"),
    "NumPy dtype": ("import numpy as np; value = np.dtype('@')", "f4", "f8"),
    "fields of a dtype": ("import numpy as np; value = np.dtype([('@', 'f4')])", "a", "b"),
    "scalar type": ("import numpy as np; value = np.@", "float32", "float64"),
    "array's values": ("import numpy as np; value = np.full((2, 3), @)", "1.0", "2.0"),
    "array's shape": ("import numpy as np; value = np.zeros(@)", "(2, 3)", "(3, 2)"),
    "array's type": ("import numpy as np; value = np.zeros(3, '@')", "f4", "i4"),
    "array with strides": ("import numpy as np; value = np.arange(10)[::@]", "2", "3"),
    "array of objects": ("import numpy as np; value = np.array([{'a': @}, 'x'], object)", "1", "2"),
    "array with fields": ("import numpy as np; value = np.array([(1, @)], np.dtype('i1,i8', align=True))", "1", "2"),
    "masked array": ("import numpy as np; value = np.ma.array([1, 2], mask=[0, @])", "0", "1"),
    "random generator": ("import numpy as np; value = np.random.default_rng(@)", "1", "2"),
    "table": ("import pandas as pd; value = pd.DataFrame({'a': [1, 2], 'b': ['x', '@']})", "y", "z"),
    "name of a column": ("import pandas as pd; value = pd.DataFrame({'@': [1, 2]})", "a", "b"),
    "index of a table": ("import pandas as pd; value = pd.DataFrame({'a': [1]}, index=[@])", "1", "2"),
    "categories": ("import pandas as pd; value = pd.DataFrame({'a': pd.Categorical(['x'], ['x', '@'])})", "y", "z"),
    "times of a series": ("import pandas as pd; value = pd.Series(pd.date_range('2020-01-0@', periods=3))", "1", "2"),
    "plain object": ("class C:\n    def __init__(self):\n        self.a, self.b = 1, {'x', 'y'}\n"
                     "value = C(); value.c = @", "1", "2"),
    "object with slots": ("class C:\n    __slots__ = ('a', 'b')\nvalue = C(); value.a = @", "1", "2"),
    "recursive object": ("class C: pass\nvalue = C(); value.up = [value]; value.a = @", "1", "2"),
    "network of objects": ("class C: pass\nnodes = [C() for _ in range(30)]\n"
                           "for node in nodes: node.others = nodes\nnodes[7].a = @\nvalue = nodes[3]", "1", "2"),
    "class of an object": ("class A: pass\nclass B: pass\nvalue = @()", "A", "B"),
    "code of an object": ("class C:\n    def f(self): return @\nvalue = [C()]", "1", "2"),
    "object of a class that was defined again": (
        "class C:\n    a = 1\nold = C()\nclass C:\n    a = 2\nnew = C()\nvalue = @", "old", "new"
    ),
    "dataclass": ("import dataclasses\n@dataclasses.dataclass\nclass D:\n    a: int = 1\n    b: set = "
                  "dataclasses.field(default_factory=lambda: {'x', 'y'})\nvalue = D($)", "1", "2"),
    "default of a dataclass": ("import dataclasses\n@dataclasses.dataclass\nclass D:\n    a: int = $\nvalue = D", "1",
                               "2"),
    "type of a field": ("import dataclasses\n@dataclasses.dataclass\nclass D:\n    a: $ = 1\nvalue = D", "int",
                        "float"),
    "dataclass with slots": ("import dataclasses\n@dataclasses.dataclass(frozen=True, slots=True)\nclass D:\n    a: int"
                             "\nvalue = D($)", "1", "2"),
    "attrs": ("import attrs\n@attrs.define\nclass D:\n    a: int = 1\n    b: set = attrs.field(factory=set)\n"
              "value = D($)", "1", "2"),
    "hash of attrs": ("import attrs\n@attrs.frozen\nclass D:\n    b: int = attrs.field(hash=$)\nvalue = D", "True",
                      "False"),
    "class of attrs": ("import attrs\n@attrs.define\nclass D:\n    a: int = $\nvalue = D", "1", "2"),
    "pydantic": ("import pydantic\nclass D(pydantic.BaseModel):\n    a: int = 1\n    b: set = {'x', 'y'}\n"
                 "value = D(a=@)", "1", "2"),
    "class of pydantic": ("import pydantic\nclass D(pydantic.BaseModel):\n    a: int = @\nvalue = D", "1", "2"),
    "validator of pydantic": (
        "import pydantic\nclass D(pydantic.BaseModel):\n    a: int = 1\n    @pydantic.field_validator('a')\n"
        "    def check(cls, v): return v + $\nvalue = D()", "1", "2",
    ),
    "estimator": ("from sklearn.linear_model import Ridge; value = Ridge(alpha=@)", "1", "2"),
    "fitted vectorizer": (
        "from sklearn.feature_extraction.text import CountVectorizer; value = CountVectorizer().fit(['aa bb @'])", "cc",
        "dd",
    ),
    "estimator in a pipeline": (
        "from sklearn.linear_model import Ridge; from sklearn.pipeline import make_pipeline\n"
        "value = make_pipeline(Ridge(alpha=@))", "1", "2",
    ),
    "fitted estimator": (
        "from sklearn.tree import DecisionTreeRegressor as T\n"
        "value = T(random_state=0).fit([[0], [1], [2]], [0, 1, @])", "1", "2",
    ),
    "import under the same name": ("from sklearn.linear_model import @ as Model; value = Model", "Ridge", "Lasso"),
    "global generator": ("from random import @ as value", "randint", "randrange"),
    "global generator of NumPy": ("from numpy.random import @ as value", "rand", "randn"),
    "distribution": ("import scipy.stats; value = scipy.stats.@", "norm", "uniform"),
    "environment": ("import os; value = os.environ, @", "1", "2"),
    "function of NumPy": ("import numpy as np; value = np.@", "mean", "median"),
    "ufunc": ("import numpy as np; value = np.@", "add", "subtract"),
    "module": ("import @ as m; value = m", "math", "cmath"),
    "builtin": ("value = @", "min", "max"),
    "method of a builtin": ("value = str.@", "upper", "lower"),
    "bound method of a builtin": ("value = 'x'.@", "upper", "lower"),
    "operator": ("import operator; value = operator.itemgetter(@)", "1", "2"),
    "function": ("def value(x):\n    '''Text.'''\n    return x + @", "1", "2"),
    "constant that is also the docstring": ("def value():\n    'a @'\n    return 'a @'", "1", "2"),
    "operation of a function": ("def value(x): return x @ 1", "+", "-"),
    "attribute that a function reads": ("def value(x): return x.@", "real", "imag"),
    "name of a function": ("def @(x): return x\nvalue = list(globals().values())[-1]", "f", "g"),
    "default": ("def value(x, y=@): pass", "1", "2"),
    "keyword default": ("def value(x, *, y=@): pass", "1", "2"),
    "attribute of a function": ("def value(): pass\nvalue.a = @", "1", "2"),
    "lambda": ("value = lambda e: e + @", "1", "2"),
    "lambdas on one line": ("one, two = lambda e: e + 1, lambda e: e + 2; value = @", "one", "two"),
    "lambda in a dict": ("value = {'a': lambda e: e + 1, 'b': lambda e: e + @}", "1", "2"),
    "lambda of a condition": ("value = (lambda e: e + 1) if @ else (lambda e: e + 2)", "0", "1"),
    "function without source": ("exec('def value(e): return e + @')", "1", "2"),
    "function in a namespace of its own": (
        "space = {'a': @}; exec('def f(e): return e + a', space); value = space['f']", "1", "2"
    ),
    "inner function": ("def value(e):\n    def inner(): return @\n    return inner()", "1", "2"),
    "inner class": ("def value(e):\n    class A:\n        a = @\n    return A.a", "1", "2"),
    "closure": ("def make(n): return lambda e: e + n\nvalue = make(@)", "1", "2"),
    "function in a closure": ("def make(f): return lambda e: f(e)\nvalue = make(lambda e: e + @)", "1", "2"),
    "builtin in a closure": ("def make(f): return lambda e: f(e)\nvalue = make(@)", "min", "max"),
    "array in a closure": (
        "import numpy as np\ndef make(a): return lambda e: a + e\nvalue = make(np.full(3, @))", "1", "2"
    ),
    "partial": ("import functools\nvalue = functools.partial(lambda e, n: e + n, @)", "1", "2"),
    "keyword of a partial": ("import functools\nvalue = functools.partial(lambda e, n: e, n=@)", "1", "2"),
    "function of a partial": ("import functools\nvalue = functools.partial(@, 1)", "min", "max"),
    "lambda of a partial": ("import functools\nvalue = functools.partial(lambda e, n: e + @, 1)", "1", "2"),
    "decorated": (
        "import functools\ndef d(f):\n    @functools.wraps(f)\n    def g(*a): return f(*a)\n    return g\n"
        "@d\ndef value(x): return x + $", "1", "2",
    ),
    "decorator": (
        "import functools\ndef d(f):\n    @functools.wraps(f)\n    def g(*a): return f(*a) + $\n    return g\n"
        "@d\ndef value(x): return x", "1", "2",
    ),
    "argument of a decorator": (
        "def d(n):\n    def e(f): return lambda x: f(x) + n\n    return e\n@d($)\ndef value(x): return x", "1", "2"
    ),
    "cached function": ("import functools\n@functools.lru_cache\ndef value(x): return x + $", "1", "2"),
    "dispatched function": (
        "import functools\n@functools.singledispatch\ndef value(x): return x\n"
        "@value.register(int)\ndef _(x): return x + $", "1", "2",
    ),
    "method of an object": ("class C:\n    def f(self): return 1\nc = C(); c.a = @; value = c.f", "1", "2"),
    "callable object": ("class C:\n    def __call__(self, x): return x + @\nvalue = C()", "1", "2"),
    "static method": ("class C:\n    @staticmethod\n    def f(): return $\nvalue = C", "1", "2"),
    "class method": ("class C:\n    @classmethod\n    def f(cls): return $\nvalue = C", "1", "2"),
    "property": ("class C:\n    @property\n    def f(self): return $\nvalue = C", "1", "2"),
    "cached property": (
        "import functools\nclass C:\n    @functools.cached_property\n    def f(self): return $\nvalue = C", "1", "2"
    ),
    "attribute of a class": ("class value:\n    a = @", "1", "2"),
    "attribute that was set later": ("class value: pass\nvalue.a = @", "1", "2"),
    "patched method": ("class value:\n    def f(self): return 1\nvalue.f = lambda self: @", "1", "2"),
    "base": ("class A: pass\nclass B: pass\nclass value(@): pass", "A", "B"),
    "code of a base": ("class A:\n    def f(self): return @\nclass value(A):\n    def f(self): return super().f()",
                       "1", "2"),
    "metaclass": ("class M(type):\n    a = @\nclass value(metaclass=M): pass", "1", "2"),
    "checked function": ("import pydantic\n@pydantic.validate_call\ndef value(a: $): return a", "int", "float"),
    "typed dict": ("import typing\nclass value(typing.TypedDict):\n    a: @", "int", "str"),
    "abstract class": ("import abc\nclass value(abc.ABC):\n    @abc.abstractmethod\n    def f(self): return $", "1",
                       "2"),
    "global": ("n = @\ndef value(x): return x + n", "1", "2"),
    "global array": ("import numpy as np\nn = np.full(1000, @)\ndef value(x): return x + n", "1", "2"),
    "global of a helper": ("n = @\ndef helper(): return n\ndef value(x): return x + helper()", "1", "2"),
    "helper": ("def helper(): return @\ndef value(x): return x + helper()", "1", "2"),
    "recursive helpers": ("def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != @ and even(n - 1)\n"
                          "value = even", "0", "1"),
    "global of a method": ("n = @\nclass C:\n    def f(self): return n\nvalue = C()", "1", "2"),
    "imported helper": ("from math import @ as f\ndef value(x): return f(x)", "sin", "cos"),
    "tensor": ("import torch; value = torch.full((2, 3), @)", "1.0", "2.0"),
    "tensor's type": ("import torch; value = torch.zeros(3, dtype=torch.@)", "bfloat16", "float16"),
    "type of torch": ("import torch; value = torch.@", "float32", "float64"),
    "module's weights": ("import torch; value = torch.nn.Linear(2, 1)\nwith torch.no_grad():\n"
                         "    for each in value.parameters(): each.fill_(@)", "1", "2"),
    "module's setting": ("import torch; value = torch.nn.Dropout(@)", "0.1", "0.2"),
    "quantized tensor": ("import torch; value = torch.quantize_per_tensor(torch.tensor([1.0, @]), 1, 0, torch.qint8)",
                         "1", "2"),
    "order of modules": ("import torch; value = torch.nn.ModuleDict({'@': torch.nn.ReLU(), 'b': torch.nn.ReLU()})", "a",
                         "c"),
    "function for autograd": ("import torch\nclass value(torch.autograd.Function):\n    @staticmethod\n"
                              "    def forward(context, x): return x + $", "1", "2"),
    "hook that is held": ("import torch; value = torch.nn.ReLU()\n"
                          "value.a = value.register_forward_hook(lambda *_: @)", "1", "2"),
    "script": ("import torch; value = torch.jit.trace(lambda x: x + @, torch.zeros(1))", "1", "2"),
    "lazy module": ("import torch; value = torch.nn.LazyLinear(@)", "1", "2"),
    "optimizer's setting": ("import torch; torch.manual_seed(0)\n"
                            "value = torch.optim.Adam(torch.nn.Linear(2, 1).parameters(), lr=@)", "0.1", "0.2"),
}  # fmt: skip

RUN = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_content import key
print(json.dumps({{name: key(source, 7) for name, source in json.load(sys.stdin).items()}}))
"""


def filled(text: str, replacement: str) -> str:
    return text.replace("$" if "$" in text else "@", replacement)


def key(source: str, offset: int = 0) -> str | None:
    """Return the digest of the `value` that a cell defines, `offset` lines down, after other definitions."""
    namespace: dict[str, Any] = {"__name__": "__main__", **{f"other_{at}": object() for at in range(offset)}}
    exec(compile("\n" * offset + source, f"<cell {offset}>", "exec", dont_inherit=True), namespace)
    return Contents(namespace).digest(namespace["value"])


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_makes_a_difference(change: str) -> None:
    """A change of content changes the digest; the same definition elsewhere in another cell does not."""
    text, before, after = CHANGES[change]
    first = key(filled(text, before))
    assert first is not None
    assert first == key(filled(text, before), 3)
    assert first != key(filled(text, after))


def test_the_same_in_another_process() -> None:
    """The same definitions have the same digests in a process with another hash seed."""
    sources = {name: filled(text, before) for name, (text, before, _) in CHANGES.items()}
    with_seed = {"PYTHONHASHSEED": "1", "PATH": ""}
    found = subprocess.run([sys.executable, "-c", RUN], input=json.dumps(sources), capture_output=True, text=True,
                           env=with_seed, check=False)  # fmt: skip
    assert found.returncode == 0, found.stderr
    there = json.loads(found.stdout.splitlines()[-1])
    here = {name: key(source) for name, source in sources.items()}
    assert [name for name in sources if here[name] != there[name]] == []


def test_results_are_found_by_another_process(tmp_path: Path) -> None:
    """Items with the notebook's own classes are found again, in another order and after other definitions."""
    functions, classes = (
        "def f(e): return len(e[0].x)",
        "class A:\n    def __init__(s): s.x = set('abc')\nclass B(A): k = 2",
    )
    call = f"import sparkring; r = sparkring.foreach(f, items, np=-1, checkpoint_dir={str(tmp_path / 'kept')!r})"
    items = "(A(), {'k': B})", "(B(), frozenset('abc'))"
    notebooks = [[functions, classes, f"items = [{', '.join(items)}]"], [classes, "other = A()", functions,
                 f"items = [{', '.join(items[::-1])}]"]]  # fmt: skip
    told = []
    for seed, lines in enumerate(notebooks):
        code = "\n".join([*lines, call, "print('STATES', *r.table.state)"])
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "SPARKRING_HOME": str(tmp_path / "home")}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        told += [line for line in done.stdout.splitlines() if line.startswith("STATES")]
    assert told == ["STATES finished finished", "STATES kept kept"]


def test_modules_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of the user's own modules count by the source, also that of modules which these import."""
    monkeypatch.syspath_prepend(tmp_path)
    inner, source = tmp_path / "inner_of_content.py", "from outer_of_content import f\nvalue = f"
    inner.write_text("def g(): return 1")
    (tmp_path / "outer_of_content.py").write_text("from inner_of_content import g\ndef f(): return g()")
    before = key(source), key("import outer_of_content as value")
    inner.write_text("# a comment\n\ndef g(): return 1")
    assert (key(source), key("import outer_of_content as value")) == before
    inner.write_text("def g(): return 1 + 1")
    assert key(source) != before[0]
    assert key("import outer_of_content as value") != before[1]
    for name in ("inner_of_content", "outer_of_content"):
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("source", "then"),
    [
        ("from random import random as value", "value()"),
        ("from numpy.random import rand as value", "value()"),
        ("import scipy.sparse; value = scipy.sparse.csr_matrix([[0, 1]])", "value.T; value.sum()"),
        ("class value: pass", "import pickle; value().__reduce_ex__(4)"),
        ("def value(x): return x", "def value(x: int) -> int:\n    'The docstring.'\n    return x  # a comment"),
    ],
)
def test_what_does_not_count(source: str, then: str) -> None:
    """Use of a value, docstrings, comments and annotations of functions make no difference."""
    assert key(source) == key(f"{source}\n{then}")


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("keras.Sequential([layers.Input((2,)), layers.Dense(2, 'relu', kernel_initializer='ones'), layers.Dense(@)])",
         "2", "3"),
        ("layers.Dense(@)", "1", "2"),
        ("tf.data.Dataset.range(3).map(lambda x: x + @).shuffle(3, seed=1).map(lambda x: x * 2)", "1", "2"),
    ],
)  # fmt: skip
def test_counters_of_tensorflow(text: str, before: str, after: str) -> None:
    """Models and datasets that are made again count as the same, although TensorFlow gives them other names."""
    pytest.importorskip("tensorflow")

    def digest(source: str) -> str | None:
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(
            f"import tensorflow as tf; from tensorflow import keras; layers = keras.layers\nvalue = {source}", namespace
        )
        return Contents(namespace, weights=False).parts({"value": namespace["value"]})[0]["value"]

    assert digest(filled(text, before)) == digest(filled(text, before)) != digest(filled(text, after))


def test_weights_of_models() -> None:
    """Without weights, models and optimizers count by their shapes and settings; other tensors by their values."""

    def parts(source: str) -> dict[str, str]:
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(f"import torch\nfrom torch.nn import Linear, Dropout, Sequential\nvalue = {source}", namespace)
        return Contents(namespace, weights=False).parts({"value": namespace["value"]})[0]

    assert parts("Linear(2, 1)") == parts("Linear(2, 1).eval()") != parts("Linear(3, 1)")
    assert parts("Sequential(Dropout(0.1))") != parts("Sequential(Dropout(0.2))")
    adam = "torch.optim.Adam(Linear(2, 1).parameters(), lr=0.1)"
    assert parts(adam) == parts(adam) != parts(adam.replace("0.1", "0.2"))
    assert parts("torch.zeros(2)") != parts("torch.ones(2)")
