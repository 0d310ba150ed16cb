"""The inventory of a directory of checkpoints, on the local file system and on memory://."""

from __future__ import annotations

import uuid
from pathlib import Path

import fsspec
import pytest

from sparkring.checkpointing import folder
from sparkring.checkpointing.digests import digest_of
from sparkring.checkpointing.entries import Commit, File, Name
from sparkring.checkpointing.inventory import inventory
from sparkring.runtime.storage import Location, locate


def put(where: Location, step: int, *, data: bytes = b"x" * 1000, commit: bool = True, **fields) -> str:
    """Write a checkpoint with one small file, and return its name."""
    name = str(Name(step, 1_795_294_802_123, step))
    where.fs.makedirs((where / name).path, exist_ok=True)
    where.fs.pipe_file((where / name / "rank-0.safetensors").path, data)
    if commit:
        file = File("rank-0.safetensors", len(data), digest_of(data))
        whole = Commit(step, 1_700_000_000.0 + step, (file,), {}, "line", "run", 2, False, "", {})
        folder.write_commit(where, name, whole._replace(**fields))
    return name


@pytest.fixture(params=["local", "memory"])
def where(request, tmp_path):
    """A directory that does not exist yet."""
    if request.param == "local":
        yield locate(tmp_path / "run1")
        return
    found = locate(f"memory://{uuid.uuid4().hex}")
    yield found
    if found.fs.exists(found.path):
        found.fs.rm(found.path, recursive=True)


def test_ours_and_others(where):
    """Other libraries' checkpoints are listed separately. A file inside a checkpoint of sparkring is not listed."""
    put(where, 100, metrics={"loss": 0.1})
    name = put(where, 200, metrics={"loss": 0.2})
    put(where, 300, commit=False)
    where.fs.pipe_file((where / name / "x.pt").path, b"12345")
    where.fs.makedirs((where / "backup" / "chief").path)
    for part in ("ckpt-1.index", "ckpt-1.data-00000-of-00001"):
        where.fs.pipe_file((where / "backup" / "chief" / part).path, b"12345")
    where.fs.pipe_file((where / "best.keras").path, b"123")
    found = inventory(where, metric="loss")
    assert [(entry.step, entry.state) for entry in found.entries] == [
        (300, "partial"), (200, "committed"), (100, "committed"),
    ]  # fmt: skip
    assert {(each.kind, each.name, each.size_bytes) for each in found.others} == {
        ("BackupAndRestore", "backup/chief/ckpt-1", 10), ("Keras model", "best.keras", 3),
    }  # fmt: skip
    assert all(abs(each.time - found.time) < 600 for each in found.others)
    assert (found.newest.step, found.best.step, found.exists, found.checked) == (200, 100, True, False)


def test_nothing_there(where):
    """A missing directory is distinguished from an empty one."""
    assert not inventory(where).exists
    where.fs.makedirs(where.path)
    found = inventory(where)
    assert (found.exists, found.entries, found.others) == (True, (), ())


def test_a_check_reads_every_byte(where):
    """Only a check notices a changed byte. The check reports its progress."""
    put(where, 100)
    name = put(where, 200)
    where.fs.pipe_file((where / name / "rank-0.safetensors").path, b"x" * 500 + b"y" + b"x" * 499)
    assert [entry.state for entry in inventory(where).entries] == ["committed"] * 2
    told = []
    found = inventory(where, check=True, say=lambda *words: told.append(words))
    assert [entry.state for entry in found.entries] == ["corrupt", "committed"]
    assert "rank-0.safetensors" in found.entries[0].reason
    assert (found.newest.step, found.checked) == (100, True)
    assert told == [(0, 2, 0, 2000), (1, 2, 1000, 2000), (2, 2, 2000, 2000)]


def test_what_a_run_removes_while_it_is_checked_is_left_out(where):
    """A checkpoint that is removed during the check is not reported as damaged."""
    put(where, 100)
    name = put(where, 200)

    def say(done, *_):
        if done == 0:
            where.fs.rm((where / name).path, recursive=True)

    found = inventory(where, check=True, say=say)
    assert [(entry.step, entry.state) for entry in found.entries] == [(100, "committed")]


def test_a_directory_with_much_else_is_listed_in_a_moment(where, monkeypatch):
    """Other folders are searched only three levels deep, and only a limited number of folders."""
    for number in range(30):
        deep = where / f"a{number:02d}" / "b" / "c" / "d"
        where.fs.makedirs(deep.path)
        where.fs.pipe_file((deep / "too-deep.pt").path, b"1")
        where.fs.pipe_file((where / f"a{number:02d}" / "x.pt").path, b"1")
    assert len(inventory(where).others) == 30
    monkeypatch.setattr("sparkring.checkpointing.inventory.FOLDERS", 10)
    assert len(inventory(where).others) == 9


def test_a_dead_link_is_no_obstacle(tmp_path: Path):
    """In spite of a dead link, the other files are listed, even an empty file."""
    (tmp_path / "x.pt").symlink_to(tmp_path / "gone.pt")
    (tmp_path / "y.pt").write_bytes(b"")
    assert {each.name for each in inventory(Location(fsspec.filesystem("file"), str(tmp_path), "d")).others} >= {"y.pt"}
