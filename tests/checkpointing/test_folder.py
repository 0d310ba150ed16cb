"""Directories of checkpoints: finding checkpoints, recognizing damage, and removing checkpoints."""

from __future__ import annotations

import os
import random
import re
import shutil
import uuid
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from texts import mentions

from sparkring.checkpointing import folder, tensors
from sparkring.checkpointing.directory import open_directory
from sparkring.checkpointing.entries import COMMIT, Commit, Entry, Last, Name
from sparkring.errors import CheckpointDamagedError, CheckpointError
from sparkring.runtime.storage import Location, locate


@pytest.fixture(params=["local", "memory"])
def directory(request, tmp_path):
    if request.param == "local":
        (tmp_path / "run1").mkdir()
        return locate(tmp_path / "run1")
    return locate(f"memory://{uuid.uuid4().hex}/run1")


def name(step, stamp=1_700_000_000_000, number=None):
    return str(Name(step, stamp, step if number is None else number))


def commit_of(file=None, **changes):
    files = (file,) if file else ()
    found = Commit(3, 1.5, files, {"loss": 0.5}, "lineage", "run", 2, False, "code", {"flights": "v1"})
    return found._replace(**changes)


def saved(directory, called, data=b"abc", **changes):
    """Save a checkpoint with one file that contains `data`, and return its commit."""
    from sparkring.checkpointing.digests import digest_of
    from sparkring.checkpointing.entries import File

    place = directory / called
    place.fs.makedirs(place.path, exist_ok=True)
    place.fs.pipe_file((place / "rank-0.safetensors").path, data)
    commit = commit_of(File("rank-0.safetensors", len(data), digest_of(data)), **changes)
    folder.write_commit(directory, called, commit)
    return commit


def states(directory):
    return {entry.name: (entry.state, entry.reason) for entry in folder.listing(directory)}


def test_commits_come_back(directory):
    """A commit is read back as it was written, even if it has values that JSON cannot represent."""
    commit = saved(directory, name(3), metrics={"loss": float("inf"), "ä": -0.0}, code='"\n\\')
    assert folder.read_commit(directory, name(3)) == commit
    assert folder.listing(directory) == [Entry(name(3), "committed", commit)]
    saved(directory, name(4), metrics={"loss": float("nan")})
    assert folder.read_commit(directory, name(4)).metrics["loss"] != folder.read_commit(directory, name(3)).metrics
    assert b"NaN" not in directory.fs.cat_file((directory / name(4) / COMMIT).path)


def test_newest_first(directory):
    """Checkpoints are ordered by the time at which they were saved, not by step. Other files are ignored."""
    order = [name(9, 1_700_000_000_000), name(5, 1_800_000_000_000, 2), name(7, 1_800_000_000_000, 10)]
    for each in order:
        saved(directory, each)
    fs = directory.fs
    for other in ("notes.txt", "00000001.x", "model/weights.bin", f"{name(3)}.old/commit.json"):
        fs.makedirs((directory / other).path.rpartition("/")[0], exist_ok=True)
        fs.pipe_file((directory / other).path, b"x")
    fs.pipe_file((directory / name(8)).path, b"a file that is called like one of ours")
    assert [entry.name for entry in folder.listing(directory)] == order[::-1]


def test_nothing_there(tmp_path, directory):
    """A directory that is empty or does not exist has no checkpoint."""
    assert folder.listing(directory) == []
    assert folder.listing(directory / "no") == []
    assert folder.look(directory, name(1)) is None
    with pytest.raises(FileNotFoundError):
        folder.read_commit(directory, name(1))


def test_begun_only(directory):
    """A folder without a commit is not a checkpoint."""
    place = directory / name(2)
    place.fs.makedirs(place.path)
    if directory.local:
        assert states(directory) == {name(2): ("partial", "")}
    place.fs.pipe_file((place / "rank-0.safetensors").path, b"half")
    assert states(directory) == {name(2): ("partial", "")}
    assert "not completed" in folder.check(directory, folder.listing(directory)[0])


def test_sizes(directory):
    """The listing notices a missing file or a wrong size, even in a process that has listed it undamaged."""
    commit = saved(directory, name(1))
    saved(directory, name(2))
    assert {state for state, _ in states(directory).values()} == {"committed"}
    directory.fs.pipe_file((directory / name(1) / "rank-0.safetensors").path, b"ab")
    directory.fs.rm_file((directory / name(2) / "rank-0.safetensors").path)
    assert states(directory) == {
        name(1): ("corrupt", "rank-0.safetensors has 2 bytes instead of 3"),
        name(2): ("corrupt", "rank-0.safetensors is missing"),
    }
    found = {entry.name: entry for entry in folder.listing(directory)}
    assert found[name(1)].commit == commit  # the commit can still be read
    assert folder.look(directory, name(1)).reason == found[name(1)].reason
    assert folder.check(directory, found[name(2)]) == "rank-0.safetensors is missing"


