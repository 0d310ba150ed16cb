"""Two runs of different processes that save to one directory."""

import json
import os
import subprocess
import sys
import time

import pytest

from sparkring.checkpointing import owners
from sparkring.checkpointing.owners import owned
from sparkring.errors import CheckpointError
from sparkring.runtime.storage import locate

OTHER = """
import sys
from sparkring.checkpointing.owners import owned
from sparkring.runtime.storage import locate
with owned(locate(sys.argv[1]), "other-run"):
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process whose run saves to the directory."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"up\n"
        yield process
        process.kill()


def write(tmp_path, **changed):
    """Leave the file of a run on another machine; return it."""
    now = time.time()
    owner = owners.Owner("far-run", "ada", "far", "far machine", "7 123", now, now)._replace(**changed)
    file = tmp_path / ".far-run.owner.json"
    file.write_text(json.dumps(owner._asdict()))
    return file


def test_a_second_process_is_refused(tmp_path, other):
    """The error names the run, the process and since when. When the other run has ended, nothing is left."""
    told = f"in use by run other-run .*process {other.pid}.*, since 20"
    with pytest.raises(CheckpointError, match=told), owned(locate(tmp_path), "mine"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".other-run.owner.json"]
    other.stdin.close()
    other.wait()
    with owned(locate(tmp_path), "mine"), owned(locate(tmp_path), "of the same process"):
        assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_killed_owner_is_recognised_at_once(tmp_path, other):
    """Its file is removed, too."""
    other.kill()
    other.wait()
    with owned(locate(tmp_path), "mine"):
        assert [path.name for path in tmp_path.iterdir()] == [".mine.owner.json"]


def test_a_pid_that_is_used_again_is_another_process(tmp_path):
    """The start of a process tells it from an earlier one with the same pid."""
    write(tmp_path, machine=owners._machine(), process=f"{os.getppid()} 1")
    with owned(locate(tmp_path), "mine"):
        pass


def test_an_owner_on_another_machine_is_dead_if_its_file_is_old(tmp_path, monkeypatch):
    """By the clock of the storage: what the other machine's clock says does not count."""
    write(tmp_path, since=time.time() + 3600, refreshed=time.time() - 3600)
    with pytest.raises(CheckpointError, match=r"ada on far.* try again in 60 s"), owned(locate(tmp_path), "mine"):
        pass
    file = write(tmp_path, refreshed=time.time() + 3600)
    old = time.time() - owners.DEAD_AFTER_S - 5
    os.utime(file, (old, old))
    monkeypatch.setattr(owners, "changed_at", lambda info: info["mtime"])  # the file has just been created
    with owned(locate(tmp_path), "mine"):
        assert not file.exists()


def test_the_file_is_written_again(tmp_path, monkeypatch):
    """So that other machines see that the run is alive."""
    monkeypatch.setattr(owners, "REFRESH_S", 0.01)
    monkeypatch.setattr(owners, "LOOK_EVERY_S", 0.01)
    folder = tmp_path / "new"
    with owned(locate(folder), "mine"):
        folder.mkdir()  # as the ranks do when they save for the first time
        while not (file := folder / ".mine.owner.json").exists():
            time.sleep(0.01)
        first = file.read_text()
        while file.read_text() == first:
            time.sleep(0.01)
    assert list(folder.iterdir()) == []


def test_two_runs_in_a_directory_that_neither_has_made_yet(tmp_path, monkeypatch, capsys):
    """The second one says so as soon as the directory is there."""
    monkeypatch.setattr(owners, "LOOK_EVERY_S", 0.01)
    folder = tmp_path / "new"
    with owned(locate(folder), "mine"):
        (tmp_path / "made").mkdir()
        write(tmp_path / "made", since=time.time() - 1)
        (tmp_path / "made").rename(folder)
        while "far-run" not in capsys.readouterr().err:
            time.sleep(0.01)


def test_a_file_that_is_none_of_ours_is_ignored(tmp_path):
    (tmp_path / ".x.owner.json").write_text("{")
    with owned(locate(tmp_path), "mine"):
        pass
    with owned(locate("memory://owners/run"), "mine"):
        pass
