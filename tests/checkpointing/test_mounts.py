"""Checkpoints on storage that is not a disk: a mount of an object store, memory://, and an S3 server."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
from faulty import Mount

from sparkring.checkpointing import folder
from sparkring.checkpointing.store import checkpoints
from sparkring.errors import CheckpointError
from sparkring.runtime import resume_point
from sparkring.runtime.storage import locate

LAG = 30  # a number of changes: a save makes about three, or about six if it also removes a checkpoint


def state_of(step):
    return {"weights": np.full((30, 40), step, np.float32), "told": f"at step {step}"}


def goes_back(directory: str, **options) -> int:
    """Return the step that a new process would restore. Fail if the state is not the one saved at that step."""
    folder._remembered.clear()
    state = state_of(0)
    step = checkpoints(directory, **options).restore(state)
    assert state["told"] == f"at step {step}"
    assert (state["weights"] == np.float32(step)).all()
    return step


def step_of(path: str) -> int:
    """Return the step of the checkpoint that a file belongs to."""
    return int(path.split("/")[-2].partition(".")[0])


def save(store, *steps, **metrics):
    for step in steps:
        store.save(step, state_of(step), metrics)
        store.wait()


def files(directory: str) -> list[str]:
    """Return the names of all files below a directory."""
    location = locate(directory)
    location.fs.invalidate_cache()
    return sorted(path.rpartition("/")[2] for path in location.fs.find(location.path))


def remembers(directory: str, **options) -> None:
    """Check that checkpoints in `directory` can be saved and restored, that old ones go, and that damage is noticed."""
    store = checkpoints(directory, keep=2, best="loss", **options)
    for step in range(1, 7):
        save(store, step, loss=abs(step - 2))
    assert goes_back(directory) == 6
    assert store.latest().step == 6
    assert store.best().step == 2
    assert [entry.step for entry in store.list()] == [6, 5, 2]
    assert files(directory) == ["commit.json"] * 3 + ["rank-0.safetensors"] * 3
    assert goes_back(directory, best="loss") == 6
    assert (store.load("best")["weights"] == 2).all()
    assert store.load(5)["told"] == "at step 5"
    newest, before, _ = store.list()
    for name in ("rank-0.safetensors", "commit.json"):
        file = locate(directory) / newest.name / name
        whole = file.fs.cat_file(file.path)
        for damaged in (whole[:-1], bytes([whole[0] ^ 1]) + whole[1:], b""):
            file.fs.pipe_file(file.path, damaged)
            assert goes_back(directory) == 5
            assert name in folder.check(locate(directory), newest)
        file.fs.pipe_file(file.path, whole)
    assert folder.check(locate(directory), newest) == ""
    assert goes_back(directory) == 6
    folder.remove(locate(directory), newest)
    assert goes_back(directory) == 5
    with pytest.raises(CheckpointError, match=re.escape(newest.name)):
        store.restore(state_of(0), newest.name)
    save(store, 7, loss=9)
    assert [entry.step for entry in store.list()] == [7, before.step, 2]


# ── a mount ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def mount(tmp_path, monkeypatch):
    """`mount(lag=…, …)` puts dbfs:/ on a Mount. A test fails if it tries refused operations other than fsync."""
    root = tmp_path / "mount"
    root.mkdir()
    monkeypatch.setenv("SPARKRING_DBFS_ROOT", str(root))
    made = []

    def enter(**options):
        made.append(Mount(root, **options))
        return made[-1]

    yield enter
    assert {what for each in made for what in each.refused} <= {"fsync"}


@pytest.mark.parametrize("syncs", [True, False])
def test_a_mount_that_only_writes_in_one_go(mount, syncs):
    """Saves need no seek, append or rename, and they work even if the mount cannot sync."""
    with mount(syncs=syncs) as found:
        remembers("dbfs:/ml/run1")
    assert bool(found.refused) is not syncs


def test_listings_that_are_stale(mount, run, monkeypatch):
    """No checkpoint is lost, and a run finds its resume point by name.

    Once listings are up to date, all old checkpoints are removed.
    """
    with mount(lag=LAG) as found:
        store = checkpoints("dbfs:/ml/run1", keep=2)
        for step in range(1, 30):
            save(store, step)
            seen = [entry.step for entry in store.list() if entry.state == "committed"]
            assert seen == sorted(seen, reverse=True)
            there = {step_of(path) for path in found.there() if path.endswith("commit.json")}
            assert {step, max(step - 1, 1)} <= there
            assert len(there) < 2 + LAG // 2
            if seen:
                assert goes_back("dbfs:/ml/run1") == seen[0]
        assert seen[0] < 29, "listings were not stale"
        (newest,) = {path.split("/")[-2] for path in found.there() if step_of(path) == 29}
        run("dbfs:/ml/run1", resume=newest)
        assert goes_back("dbfs:/ml/run1") == 29
        monkeypatch.setattr(resume_point, "_current", resume_point.Here())
        found.settle()
        assert goes_back("dbfs:/ml/run1") == 29
        save(store, 30)
        found.settle()
        save(store, 31)
        found.settle()
        assert [entry.step for entry in store.list()] == [31, 30]
        assert files("dbfs:/ml/run1") == ["commit.json"] * 2 + ["rank-0.safetensors"] * 2


def test_a_file_may_be_too_large_for_a_mount(mount, capsys):
    """The error says which save failed, where and why, and what to do. Earlier checkpoints are kept."""
    with mount(limit_bytes=50_000):
        store = checkpoints("dbfs:/ml/run1")
        save(store, 1)
        large = {"weights": np.zeros(20_000), "told": ""}
        store.save(2, large)
        with pytest.raises(CheckpointError, match=r"step 2 .*not .*saved .*dbfs:/ml/run1: File too large\. \w+"):
            store.wait()
        assert goes_back("dbfs:/ml/run1") == 1
        assert files("dbfs:/ml/run1") == ["commit.json", "rank-0.safetensors"]
        save(store, 3)
        assert goes_back("dbfs:/ml/run1") == 3


# ── memory and S3 ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("background", [True, False])
def test_memory(background):
    """Checkpoints work on memory://, fsspec's simplest file system."""
    remembers(f"memory://{uuid.uuid4().hex}/run1", background=background)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start an S3 server, set its address and credentials in the environment, and yield a bucket's URL."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "SPARKRING_TEST"},
    )
    assert process.stdout is not None
    said = ""
    while not (address := re.search(r"http://127\.0\.0\.1:\d+", said)):
        line = process.stdout.readline()
        assert line, f"the server has ended: {said}"
        said += line
    settings = {"AWS_ENDPOINT_URL": address[0], "AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1"}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem().mkdir("models")
        yield "s3://models"

        def close() -> None:
            s3fs.S3FileSystem.clear_instance_cache()
            gc.collect()

        # This needs a thread: in the main thread, s3fs of 2023 makes an event loop to close its connections, and then
        # closes neither the loop nor the connections.
        closing = threading.Thread(target=close)
        closing.start()
        closing.join()
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def bucket(watch, request) -> str:
    """A bucket's URL. The server and the connections to it outlive the test."""
    return watch.except_for(lambda: request.getfixturevalue("server"))


@pytest.mark.parametrize(
    "background", [True, pytest.param(False, marks=pytest.mark.extended("library", "in the background"))]
)
def test_s3(bucket, watch, background):
    """Checkpoints work on an object store as they do in a folder."""
    watch.except_for(lambda: remembers(f"{bucket}/{uuid.uuid4().hex}/run1", background=background))


def test_a_bucket_that_is_not_there(bucket, watch):
    """The error gives the path, and says to check the bucket."""
    with pytest.raises(CheckpointError, match=r"s3://nowhere/run1.*bucket"):
        watch.except_for(lambda: save(checkpoints("s3://nowhere/run1"), 1))