def test_commits_cut_anywhere(directory):
    """A commit that was cut off at any byte counts as damaged."""
    saved(directory, name(1))
    path = (directory / name(1) / COMMIT).path
    data = directory.fs.cat_file(path)
    for length in range(len(data)):
        directory.fs.pipe_file(path, data[:length])
        with pytest.raises(CheckpointDamagedError, match=r"commit.json .*not match .*digest"):
            folder.read_commit(directory, name(1))
        if length % 100 == 0:
            assert states(directory) == {name(1): ("corrupt", "commit.json does not match its digest")}
    directory.fs.pipe_file(path, data + b"\n")
    assert folder.look(directory, name(1)).state == "corrupt"
    directory.fs.pipe_file(path, data)
    assert folder.listing(directory)[0].state == "committed"


def test_one_bit_of_a_commit(directory):
    """A commit with a single changed bit counts as damaged."""
    saved(directory, name(1), code="é E 1e5")
    path = (directory / name(1) / COMMIT).path
    data = directory.fs.cat_file(path)
    for position in range(len(data)):
        bad = bytearray(data)
        bad[position] ^= 1 << random.Random(position).randrange(8)
        directory.fs.pipe_file(path, bytes(bad))
        with pytest.raises(CheckpointDamagedError):
            folder.read_commit(directory, name(1))


@pytest.mark.parametrize(
    "content",
    [{}, {"layout": 99}, {"layout": 1}, {"layout": 1, "files": 3}, {"layout": 1, "files": [["../x", 1, "xxh3_128:"]]}],
)
def test_commits_of_others(directory, content):
    """A complete commit with content that this version does not know counts as damaged."""
    place = directory / name(1)
    place.fs.makedirs(place.path)
    folder._write_sealed(place / COMMIT, content)
    assert folder.listing(directory)[0].state == "corrupt"


def test_every_byte(directory):
    """check() reads every byte, and notices one changed bit in any part of a file. A listing cannot notice this."""
    data = os.urandom(2 * tensors.CHUNK_BYTES + 5)
    saved(directory, name(1), data)
    (entry,) = folder.listing(directory)
    assert folder.check(directory, entry) == ""
    for position in (0, tensors.CHUNK_BYTES + 1, len(data) - 1):
        bad = bytearray(data)
        bad[position] ^= 1
        directory.fs.pipe_file((directory / name(1) / "rank-0.safetensors").path, bytes(bad))
        assert folder.listing(directory) == [entry]
        assert mentions(folder.check(directory, entry), "rank-0.safetensors", "not match")
    folder.remove(directory, entry)
    assert mentions(folder.check(directory, entry), "commit.json", "removed")


def test_removed(directory):
    """A checkpoint is removed with all its files. Removing it a second time is no error."""
    saved(directory, name(1))
    saved(directory, name(2))
    entry = folder.listing(directory)[1]
    folder.remove(directory, entry)
    folder.remove(directory, entry)
    assert list(states(directory)) == [name(2)]
    assert not directory.fs.exists((directory / name(1)).path)


class Watched(LocalFileSystem):
    """Local files. Notes the order of operations, and calls `before` ahead of each operation."""

    protocol = ("watched", "file")
    cachable = False
    asked: list
    before = staticmethod(lambda what, path: None)

    def _note(self, what, path):
        self.asked.append((what, path.rpartition("/")[2]))
        self.before(what, path)

    def cat_file(self, path, *others, **options):
        self._note("read", path)
        return super().cat_file(path, *others, **options)

    def rm_file(self, path):
        self._note("remove", path)
        super().rm_file(path)

    def rm(self, path, **options):
        self._note("remove all", path)
        super().rm(path, **options)


@pytest.fixture
def watched(tmp_path):
    fs = Watched()
    fs.asked = []
    return Location(fs, str(tmp_path), str(tmp_path))


def test_the_commit_goes_first(watched):
    """The commit is removed first, so that an interrupted removal does not leave a damaged checkpoint."""
    saved(watched, name(1))
    folder.remove(watched, Entry(name(1), "committed"))
    assert watched.fs.asked[0] == ("remove", COMMIT)
    assert not watched.fs.exists((watched / name(1)).path)


