"""Tests of the user's own modules: which are sent, where ranks put them, and how a changed module is loaded again."""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from pathlib import Path

import pytest

from sparkring.capture import own_modules, packages
from sparkring.capture.own_modules import OwnModule, packed, problems
from sparkring.worker.rank import sent_modules
from sparkring.worker.rank.own_modules import OwnModules
from sparkring.worker.rank.reloading import reload
from sparkring.worker.rank.sent_modules import SentModules

NUMBERS = itertools.count()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on sys.path. Modules that a test imports are forgotten."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(own_modules, "_used", set())
    yield tmp_path
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write(folder, **files):
    """Write modules, whose names have a number of their own, and return these names."""
    number = next(NUMBERS)
    names = {name: f"{name}_{number}" for name in files}
    for name, text in files.items():
        (folder / f"{names[name]}.py").write_text(text.format(**names))
    return names


def own(*sources, names=()):
    """Return the modules that the sources use, or that have these names."""
    return {module.name: module for module in own_modules.own_modules(sources) if not names or module.name in names}


def test_which_modules_are_sent(folder):
    """Modules that code imports, anywhere, and those that they import, are sent; installed modules are not."""
    names = write(
        folder,
        a="import {b}\nfrom {c} import x",
        b="import numpy, json",
        c="def f():\n    import {d}\nx = 1",
        d="",
        unused="",
    )
    found = own(f"def f():\n    import {names['a']} as short")
    assert {names[name] for name in "abcd"} <= found.keys()
    assert not {names["unused"], "numpy", "json", "sparkring", "pytest", "IPython"} & found.keys()
    assert found[names["a"]].files == ((f"{names['a']}.py", (folder / f"{names['a']}.py").stat().st_size),)
    assert names["d"] in own("1"), "a module that was sent once is sent with later cells, too"


def test_a_module_that_the_notebook_has_imported(folder):
    """It is sent, because the values that are sent may need it, and its changes count."""
    (name,) = write(folder, imported="x = 1").values()
    importlib.import_module(name)
    first = packed(own().values())
    assert name in first.names
    assert packed(own().values()) is first, "nothing is read again"
    (folder / f"{name}.py").write_text("x = 22")
    assert packed(own().values()) != first


def test_generated_modules(folder):
    """TensorFlow imports functions that it has generated as modules, from files in a temporary folder."""
    names = write(folder, __autograph_generated_file="")
    importlib.import_module(names["__autograph_generated_file"])
    assert not own(names=names.values())


def test_packages(folder):
    """A package is sent with its folder, but without what is large, hidden, or an environment of its own."""
    package = folder / "packed_package"
    for path, text in {
        "__init__.py": "",
        "deep/code.py": "import packed_other",
        "deep/words.json": "{}",
        "large.bin": "x" * 1_000_001,
        ".git/config": "",
        "__pycache__/code.pyc": "",
        "env/pyvenv.cfg": "",
        "env/lib/other.py": "",
    }.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)
    (folder / "packed_other").mkdir()  # without __init__.py
    (folder / "packed_other/code.py").write_text("")
    found = own("import packed_package.deep.code")
    paths = [path for path, _ in found["packed_package"].files]
    assert paths == [f"packed_package/{path}" for path in ("__init__.py", "deep/code.py", "deep/words.json")]
    assert [path for path, _ in found["packed_other"].files] == ["packed_other/code.py"]
    assert [found[name].title for name in ("packed_other", "packed_package")] == ["packed_other/", "packed_package/"]


def test_what_cannot_be_sent(folder, monkeypatch):
    """A cell that imports such a module is told why, and what to do."""
    monkeypatch.setattr(own_modules, "MOST_FILES", 3)
    for package, files in {"compiled": ["__init__.py", "fast.so"], "large": [f"m{n}.py" for n in range(5)]}.items():
        (folder / package).mkdir()
        for name in files:
            (folder / package / name).write_text("")
    modules = own("import compiled, large", names=("compiled", "large")).values()
    assert packed(modules) is None
    compiled, large = problems(modules, ["import compiled", "def f():\n    import large"])
    assert "`compiled`" in compiled
    assert "compiled/fast.so" in compiled
    assert str(folder / "large") in large
    assert problems(modules, ["1"]) == []


def test_installed_folders(folder):
    """A folder into which pip has installed packages (pip install --target) has no modules of the user."""
    (name,) = write(folder, targeted="").values()
    assert name in own(f"import {name}")
    (folder / "some-1.0.dist-info").mkdir()
    own_modules._is_installed.cache_clear()
    assert name not in own(f"import {name}")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import a.b as c\nx = 1\nfrom d.e import f\nfrom . import g", {"a", "d"}),
        ("try:\n    import a\nexcept ImportError:\n    pass", set()),
        ("if x:\n    import a\ndef f():\n    import b", set()),
        ("!pip install a\nimport a".replace("!", "run.shell('") + "')", set()),
        ("import sys\nsys.path.append('/shared')\nimport a", set()),
        ("import (", set()),
    ],
)
def test_what_a_cell_needs(source, names):
    """Only imports that happen whatever the cell finds count, unless the cell provides modules itself."""
    assert packages.needed(source) == names


# ── On a rank ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def sent(rank, folder, *names):
    """Send modules from a folder, which the rank does not see, to a rank."""
    modules = [
        OwnModule(name, str(folder), tuple((str(path.relative_to(folder)), path.stat().st_size) for path in paths))
        for name in names
        if (paths := sorted([*folder.glob(f"{name}.py"), *folder.glob(f"{name}/**/*.py")]))
    ]
    message = packed(modules)
    assert message is not None
    rank.take(message)
    rank.install()


