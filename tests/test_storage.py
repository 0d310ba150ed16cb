"""Tests of paths as users type them."""

from __future__ import annotations

import os
import pathlib
import random
import re
from pathlib import Path

import pytest

import sparkring
from sparkring.capture import mount_paths
from sparkring.capture.cell import capture
from sparkring.errors import CaptureError, PathError, RunFailed
from sparkring.runtime.storage import DBFS_MOUNT, dbfs_root, local_path, locate

FORMS = ("dbfs:/{}", "dbfs:///{}", "/dbfs/{}", "file:/dbfs/{}", "file:///dbfs/{}")
PIECES = ("..", ".", "%2e%2e", "%252e%252E", ".%2e", "...", "a", "out", "deep", "ä", " ", "%00", "%2f", "\\", "~",
          "a b", "\n", "://", "s3:", "file:", "dbfs:", "*", "-", "$HOME", "\t..", ".. ")  # fmt: skip
STEPS_OUT = ("../x", "a/../../x", "%2e%2e/x", "a/%252e%252e/x", ".%2E/x", "out/x", "deep/back/out")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Make a folder that stands for dbfs:/, and contains links that lead out of it and back."""
    found = tmp_path / "root"
    (found / "deep").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (found / "out").symlink_to(tmp_path / "secret")
    (found / "deep" / "back").symlink_to(found)
    monkeypatch.setenv("SPARKRING_DBFS_ROOT", str(found))
    return found


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_are_one_path(root, form):
    """A notebook written for Databricks finds the same folder whichever form it uses."""
    found = locate(form.format("ml/run1/"))
    assert found.path == str(root / "ml" / "run1")
    assert found.local
    assert (found / "x").path == str(root / "ml" / "run1" / "x")


def test_anchored_paths(root, tmp_path, monkeypatch):
    """An anchored path is found from any working directory."""
    monkeypatch.chdir(tmp_path)
    for path in ("a b/c", "file:a", "~/x", "./a", *(form.format("a") for form in FORMS), "memory://a/b", "/a"):
        found = locate(path).anchored()
        assert found.path == locate(path).path
        monkeypatch.chdir("/")
        assert locate(found.written).path == found.path
        monkeypatch.chdir(tmp_path)
    assert locate("dbfs:/a").anchored().written == "dbfs:/a"


def test_the_root_without_a_mount(tmp_path, monkeypatch):
    """Outside Databricks, the root is a folder in the user's data folder, which is made when it is first used."""
    if os.path.isdir(DBFS_MOUNT):
        pytest.skip("this machine has a /dbfs of its own")
    monkeypatch.delenv("SPARKRING_DBFS_ROOT", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert locate("dbfs:/x").path == str(tmp_path / "sparkring" / "dbfs" / "x")
    assert os.path.isdir(dbfs_root())


def test_a_root_that_cannot_be_made(tmp_path, monkeypatch):
    """The message names the folder and what to set."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARKRING_DBFS_ROOT", str(tmp_path / "file" / "x"))
    with pytest.raises(PathError, match=r"dbfs:/ml: .*/file/x, .*folder .*dbfs:/ here, .*SPARKRING_DBFS_ROOT"):
        locate("dbfs:/ml")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rest", STEPS_OUT)
def test_nothing_leads_out_of_the_root(root, form, rest):
    """Steps to a parent, plain or encoded, and links that lead outside are refused."""
    with pytest.raises(PathError, match=r"without `|leads out of"):
        locate(form.format(rest))


def test_a_link_that_stays_inside(root):
    """A link inside the root is allowed if its target is inside the root, too."""
    assert locate("dbfs:/deep/back/deep/x").path == str(root / "deep" / "back" / "deep" / "x")


def test_ten_thousand_paths(root, tmp_path):
    """Any text after dbfs:/ or /dbfs/ is refused, or names a path below the root."""
    draw = random.Random(20)
    inside = 0
    for _ in range(10_000):
        pieces = [draw.choice(PIECES) for _ in range(draw.randint(1, 6))]
        rest = "".join(piece + draw.choice(("/", "/", "//", "")) for piece in pieces)
        path = draw.choice(FORMS).format(rest)
        if draw.random() < 0.05:
            cut = draw.randint(0, len(path))
            path = path[:cut] + "\0" + path[cut:]
        try:
            found = locate(path)
        except PathError:
            continue
        inside += 1
        assert os.path.realpath(found.path).startswith(f"{root}/") or found.path == str(root), path
        assert found.for_spark().startswith(f"file://{root}"), path
    assert inside > 1_000
    assert not list((tmp_path / "secret").iterdir())


def test_mistakes_are_told_with_the_right_spelling(root):
    """A folder written as a host, an empty path, and a NUL are errors. The first error suggests the right spelling."""
    with pytest.raises(PathError, match=r"Write dbfs:/ml/x"):
        locate("dbfs://ml/x")
    with pytest.raises(PathError, match=r"Write file:/ml"):
        locate("file://ml")
    with pytest.raises(PathError, match="empty"):
        locate(" ")
    with pytest.raises(PathError, match="NUL"):
        locate("s3://bucket/a\0b")


def test_a_roundabout_way_to_the_mount(root):
    """A path that leads to the mount after normalization is treated as a path on the mount."""
    assert locate("/tmp/../dbfs/x").path == str(root / "x")
    with pytest.raises(PathError, match=r"leads out of|without"):
        locate("/./dbfs/out/x")


def test_local_paths(root, tmp_path):
    """A local path can be used by any function. Its folder exists; a URL of another file system is refused."""
    for form in FORMS:
        path = local_path(form.format("ml/new/1.pt"))
        assert path == str(root / "ml" / "new" / "1.pt")
        Path(path).write_text("written")
    assert local_path(tmp_path / "x") == str(tmp_path / "x")
    for path, words in (("memory://x/y", "fsspec"), ("dbfs://x/y", "one slash"), (root / "ml/new/1.pt/z", "be made")):
        with pytest.raises(PathError, match=words):
            local_path(path)


@pytest.fixture
def no_mount():
    if os.path.isdir(DBFS_MOUNT):
        pytest.skip("this machine has a /dbfs of its own")


HELPERS = """
def saves(x):
    torch.save(x, "/dbfs/ml/saved")

def restores():
    return checkpoints("/dbfs/ml/kept").latest()

class Settings:
    folder = "/dbfs/ml/settings"

path, other, settings, nested = "/dbfs/ml/path", pathlib.Path("/dbfs/ml/other"), Settings, {"x": ["/dbfs/ml/nested"]}
"""


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("torch.save(x, '/dbfs/ml/a')", "/dbfs/ml/a"),
        ("open(f'/dbfs/ml/{rank}')", "/dbfs/ml/"),
        ("os.makedirs('/dbfs')", "/dbfs"),
        ("target = '/dbfs/ml/b'\nos.makedirs(target)", "/dbfs/ml/b"),
        ("saves(1)", "/dbfs/ml/saved"),
        ("open(path)", "/dbfs/ml/path"),
        ("open(other)", "/dbfs/ml/other"),
        ("settings().folder", "/dbfs/ml/settings"),
        ("nested['x']", "/dbfs/ml/nested"),
        ("checkpoints(path).latest(), open(path)", "/dbfs/ml/path"),
        ("checkpoints(path).latest(), restores()", ""),
        ("target = '/dbfs/ml/b'\nsparkring.shards(target, 32)", ""),
        ("sparkring.local_path('/dbfs/ml/b'), sparkring.local_path(other)", ""),
        ("os.path.isdir('/dbfs'), path.startswith('/dbfs/')", ""),
        ("open('/data/dbfs/x'), open('/dbfs2')", ""),
        ("'/dbfs/ml is not here'; 'dbfs:/x'", ""),
    ],
)
def test_paths_that_only_sparkring_finds(no_mount, cell, expected, monkeypatch, tmp_path):
    """There is a notice before the launch, unless only sparkring's functions get the path."""
    file = tmp_path / "helpers.py"
    file.write_text(HELPERS)
    namespace: dict = {"os": os, "pathlib": pathlib, "sparkring": sparkring, "x": 1, "rank": 0, "__name__": "__main__"}
    namespace |= {"torch": os, "checkpoints": len}
    exec(compile(HELPERS, str(file), "exec"), namespace)
    captured = capture(cell, namespace)
    values = {name: namespace[name] for name in captured.sent}
    found = mount_paths.notices([cell], values, captured.payload)
    assert [notice.partition(":")[0] for notice in found] == [expected] * bool(expected)
    assert all("sparkring.local_path(" in notice and f"ln -s {dbfs_root()} /dbfs" in notice for notice in found)


def test_paths_below_the_mount_on_ranks(no_mount, local):
    """The notice comes before the launch, and the error says what to write. A local path is the same everywhere."""
    with pytest.raises(RunFailed, match=r"no /dbfs .*rank .*sparkring\.local_path\('/dbfs/"):
        local.run("open('/dbfs/ml/x/1.pt')", 1)
    assert "sparkring.local_path('/dbfs/ml/x/1.pt')" in local.view.record.notices[0].text
    assert local.run("import sparkring\nsparkring.local_path('dbfs:/a/x')", 1).value == local_path("dbfs:/a/x")


@pytest.mark.parametrize(("name", "instead"), [("spark", "sparkring.spark()"), ("dbutils", "os and shutil")])
def test_names_of_databricks(local, name, instead):
    """The error says what to use instead, before the launch or on the ranks."""
    with pytest.raises(CaptureError, match=re.escape(instead)):
        local.run(f"{name}.read", 1)
    with pytest.raises(RunFailed, match=re.escape(instead)):
        local.run(f"def f():\n    return {name}.read\nlocals()['f']()", 1)
