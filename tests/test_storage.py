"""Tests of paths as users type them."""

from __future__ import annotations

import os
import random

import pytest

from sparkring.errors import PathError
from sparkring.runtime.storage import DBFS_MOUNT, dbfs_root, locate

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
    with pytest.raises(PathError, match=r"dbfs:/ml: .*/file/x, the folder for dbfs:/ here, .*SPARKRING_DBFS_ROOT"):
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
