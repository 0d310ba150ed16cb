"""Tests of --env-pack: what the archive has, and how executors share the environments that they unpack."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from types import SimpleNamespace

import pytest

from sparkring.capture import environment
from sparkring.engine.run import environments
from sparkring.errors import LaunchError
from sparkring.executor import environment as there
from sparkring.executor.environment import EnvironmentOrder, unpacked_environment


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages, which the archive is made of."""
    for path, text in {
        "made.py": "x = 1",
        "made-1.0.dist-info/METADATA": "Name: made\nVersion: 1.0",
        "made-1.0.dist-info/RECORD": "made.py,sha256=1,",
        f"__pycache__/made.{sys.implementation.cache_tag}.pyc": "",
        "__pycache__/made.cpython-20.pyc": "",
        "pyspark/jars/large.jar": "",
        "pyspark/sql.py": "",
        "edited-2.0.dist-info/METADATA": "Name: edited\nVersion: 2.0",
        "edited-2.0.dist-info/direct_url.json": json.dumps({"url": "file:///x", "dir_info": {"editable": True}}),
        "__editable__.edited-2.0.pth": "/x",
    }.items():
        file = tmp_path / "site-packages" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(environment, "_site_folders", lambda: [str(tmp_path / "site-packages")])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment._known.cache_clear()
    yield tmp_path / "site-packages"
    shutil.rmtree(tmp_path / f"sparkring-environments-{os.geteuid()}", ignore_errors=True)


def order(packed):
    return EnvironmentOrder(
        SimpleNamespace(path=packed.path), packed.lock, sysconfig.get_platform(), packed.unpacked_bytes
    )


def test_the_archive(site):
    """It is made again only if a package has changed, and has neither editable installs nor what executors have."""
    words = []
    packed = environment.pack(words.append)
    assert (packed.packages, packed.left_out, words) == (1, ("edited",), [])
    names = {file.name for file in environment.environment().files}
    bytecode = f"__pycache__/made.{sys.implementation.cache_tag}.pyc"
    about = {"made-1.0.dist-info/METADATA", "made-1.0.dist-info/RECORD"}
    assert names == {"made.py", bytecode, "pyspark/sql.py", *about}
    made = os.stat(packed.path).st_ino
    assert environment.pack(words.append) == packed
    assert os.stat(packed.path).st_ino == made
    (site / "made-1.0.dist-info/RECORD").write_text("made.py,sha256=2,")
    assert environment.pack(words.append).lock != packed.lock


def test_progress_and_errors(site, monkeypatch, tmp_path):
    """A slow archive says how far it is. What cannot be packed or written is an error in one sentence."""
    words = []
    monkeypatch.setattr(environment, "_FIRST_WORD_S", 0.0)
    environment.pack(words.append)
    assert any("packing the environment" in word for word in words)
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARKRING_HOME", str(tmp_path / "file"))
    with pytest.raises(LaunchError, match="SPARKRING_HOME"):
        environment.pack(words.append)
    (tmp_path / "conda-meta").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(LaunchError, match="conda-pack"):
        environment.environment()


UNPACK = """
import sys, types
from sparkring.executor.environment import EnvironmentOrder, unpacked_environment
path, *fields, size = sys.argv[1:]
python, lock = unpacked_environment(EnvironmentOrder(types.SimpleNamespace(path=path), *fields, int(size)))
print(python)
"""


def test_executors_unpack_it_once(site, tmp_path):
    """Processes that begin at once share one environment, also if one that was killed has left half of it."""
    packed = environment.pack(print)
    root = tmp_path / f"sparkring-environments-{os.geteuid()}"
    (root / f"{packed.lock}.partial").mkdir(parents=True)
    root.chmod(0o700)
    (root / f"{packed.lock}.partial" / "half").touch()
    words = [sys.executable, "-c", UNPACK, packed.path, packed.lock, sysconfig.get_platform(), "10"]
    processes = [
        subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}) for _ in range(3)
    ]
    (python,) = {process.communicate()[0].decode().strip() for process in processes}
    assert python == str(root / packed.lock / "bin" / "python")
    assert sorted(path.name for path in root.iterdir()) == [packed.lock, f"{packed.lock}.lock"]
    code = "import made, sys; print(made.x, made.__file__, sys.prefix, sys.version_info[:2])"
    printed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    x, file, prefix, *version = printed.split()
    assert (x, prefix) == ("1", str(root / packed.lock))
    assert file.startswith(prefix)
    assert "".join(version) == str(sys.version_info[:2]).replace(" ", "")


def test_old_environments_are_removed(site, tmp_path):
    """Those that are in use stay, and so do the newest ones."""
    packed = environment.pack(print)
    whole = order(packed)
    used = [unpacked_environment(whole._replace(lock=f"lock{number}")) for number in range(there._KEPT + 1)]
    root = tmp_path / f"sparkring-environments-{os.geteuid()}"
    for number, (python, lock) in enumerate(used):
        os.utime(os.path.dirname(os.path.dirname(python)), (number, number))
        if number:
            os.close(lock)
    _, lock = unpacked_environment(whole)
    os.close(lock)
    names = {path.name for path in root.iterdir()}
    kept = {"lock0", *(f"lock{number}" for number in range(2, there._KEPT + 1)), packed.lock}
    assert names == kept | {f"{name}.lock" for name in kept}
    os.close(used[0][1])
    python, lock = unpacked_environment(whole)
    os.close(lock)


def test_environments_that_cannot_be_used(site, tmp_path, monkeypatch):
    """One sentence says what is wrong, and where; nothing is left."""
    whole = order(environment.pack(print))
    root = tmp_path / f"sparkring-environments-{os.geteuid()}"
    for wrong, words in (
        (whole._replace(platform="linux-other"), "linux-other"),
        (whole._replace(size_bytes=1 << 60), "TMPDIR"),
        (whole._replace(archive=SimpleNamespace(path="/nowhere")), "/nowhere"),
    ):
        with pytest.raises(RuntimeError, match=words):
            unpacked_environment(wrong)
    assert [path.name for path in root.iterdir()] == [f"{whole.lock}.lock"]
    root.chmod(0o755)
    with pytest.raises(RuntimeError, match=rf"{root} .*others"):
        unpacked_environment(whole)
    root.chmod(0o700)


def test_a_dry_run_shows_it(site):
    """The archive is not made. Where ranks run this Python, there is none."""
    place = SimpleNamespace(may_lack_packages=lambda: True)
    (row,) = environments.environment_estimate(place)
    assert (row.name, row.travels, row.size_bytes) == ("environment", "by value", environment.known().size_bytes)
    place.may_lack_packages = lambda: False
    assert environments.environment_estimate(place) == ()
    assert environments.packed_environment(place) is None