def test_commits_are_read_once(watched):
    """Hundreds of checkpoints are listed again without reading their commits again."""
    for step in range(200):
        saved(watched, name(step))
    assert len(folder.listing(watched)) == 200
    assert watched.fs.asked.count(("read", COMMIT)) == 200
    saved(watched, name(200))
    shutil.rmtree((watched / name(0)).path)
    assert [entry.step for entry in folder.listing(watched)] == list(range(200, 0, -1))
    assert watched.fs.asked.count(("read", COMMIT)) == 201


def test_removed_while_listed(watched):
    """A folder that another process removes during a listing is left out."""
    for step in range(3):
        saved(watched, name(step))
    watched.fs.before = lambda what, path: what == "read" and name(1) in path and shutil.rmtree(os.path.dirname(path))
    assert [entry.step for entry in folder.listing(watched)] == [2, 0]


def test_what_may_not_be_read(watched, monkeypatch):
    """If a directory cannot be read, the error gives its path. The directory does not count as empty."""

    def refuse(path, **options):
        raise PermissionError(13, "Permission denied", path)

    saved(watched, name(1))
    monkeypatch.setattr(watched.fs, "ls", refuse)
    with pytest.raises(
        CheckpointError, match=rf"the checkpoints in {watched.written} cannot .*read: Permission denied"
    ):
        folder.listing(watched)


def test_listings_that_fsspec_remembers(tmp_path):
    """Checkpoints that another process has added since are found: fsspec's cached listings are not used."""

    class Remembering(LocalFileSystem):
        protocol = ("remembering", "file")
        cachable = False
        seen = None

        def ls(self, path, detail=False, **options):
            if self.seen is None:
                self.seen = {}
            if path not in self.seen:
                self.seen[path] = super().ls(path, detail=True, **options)
            return self.seen[path] if detail else [info["name"] for info in self.seen[path]]

        def invalidate_cache(self, path=None):
            self.seen = {}

    directory = Location(Remembering(), str(tmp_path), "x")
    assert folder.listing(directory) == []
    saved(locate(tmp_path), name(1))
    assert [entry.step for entry in folder.listing(directory)] == [1]


def test_parts(directory):
    """The report that a rank has written its file can be read only when the report is complete."""
    from sparkring.checkpointing.entries import File

    place = directory / name(1)
    place.fs.makedirs(place.path)
    assert folder.read_part(directory, name(1), 3) is None
    file = File("rank-3.safetensors", 5, "xxh3_128:" + "0" * 32)
    folder.write_part(directory, name(1), 3, file, "NaN in w")
    assert folder.read_part(directory, name(1), 3) == (file, "NaN in w")
    path = (place / "rank-3.json").path
    data = directory.fs.cat_file(path)
    for length in range(len(data)):
        directory.fs.pipe_file(path, data[:length])
        assert folder.read_part(directory, name(1), 3) is None


def test_fsspec_has_what_is_asked(directory):
    """All methods that sparkring uses exist in fsspec's base class, and so in every file system."""
    for method in ("find", "ls", "cat_file", "exists", "size", "rm_file", "rm", "makedirs", "open", "invalidate_cache"):
        assert hasattr(fsspec.AbstractFileSystem, method)


def test_a_file_is_not_a_directory(tmp_path):
    """A run does not begin if it could not save its checkpoints."""
    path = tmp_path / "model.pt"
    path.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"model.pt .*file, not .*directory .*checkpoints"):
        open_directory(str(path), 2, "code", {})


def test_a_relative_path(tmp_path, monkeypatch):
    """Ranks use the folder below the notebook's, even if the cell changes the working directory first."""
    monkeypatch.chdir(tmp_path)
    found = open_directory("run1", 2, "code", {})
    monkeypatch.chdir("/")
    assert locate(found.here(SimpleNamespace(code="", run_id=""), Last()).directory).path == str(tmp_path / "run1")


def test_what_a_run_skips(directory):
    """A run that begins says which damaged checkpoints it skips, and from which one it continues instead."""
    for step in (1, 2, 3):
        saved(directory, name(step))
    assert mentions(
        open_directory(directory.written, 2, "code", {}).words(1.5),
        "step 3",
        "saved",
        f"{directory.written}",
        "--fresh",
    )
    for step, told in (
        (3, r"the damaged checkpoint of step 3 in .*run1: rank-0.* is missing; continues from step 2, saved"),
        (2, r"2 damaged checkpoints in .*run1, the newest of step 3: .* missing; continues from step 1, saved"),
        (1, r"3 damaged checkpoints in .*run1, the newest of step 3: .* missing; the cell runs without a checkpoint"),
    ):
        directory.fs.rm_file((directory / name(step) / "rank-0.safetensors").path)
        assert re.match(f"skipped {told}", open_directory(directory.written, 2, "code", {}).words(1.5))
    assert open_directory(directory.written, 2, "code", {}, fresh=True).words(1.5) == ""
