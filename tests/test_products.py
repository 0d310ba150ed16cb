"""Shows that each product can be removed: its folder, the modules of its magics, and its line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import sparkring
from sparkring.products import HOMES, MAGICS

PACKAGE = Path(sparkring.__file__).parent
# In this order, no product is removed before one that uses it. The first four have no line, as they bring no names.
PRODUCTS = {
    "tools/horovod_build": ["tools/build_horovod.py"],
    "data/petastorm": [],
    "data/tfrecord": [],
    "ml": [],
    "engine/predictions": [],
    "engine/search": [],
    "engine/stream": ["notebook/stream.py"],
    "engine/foreach": ["notebook/foreach.py"],
}
USE = """
import sys
import sparkring
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "sparkring")
assert shell.run_cell("sparkring.run(lambda: sparkring.world().size, np=-2, framework='plain').values").result == [2, 2]
if hasattr(sparkring, "foreach"):
    shell.run_cell("%%foreach x in [1, 2] -n -2 --quiet\\nx + 1").raise_error()
    assert sparkring.last_result.values == [2, 3]
print(sparkring.__file__, *sparkring.__all__, *shell.magics_manager.magics["cell"])
"""


def remove(package: Path, product: str, with_it: list[str]) -> None:
    shutil.rmtree(package / product)
    for module in with_it:
        (package / module).unlink()
    init = package / "__init__.py"
    dotted = re.escape(product.replace("/", "."))
    text, lines = re.subn(rf"(?m)^from sparkring\.{dotted} import \*\n", "", init.read_text(encoding="utf-8"))
    assert lines == product.startswith("engine/")
    init.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "check_types",
    [
        pytest.param(False, id="used"),
        pytest.param(True, id="types", marks=pytest.mark.extended("repetition", "import-linter checks the imports")),
    ],
)
@pytest.mark.slow
def test_products_can_be_removed_one_after_another(tmp_path, check_types):
    """What is left can be imported, type-checked and used."""
    if check_types:
        pytest.importorskip("mypy", reason="this set of versions has no mypy")
    package = tmp_path / "sparkring"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "IPYTHONDIR": str(tmp_path / "ipython")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    config = PACKAGE.parents[1] / "setup.cfg"
    use = [sys.executable, "-c", USE]
    # mypy would find what is removed in an editable sparkring, so it looks where only its packages are.
    venv.create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    types = [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", tmp_path / "types"]
    types += ["--python-executable", tmp_path / "venv/bin/python", "-p", "sparkring"]
    for product, with_it in PRODUCTS.items():
        remove(package, product, with_it)
        answer = subprocess.run(
            types if check_types else use, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
        )
        assert answer.returncode == 0, f"without {product}:\n{answer.stdout}{answer.stderr}"
        if not check_types:
            path, *names = answer.stdout.splitlines()[-1].split()
            assert Path(path).is_relative_to(tmp_path)
            module = f"sparkring.{product.replace('/', '.')}."
            gone = {name for name, home in HOMES.items() if home.startswith(module)}
            assert not gone.intersection(names)
    assert {"run", "shards", "checkpoints", "torchrun"} <= {*names} if not check_types else True


def test_what_a_product_says_is_there():
    """Each public name is found in its module, and each module of magics in its folder."""
    for name in HOMES:
        assert getattr(sparkring, name) is not None or name == "last_result"
    assert len({*MAGICS}) == len(MAGICS)
    assert all((PACKAGE / "notebook" / f"{module}.py").exists() for module in MAGICS)