@pytest.fixture
def rank(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return SentModules(str(tmp_path / "rank"))


def test_a_rank_imports_what_was_sent(folder, rank, tmp_path):
    """Changed files are written again, and removed ones are removed."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "sent_package").mkdir(parents=True)
    (elsewhere / "sent_package/__init__.py").write_text("from sent_package.part import x")
    (elsewhere / "sent_package/part.py").write_text("x = 1")
    (elsewhere / "sent_module.py").write_text("y = 1")
    sent(rank, elsewhere, "sent_package", "sent_module")
    module, package = map(importlib.import_module, ("sent_module", "sent_package"))
    assert (package.x, module.y) == (1, 1)
    assert Path(module.__file__).parent == tmp_path / "rank/modules"
    watch, began = OwnModules(), time.time()
    watch.reload_changed(began)
    (elsewhere / "sent_module.py").write_text("y = 2")
    (elsewhere / "sent_package/part.py").unlink()
    sent(rank, elsewhere, "sent_package", "sent_module")
    assert watch.reload_changed(began) == ["sent_module"]
    assert module.y == 2
    assert not Path(package.__file__).with_name("part.py").exists()


def test_a_rank_keeps_the_same_files_of_its_own(folder, rank, tmp_path):
    """A module may read large files that are beside it, so a folder that is shared with the notebook comes first."""
    (folder / "shared_module.py").write_text("x = 1")
    sent(rank, folder, "shared_module")
    module = importlib.import_module("shared_module")
    assert module.__file__ == str(folder / "shared_module.py")
    assert str(tmp_path / "rank/modules") not in sys.path
    watch, began = OwnModules(), time.time()
    watch.reload_changed(began)
    other = tmp_path / "other"
    other.mkdir()
    (other / "shared_module.py").write_text("x = 2")  # as after addPyFile(), which ships only the first version
    sent(rank, other, "shared_module")
    assert watch.reload_changed(began) == ["shared_module"]
    assert module.x == 2
    assert module.__file__ == str(tmp_path / "rank/modules/shared_module.py")
    assert not sent_modules._is_here("shared_module", {"shared_module.py": b"x = 3"})


BEFORE = """
import abc, dataclasses, functools
SIZE = 1
def plain(x=1):
    "before"
    return x
def decorated(function):
    @functools.wraps(function)
    def wrapper():
        return [function()]
    return wrapper
@decorated
def wrapped():
    return SIZE
class Base:
    def who(self):
        return "base"
class Child(Base):
    kind = 1
    def who(self):
        return super().who() + "-child"
    @property
    def size(self):
        return 1
    @classmethod
    def name(cls):
        return cls.__name__
    def gone(self):
        pass
class Slotted:
    __slots__ = ("x",)
@dataclasses.dataclass
class Data:
    x: int = 1
class Abstract(abc.ABC):
    @abc.abstractmethod
    def f(self): ...
"""
AFTER = BEFORE.replace("SIZE = 1", "SIZE = 2").replace('"before"\n    return x', '"after"\n    return x * 10')
AFTER = AFTER.replace("[function()]", "[function(), 0]").replace('"-child"', '"-grown"').replace("x=1", "x=3")
AFTER = AFTER.replace("return 1\n    @classmethod", "return 5\n    @classmethod").replace("def gone", "def new")
AFTER = (
    AFTER.replace('return "base"', 'return "new base"')
    .replace('("x",)', '("x", "y")')
    .replace("x: int = 1", "x: int = 7")
)


def test_objects_get_the_new_code(folder):
    """Names that other modules have imported, instances, and instances of subclasses use the new code."""
    (name,) = write(folder, reloaded=BEFORE).values()
    module = importlib.import_module(name)
    plain, wrapped, child, data, slotted = module.plain, module.wrapped, module.Child(), module.Data(), module.Slotted
    subclass = type("Of", (module.Child,), {})()
    (folder / f"{name}.py").write_text(AFTER)
    reload(module)
    assert (plain(), plain.__doc__, wrapped(), module.SIZE) == (30, "after", [2, 0], 2)
    assert (module.plain, module.wrapped, module.Child) == (plain, wrapped, type(child))
    for instance in (child, subclass, module.Child()):
        assert (instance.who(), instance.size, hasattr(instance, "gone"), instance.new()) == (
            "new base-grown",
            5,
            False,
            None,
        )
    assert (module.Data().x, isinstance(data, module.Data), subclass.name()) == (7, True, "Of")
    assert module.Slotted is not slotted, "instances of the old class have no room for y"
    with pytest.raises(TypeError):
        module.Abstract()


def test_a_module_that_cannot_be_loaded_again(folder):
    """It stays as it was, and is tried again."""
    (name,) = write(folder, broken="x = 1\ndef f():\n    return x").values()
    module = importlib.import_module(name)
    watch, began = OwnModules(), time.time()
    watch.reload_changed(began)
    for text in ("x = (", "x = 2\nraise KeyError(x)"):
        (folder / f"{name}.py").write_text(text)
        for _ in range(2):
            with pytest.raises((SyntaxError, KeyError)):
                watch.reload_changed(began)
            assert (module.x, module.f()) == (1, 1)
    (folder / f"{name}.py").write_text("x = 3\ndef f():\n    return x")
    assert watch.reload_changed(began) == [name]
    assert (module.x, module.f(), watch.reload_changed(began)) == (3, 3, [])
